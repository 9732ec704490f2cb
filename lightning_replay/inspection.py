# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Watch one run of a region, below autograd, for what a recording cannot hold."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_replay.engine.operations import host_access, user_line, written_tensors
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason

Trace = list[tuple[Any, ...]]
"""The operations of a forward pass with their non-tensor arguments."""


class Tracer(TorchDispatchMode):
    """Writes down the operations of a forward pass, or compares them with those of an earlier one.

    Attributes:
        trace: The operations so far.
        difference: The first deviation from the expected trace.

    Args:
        name: Dotted path of the region.
        expected: The trace of an earlier run with the same signature.
    """

    def __init__(self, name: str, expected: Trace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._expected = expected
        self._listening = True
        self.trace: Trace = []
        self.difference: Finding | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Adds an operation."""
        if not self._listening:
            return
        entry = (func, *(_frozen(leaf) for leaf in tree_leaves((args, kwargs))))
        if self._expected is not None and self.difference is None:
            position = len(self.trace)
            earlier = self._expected[position] if position < len(self._expected) else None
            if entry != earlier:
                self.difference = Finding(Reason.PYTHON_VALUE, user_line(), _show(earlier), _show(entry))
        self.trace.append(entry)

    def begin_forward(self) -> None:
        """Starts listening, if it is not listening from the beginning."""
        self._listening = True

    def end_forward(self) -> None:
        """Stops listening: what follows is the backward pass."""
        self._listening = False
        if self._expected is not None and self.difference is None and len(self.trace) != len(self._expected):
            actual = f"{len(self.trace)}"
            self.difference = Finding(Reason.PYTHON_VALUE, self._name, f"{len(self._expected)} operations", actual)


class Inspector(Tracer):
    """Refuses the first operation that a recording cannot hold, before it does harm.

    Attributes:
        foreign: Tensors used that are neither arguments, members of the region, nor made in it. Their addresses are
            frozen into a recording, so it must keep them alive.

    Args:
        name: Dotted path of the region.
        expected: The trace of an earlier run with the same signature.
        device: The device of the recording.
        inputs: The region's arguments; writing one is a finding.
        parameters: The region's parameters; writing one is a finding.
        buffers: The region's buffers.
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
        random_state: Callable[[], Tensor],
    ) -> None:
        super().__init__(name, expected)
        self._device = device
        self._random_state = random_state
        self._random = random_state()
        self._inputs = {_address(tensor) for tensor in inputs if tensor.numel()}
        self._parameters = {_address(tensor) for tensor in parameters if tensor.numel()}
        self._known = self._inputs | self._parameters | {_address(tensor) for tensor in buffers}
        self.foreign: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        finding = (
            host_access(func, args, kwargs, self._device)
            or self._check_writes(func, args, kwargs)
            or self._check_generator()
        )
        if finding is not None:
            raise CaptureError(finding)
        self.note(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.numel() and _address(leaf) not in self._known:
                self._known.add(_address(leaf))
                self.foreign.append(leaf.detach())
        result = func(*args, **kwargs)
        self._random = self._random_state()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel():
                self._known.add(_address(leaf))  # a foreign tensor is alive all the time and cannot take this address
        return result

    def begin(self) -> None:
        """Reads the generator where the run begins, before the forward pass."""
        self._listening = False
        self._random = self._random_state()

    def _check_generator(self) -> Finding | None:
        if torch.equal(self._random, self._random_state()):
            return None
        return Finding(Reason.HOST_RANDOM, user_line(), "random state moved by operations only", "it was set in Python")

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> Finding | None:
        if not func._schema.is_mutable:
            return None
        for tensor in written_tensors(func, args, kwargs):
            if _address(tensor) in self._inputs:
                return Finding(Reason.INPUT_WRITTEN, user_line(), "arguments that are only read", str(func))
            if _address(tensor) in self._parameters:
                return Finding(Reason.PARAMETER_WRITTEN, user_line(), "parameters that are only read", str(func))
        return None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _frozen(leaf: Any) -> Any:
    """Returns what of an argument two runs have to share: nothing of a tensor, the exact value of anything else."""
    if isinstance(leaf, Tensor):
        return Tensor
    if isinstance(leaf, torch.ScriptObject):  # a profiler's handle, for example; it cannot even be compared
        return (type(leaf), None)
    return (float, leaf.hex()) if isinstance(leaf, float) else (type(leaf), leaf)


def _show(entry: tuple[Any, ...] | None) -> str:
    if entry is None:
        return "no further operation"
    values = [leaf for leaf in entry[1:] if leaf is not Tensor]
    plain = [float.fromhex(value) if kind is float else value for kind, value in values]
    return f"{entry[0]} with {plain}"
