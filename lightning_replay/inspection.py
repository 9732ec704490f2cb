# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Watch one run of a region, below autograd, for what a recording cannot hold."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from lightning_replay.engine.host import HostConstants, HostValues, LiftingMode, host_values
from lightning_replay.engine.layout import is_plain
from lightning_replay.engine.operations import crossing, host_access, user_line, written_tensors
from lightning_replay.engine.reads import Origin, Origins, is_read, read
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason

Trace = list[tuple[Any, ...]]
"""The operations of a forward pass with their non-tensor arguments, and the values that come from the host."""


_LIFT = torch.ops.aten.lift_fresh.default
"""What `torch.tensor(...)` does with the memory that it has filled."""

_NUMBER = "a number read from the device"


class Tracer(LiftingMode):
    """Writes down the operations of a forward pass, or compares them with those of an earlier one.

    Attributes:
        trace: The operations so far.
        difference: The first deviation from the expected trace.
        listening: Whether operations belong to the trace.
        access: The first operation in which the host took part: why a deviation came about, if there is one.

    Args:
        name: Dotted path of the region.
        expected: The trace of an earlier run with the same signature.
        device: The device of the region.
        inputs: The region's arguments.
        buffers: The region's buffers.
    """

    def __init__(
        self,
        name: str,
        expected: Trace | None,
        device: torch.device,
        inputs: Iterable[Tensor],
        buffers: Iterable[Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins = Origins(inputs, buffers)
        self._name = name
        self._device = device
        self.access: Finding | None = None
        self._expected = expected
        self.listening = True
        self.trace: Trace = []
        self.difference: Finding | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if self.origin(func, args) is not None:
            self.note_read(result)
        self._origins.note(func, args, kwargs or {}, result)
        return result

    def origin(self, func: Any, args: Any) -> Origin | None:
        """Returns where a number that an operation reads comes from; None if that is unknown, or it reads none."""
        return self._origins.of(args[0]) if self.listening and is_read(func, args, self._device) else None

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Adds an operation."""
        if not self.listening:
            return
        if self.access is None and self.origin(func, args) is None:
            finding = host_access(func, args, kwargs, self._device)
            self.access = None if finding is not None and finding.reason is Reason.HOST_TENSOR else finding
        host = crossing(func, args, kwargs) or (args if func is _LIFT else ())
        values = {id(tensor): host_values(tensor) for tensor in host}
        self._add((func, *(values.get(id(leaf)) or _frozen(leaf) for leaf in tree_leaves((args, kwargs)))))

    def note_read(self, number: Any) -> None:
        """Adds a number that was read from the device."""
        self._add((_NUMBER, _frozen(number)))

    def note_values(self, name: str, values: tuple[Any, ...]) -> None:
        """Adds plain values; of a tensor only that it is one."""
        self._add((name, *map(_frozen, values)))

    def _add(self, entry: tuple[Any, ...]) -> None:
        if self._expected is not None and self.difference is None:
            position = len(self.trace)
            earlier = self._expected[position] if position < len(self._expected) else None
            if entry != earlier:
                reason = Reason.HOST_TENSOR if _differ_in_host_values(earlier, entry) else Reason.PYTHON_VALUE
                if earlier is not None and earlier[0] == entry[0] == _NUMBER:
                    reason = Reason.HOST_READ
                self.difference = Finding(reason, user_line(), _show(earlier), _show(entry))
        self.trace.append(entry)

    def begin_forward(self) -> None:
        """Starts listening, if it is not listening from the beginning."""
        self.listening = True

    def end_forward(self) -> None:
        """Stops listening: what follows is the backward pass."""
        self.listening = False
        if self._expected is not None and self.difference is None and len(self.trace) != len(self._expected):
            actual = f"{len(self.trace)}"
            self.difference = Finding(Reason.PYTHON_VALUE, self._name, f"{len(self._expected)} operations", actual)


class Inspector(Tracer):
    """Refuses the first operation that a recording cannot hold, before it does harm.

    Attributes:
        foreign: Tensors used that are neither arguments, members of the region, nor made in it. Their addresses are
            frozen into a recording, so it must keep them alive. The constants are among them.
        finding: What it refused, whatever became of the error on its way out of the region.
        constants: What stands for the host in a recording: device constants in place of host tensors that the region
            makes, and the numbers that it reads.

    Args:
        name: Dotted path of the region.
        expected: The trace of an earlier run with the same signature.
        device: The device of the recording.
        inputs: The region's arguments; writing one is a finding.
        parameters: The region's parameters; writing one is a finding.
        buffers: The region's buffers.
        unwritten: Those of them that the region leaves as they are.
        random_state: Reads the state of the device's default generator, which nothing but operations may move.
    """

    def __init__(
        self,
        name: str,
        expected: Trace | None,
        device: torch.device,
        inputs: Iterable[Tensor],
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor],
        unwritten: Iterable[Tensor],
        random_state: Callable[[], Tensor],
    ) -> None:
        inputs, buffers = list(inputs), list(buffers)
        super().__init__(name, expected, device, inputs, unwritten)
        self._random_state = random_state
        self._random = random_state()
        self._inputs = {_address(tensor) for tensor in inputs if tensor.numel()}
        self._parameters = {_address(tensor) for tensor in parameters if tensor.numel()}
        self._known = self._inputs | self._parameters | {_address(tensor) for tensor in buffers}
        self.foreign: list[Tensor] = []
        self._others: set[int] = set()
        self.finding: Finding | None = None
        self.constants = HostConstants(device)
        self._made_on_host: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (origin := self.origin(func, args)) is not None:
            return self._read(func, args, kwargs, origin)
        if (finding := self._check_host(func, args, kwargs)) is not None:
            self.finding = finding
            raise CaptureError(finding)
        given = (args, kwargs)
        args, kwargs = self.constants.replaced(func, args, kwargs, make=True)
        finding = (
            host_access(func, args, kwargs, self._device)
            or self._check_writes(func, args, kwargs)
            or (self._check_generator() if torch.Tag.nondeterministic_seeded in func.tags else None)
        )
        if finding is not None:
            self.finding = finding
            raise CaptureError(finding)
        self.note(func, *given)
        for leaf in tree_leaves((args, kwargs)):
            strange = isinstance(leaf, Tensor) and leaf.numel() and _address(leaf) not in self._known
            if strange and leaf.device.type == self._device.type:
                self._known.add(_address(leaf))
                if func is not _LIFT:  # torch.tensor(...) has just made it
                    self._others.add(_address(leaf))
                self.foreign.append(leaf.detach())
        state = self._random_state()
        result = func(*args, **kwargs)
        self._origins.note(func, *given, result)
        self._note_draw(state)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel():
                self._known.add(_address(leaf))  # a foreign tensor is alive all the time and cannot take this address
        self._keep_host(func, args, kwargs, result)
        return result

    def _read(self, func: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        """Reads a number that can be read again before each replay."""
        self.note(func, args, kwargs)
        number = read(args[0])
        self.note_read(number)
        self.constants.reads.add(origin, number)
        return number

    def begin(self) -> None:
        """Reads the generator where the run begins, before the forward pass."""
        self.listening = False
        self._random = self._random_state()

    def end_forward(self) -> None:
        """Stops listening, and looks whether the generator was set after the last operation."""
        super().end_forward()
        with _disable_current_modes():
            self.finding = self.finding or self._check_generator()

    def _note_draw(self, before: Tensor) -> None:
        """Follows the generator over an operation. Setting it is no harm as long as nothing is drawn then."""
        after = self._random_state()
        if torch.equal(before, after):
            return
        if (finding := None if torch.equal(before, self._random) else self._check_generator()) is not None:
            self.finding = finding
            raise CaptureError(finding)
        self._random = after

    def _check_generator(self) -> Finding | None:
        if torch.equal(self._random, self._random_state()):
            return None
        return Finding(Reason.HOST_RANDOM, user_line(), "random state moved by operations only", "it was set in Python")

    def _check_host(self, func: Any, args: Any, kwargs: Any) -> Finding | None:
        """Finds a host tensor that the next step may find with other values, or that a replay would not change."""
        if self._device.type == "cpu":
            return None
        tensors = crossing(func, args, kwargs)
        written = [tensor for tensor in written_tensors(func, args, kwargs) if tensor.device.type == "cpu"]
        if tensors and written:
            return Finding(Reason.HOST_SYNC, user_line(), f"tensors that stay on {self._device}", f"{func} to the CPU")
        expected = f"tensors on {self._device}, or made in the call from constants"
        if not all(map(self._is_made_on_host, (*tensors, *written))):
            actual = f"{func} with a CPU tensor that was there before, or is no plain one"
            return Finding(Reason.HOST_TENSOR, user_line(), expected, actual)
        if tensors and self._expected is None:
            return Finding(Reason.HOST_TENSOR, user_line(), expected, f"{func} with a CPU tensor seen only once")
        return None

    def _is_made_on_host(self, tensor: Tensor) -> bool:
        return is_plain(tensor) and (not tensor.numel() or _address(tensor) in self._made_on_host)

    def _keep_host(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the host tensors that are made from nothing but Python values and others of their kind."""
        if self._device.type == "cpu":
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        constant = func is _LIFT or all(t.device.type == "cpu" and self._is_made_on_host(t) for t in given)
        for leaf in (*tree_leaves(result), *written_tensors(func, args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
                if constant:
                    self._made_on_host[_address(leaf)] = leaf.untyped_storage()  # so that its address is not reused
                else:
                    self._made_on_host.pop(_address(leaf), None)

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> Finding | None:
        if not func._schema.is_mutable:
            return None
        for tensor in written_tensors(func, args, kwargs):
            if _address(tensor) in self._inputs:
                return Finding(Reason.INPUT_WRITTEN, user_line(), "arguments that are only read", str(func))
            address = _address(tensor)
            if address and (address in self._others or address not in self._known):
                expected = "tensors of other objects that are only read"
                return Finding(Reason.ATTRIBUTE_WRITTEN, user_line(), expected, f"{func} in place")
            if _address(tensor) in self._parameters:
                return Finding(Reason.PARAMETER_WRITTEN, user_line(), "parameters that are only read", str(func))
        return None


@contextlib.contextmanager
def handing_out(name: str, *values: Any) -> Iterator[None]:
    """Surrounds a call by which a region hands values to someone else whose work is not part of it.

    Args:
        name: What is called, for messages.
        *values: What it is given: belongs to the trace of the run, if one is written.
    """
    tracers = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tracer) and mode.listening]
    for tracer in tracers:
        tracer.note_values(name, values)
        tracer.listening = False
    try:
        yield
    finally:
        for tracer in tracers:
            tracer.listening = True


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _frozen(leaf: Any) -> Any:
    """Returns what of an argument two runs have to share: nothing of a tensor, the exact value of anything else."""
    if isinstance(leaf, Tensor):
        return Tensor
    if isinstance(leaf, torch.ScriptObject):  # a profiler's handle, for example; it cannot even be compared
        return (type(leaf), None)
    return (float, leaf.hex()) if isinstance(leaf, float) else (type(leaf), leaf)


def _differ_in_host_values(left: tuple[Any, ...] | None, right: tuple[Any, ...]) -> bool:
    """Tells whether two operations differ in nothing but the values of host tensors."""
    if left is None or len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(a == b or (isinstance(a, HostValues) and isinstance(b, HostValues)) for a, b in pairs)


def _show(entry: tuple[Any, ...] | None) -> str:
    if entry is None:
        return "no further operation"
    return f"{entry[0]} with [{', '.join(_show_value(leaf) for leaf in entry[1:] if leaf is not Tensor)}]"


def _show_value(leaf: Any) -> str:
    if isinstance(leaf, HostValues):
        return str(leaf)
    kind, value = leaf
    return repr(float.fromhex(value) if kind is float else value)
