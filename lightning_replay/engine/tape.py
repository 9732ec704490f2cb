# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A stand-in for CUDA graphs on any device: a tape of dispatched operations.

Operations are recorded below autograd and run again in order on the very tensors of the recording, each result copied
into the memory it had then. That gives a tape the properties of a CUDA graph that matter for correctness: addresses are
fixed, Python is not run again, and Python scalars are frozen. It makes nothing faster.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_replay.engine.layout import without_expanded
from lightning_replay.engine.modes import without_autocast
from lightning_replay.engine.operations import host_access, is_allocation, shares_memory, user_line, written_tensors
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason

T = TypeVar("T")


class TapePool:
    """Keeps track of every tensor that a tape of one slot may write, so that a poisoned replay can fill them."""

    def __init__(self, poison: bool = False) -> None:
        self._poison = poison
        self._owned: list[weakref.ref[Tensor]] = []

    def disturb(self, always: bool = False) -> None:
        """Does the worst that a forward replay may do to memory of its pool: overwrite all of it."""
        if self._poison or always:
            fill_with_garbage(self.owned())

    def own(self, tensor: Tensor) -> None:
        """Counts a tensor among those the pool's graphs write."""
        self._owned.append(weakref.ref(tensor))

    def owned(self) -> list[Tensor]:
        """Returns the tensors still alive."""
        alive = [(ref, tensor) for ref in self._owned if (tensor := ref()) is not None]
        self._owned = [ref for ref, _ in alive]
        return [tensor for _, tensor in alive]

    def bytes(self) -> int:
        """Returns the memory of all tensors of the pool, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.owned())


class _Recorder(TorchDispatchMode):
    """Runs each operation and writes it on the tape."""

    def __init__(self, tape: "Tape", device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._device = device
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}

    def _frozen(self, value: Any) -> Any:
        """Returns an alias without autograd history; the original is kept so that its id stays unique."""
        if not isinstance(value, Tensor):
            return value
        if (known := self._aliases.get(id(value))) is None:
            known = self._aliases[id(value)] = (value, value.detach())
        return known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (finding := host_access(func, args, kwargs, self._device)) is not None:
            raise CaptureError(finding)
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # torch.tensor(...) is made anew in every replay
        result = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            # Other sizes and strides on the same memory: nothing to run again, but later operations see the new view.
            for tensor in written_tensors(func, args, kwargs):
                self._aliases[id(tensor)] = (tensor, tensor.detach())
            return result
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        targets = [None if shares_memory(leaf, arguments) else self._frozen(leaf) for leaf in results]
        if func._schema.is_mutable or any(target is not None for target in targets):
            frozen_args, frozen_kwargs = tree_map(self._frozen, (args, kwargs))
            self._tape.append(func, frozen_args, frozen_kwargs, targets)
        return result


_HOST_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})


class _HostReads(TorchFunctionMode):
    """Refuses what reads a CPU tensor without an operation; on another device a copy, which is seen, comes first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            name = f"Tensor.{func.__name__}"
            raise CaptureError(Finding(Reason.HOST_SYNC, user_line(), "work that the device can do alone", name))
        return func(*args, **(kwargs or {}))


class Tape:
    """The operations of one recording."""

    atomic = False

    def __init__(self, pool: TapePool, overwrites_pool: bool) -> None:
        self._pool = pool
        self._overwrites_pool = overwrites_pool
        self._entries: list[tuple[Any, Any, Any, list[Tensor | None], bool]] = []
        self._replayed = False

    def append(self, func: Any, args: Any, kwargs: Any, targets: list[Tensor | None]) -> None:
        """Adds an operation. A target is a result in memory of its own, None one that lies in an argument's.

        The gradient mode is kept because some operations read it (oneDNN's RNN makes a workspace only if it is on).
        """
        self._entries.append((func, args, kwargs, targets, torch.is_grad_enabled()))
        for target in targets:
            if target is not None:
                self._pool.own(target)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operations again."""
        if self._overwrites_pool:
            # Unlike a CUDA graph, a tape ran while it was recorded: what it left must not pass for a result.
            self._pool.disturb(always=not self._replayed)
            self._replayed = True
        with without_autocast():  # the operations were recorded below it and are cast already
            self._run()

    def _run(self) -> None:
        for func, args, kwargs, targets, grad in self._entries:
            if is_allocation(func):
                continue
            torch._C._set_grad_enabled(grad)  # the caller's mode is put back by `replay`'s decorator
            results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for target, source in zip(targets, results, strict=True):
                if target is not None:
                    without_expanded(target).copy_(without_expanded(source))


def fill_with_garbage(tensors: list[Tensor]) -> None:
    """Fills tensors with NaN, or a large odd number where the dtype has none."""
    for tensor in tensors:
        target = without_expanded(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            target.fill_(float("nan"))
        else:
            target.fill_(tensor.dtype == torch.bool or 113)


class TapeBackend:
    """Records tapes.

    Args:
        device: The device whose operations are recorded.
        poison: Fill everything that the graphs of a pool may write with NaN before a forward replay, as if each byte
            of it had been reused. For tests.
    """

    name = "tape"

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self.device = device
        self._poison = poison

    def new_pool(self) -> TapePool:
        """Returns an empty pool."""
        return TapePool(self._poison)

    def prepare(self) -> None:
        """Does nothing."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs a callable."""
        return run()

    def capture(self, pool: TapePool, run: Callable[[], T], *, overwrites_pool: bool = False) -> tuple[Tape, T]:
        """Records the operations of a callable while they run."""
        tape = Tape(pool, overwrites_pool)
        with _compilation_off(), _HostReads(), _Recorder(tape, self.device):
            result = run()
        return tape, result

    def allocate(self, pool: TapePool, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Runs a callable; what no tape of the pool writes is not the pool's."""
        return make()

    def clear(self, pool: TapePool) -> None:
        """Does nothing: the first replay of a tape begins with garbage in any case."""

    def unnoticed(self) -> contextlib.AbstractContextManager[None]:
        """Nothing gives a tape away."""
        return contextlib.nullcontext()

    def random_state(self) -> Tensor:
        """Returns the state of the device's default generator."""
        return torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        """Puts the state of the device's default generator back."""
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.device)

    def trim(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing to give back: tapes are plain objects."""


def _compilation_off() -> contextlib.AbstractContextManager[Any]:
    """Has compiled code run eagerly: under a mode, torch.compile gives up on it, and remembers that for good."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch >= 2.6
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[Any], set_stance("force_eager"))
