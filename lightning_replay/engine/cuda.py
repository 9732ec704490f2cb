# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""CUDA graphs behind the backend protocol.

Note [cuBLAS workspaces]
    cuBLAS works in scratch memory that torch takes from the caching allocator, for each thread and stream, when it is
    first needed. A graph keeps its address. Whoever clears these workspaces (torch.compile does around CUDA graphs of
    its own) hands that memory to the next tensors, and a replay would write into them. So the capture stream takes its
    workspace inside of a small capture, out of a pool that nothing else allocates from.

    The workspaces of other streams served the native steps before the first recording, and are as large again. They are
    cleared then, as Lightning does before and after a fit, and taken anew by whatever needs them; unless a graph of
    someone else may know them.
"""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_replay.engine.host import LiftingMode
from lightning_replay.engine.operations import user_line
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason

T = TypeVar("T")

_OWN_POOLS: set[tuple[int, ...]] = set()
"""The allocator's names of all pools made here. It never uses a name again."""

_FROZEN = gc.get_freeze_count()
"""Objects that the garbage collector never shows, as Python itself leaves them."""

_OWN_GRAPHS: "weakref.WeakSet[torch.cuda.CUDAGraph]" = weakref.WeakSet()


class CudaPool:
    """One private memory pool of the caching allocator.

    Args:
        device: The CUDA device, with its index.

    Attributes:
        handle: The allocator's name of the pool.
        anchor: A small graph in the pool, made before the first other one. The allocator gives a pool up with its last
            graph and refuses captures into what is left of it; the anchor outlives the recordings.
        allocated: Addresses of what was given out beside graphs, whether or not it is still in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        _OWN_POOLS.add(tuple(self.handle))
        self.anchor: Any = None
        self.allocated: set[int] = set()
        self._device = device

    def bytes(self) -> int:
        """Returns the memory that the allocator reserves for the pool, in bytes."""
        return sum(int(segment["total_size"]) for segment in self.segments())

    def segments(self) -> list[dict[str, Any]]:
        """Returns what the allocator tells of the pool's memory."""
        return [
            segment
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._device.index and tuple(segment["segment_pool_id"]) == tuple(self.handle)
        ]


class _OnStream(LiftingMode):
    """Runs each operation on one stream, whichever is current for the code that calls it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.cuda.stream(self._stream):
            return func(*args, **(kwargs or {}))


class CudaGraphBackend:
    """Records CUDA graphs on one capture stream.

    Capture is `thread_local`, so that loader threads which allocate pinned memory neither fail nor break it, and the
    garbage collector is off meanwhile: destroying an older graph during a capture would end it.

    Args:
        device: The CUDA device, with its index.
        spares_memory: Return cached memory around a capture. Without it the allocator goes on as it did, and gives
            the next steps the addresses that it gave the last ones.
    """

    name = "cuda"

    def __init__(self, device: torch.device, spares_memory: bool = True) -> None:
        self.device = device
        self._spares_memory = spares_memory
        self._workspaces: CudaPool | None = None
        self._stream = torch.cuda.Stream(device)
        self._caller: torch.cuda.Stream | None = None
        self._generator = torch.cuda.default_generators[device.index]

    def new_pool(self) -> CudaPool:
        """Returns an empty pool."""
        return CudaPool(self.device)

    def prepare(self) -> None:
        """Gives the capture stream its cuBLAS workspace. See Note [cuBLAS workspaces]."""
        square, product = torch.zeros(2, 16, 16, device=self.device)
        if self._workspaces is None:
            torch.mm(square, square)  # makes the handle, which a capture cannot
            self._workspaces = self.new_pool()
            if not _others_have_graphs():
                torch._C._cuda_clearCublasWorkspaces()
        # Each time: others may have cleared it.
        self.capture(self._workspaces, lambda: torch.mm(square, square, out=product))

    @contextlib.contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        """Makes the capture stream current; work before and after on the caller's stream stays ordered."""
        self._caller = caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs a callable on the capture stream and waits for it.

        Raises:
            CaptureError: If the callable made the host wait for the device; a capture of it would have failed, and a
                failed capture costs the generator and every recording.
        """
        self._empty_cache()  # the native step's activations lie in the caller's stream, out of reach from here
        with self._on_capture_stream(), _sync_warnings() as waits:
            result = run()
        if waits:
            raise CaptureError(Finding(Reason.HOST_SYNC, waits[0], "work that the device can do alone", "a host sync"))
        torch.cuda.synchronize(self.device)
        return result

    def capture(self, pool: CudaPool, run: Callable[[], T], *, overwrites_pool: bool = False) -> tuple[Any, T]:
        """Records what a callable launches."""
        if pool.anchor is None:
            pool.anchor, _ = self._capture(pool.handle, self._launch())
        return self._capture(pool.handle, run)

    def allocate(self, pool: CudaPool, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Runs a callable that only allocates, out of a pool."""
        launch = self._launch()

        def run() -> list[Tensor]:
            launch()
            return make()

        _, made = self.capture(pool, run)
        pool.allocated.update(tensor.untyped_storage().data_ptr() for tensor in made)
        return made

    def _launch(self) -> Callable[[], Any]:
        """Returns what launches something and allocates nothing: torch warns of graphs that are empty."""
        return torch.zeros(1, device=self.device).zero_

    def _capture(self, handle: Any, run: Callable[[], T]) -> tuple[Any, T]:
        graph = torch.cuda.CUDAGraph()
        _OWN_GRAPHS.add(graph)
        torch.cuda.synchronize(self.device)
        self._empty_cache()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self._on_capture_stream():
                try:
                    graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, handle)
                    raise
        finally:
            if collecting:
                gc.enable()
        torch.cuda.synchronize(self.device)
        self._empty_cache()
        return graph, result

    def clear(self, pool: CudaPool) -> None:
        """Fills a pool with zeros.

        What is launched while it is captured, but not captured, works on what lies in the pool: often the very values
        of the warm-up, which the device hands out again as they are. Its result would pass for that of a replay.
        """
        for segment in pool.segments():
            for block in segment["blocks"]:
                if block["address"] not in pool.allocated:
                    memory = torch._C._construct_storage_from_data_pointer(block["address"], self.device, block["size"])
                    torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory).zero_()

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Makes the caller's stream current, and runs each operation on the capture stream.

        Libraries that ask whether a capture is under way ask for the current stream, and take another way if it is:
        the recorded operations would not be the native ones. What a library launches without torch is not captured so;
        the trial replay differs then.
        """
        assert self._caller is not None
        with torch.cuda.stream(self._caller), _OnStream(self._stream):
            yield

    def _empty_cache(self) -> None:
        if self._spares_memory:
            torch.cuda.empty_cache()

    def _abandon(self, graph: Any, handle: Any) -> None:
        """Ends a failed capture so that the stream, the allocator and the generator are usable again."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # an asynchronous error of the capture surfaces here, once
            torch.cuda.synchronize(self.device)
        with contextlib.suppress(RuntimeError):  # capture_end gave up before it told the allocator
            torch._C._cuda_endAllocateToPool(self.device.index, handle)
            torch._C._cuda_releasePool(self.device.index, handle)
        # The generator still believes that it is being captured; the end of a capture that succeeds tells it otherwise.
        mending = torch.cuda.CUDAGraph()
        mending.capture_begin(capture_error_mode="thread_local")
        torch.empty(4, device=self.device).uniform_()
        mending.capture_end()

    def random_state(self) -> Tensor:
        """Returns the state of the device's default generator (kept on the host: no sync)."""
        return self._generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        """Puts the state of the device's default generator back."""
        self._generator.set_state(state)

    def trim(self) -> None:
        """Returns memory that is cached and unused to the device."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Waits for replays in flight and returns cached memory."""
        self._workspaces = None
        self.trim()


def _others_have_graphs() -> bool:
    """Tells whether anyone else in this process may have a CUDA graph: its memory, or itself, is there."""
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    if not pools <= _OWN_POOLS | {(0, 0)} or gc.get_freeze_count() > _FROZEN:
        return True
    graphs = [o for o in gc.get_objects() if issubclass(type(o), torch.cuda.CUDAGraph)]
    return any(graph not in _OWN_GRAPHS for graph in graphs)


@contextlib.contextmanager
def _sync_warnings() -> Iterator[list[str]]:
    """Collects the places where the host waited for the device."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    shown = warnings.showwarning

    with warnings.catch_warnings():
        warnings.simplefilter("always")

        def note(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                places.append(user_line())
            elif "Synchronization debug mode" not in str(message):
                shown(message, *args, **kwargs)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
