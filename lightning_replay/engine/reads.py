# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Numbers that a forward pass reads from the device, and how they follow from what it is given.

A graph cannot branch. But where Python looks at a number that is made from the arguments alone ("is anything padded?"),
the few operations that made it can be run again before a replay: if they give the number of the recording, Python
would take the recorded way. The host waits for the device then, as it does natively.

Only integers and booleans, made from others and from arguments and buffers of any kind, or views of these: what is
computed in floating point is hardly the same twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from lightning_replay.engine.layout import is_plain
from lightning_replay.engine.modes import without_autocast
from lightning_replay.engine.operations import is_allocation, shares_memory, written_tensors

_READ = torch.ops.aten._local_scalar_dense.default


def is_read(func: OpOverload, args: tuple[Any, ...], device: torch.device) -> bool:
    """Tells whether an operation reads an integer or a boolean from the device."""
    return func is _READ and _is_exact(args[0]) and args[0].device.type == device.type


def read(tensor: Tensor) -> Any:
    """Reads a number, for which the host waits on purpose."""
    if tensor.device.type != "cuda":
        return _READ(tensor)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        return _READ(tensor)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _is_exact(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the region."""

    position: int


@dataclass(frozen=True, slots=True)
class Made:
    """One of the results of an operation."""

    operation: "Operation"
    position: int


Origin = Argument | Made | Tensor
"""Where a tensor comes from; a tensor stands for itself: it is a buffer, or lies in one."""


@dataclass(eq=False)
class Operation:
    """An operation to be run again.

    Attributes:
        number: Its place in the order of all.
        varies: Whether its results depend on anything that may change.
    """

    number: int
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    varies: bool

    def needs(self) -> Iterator["Operation"]:
        """Yields the operations whose results it takes."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Made):
                yield leaf.operation


@dataclass(frozen=True, slots=True)
class Check:
    """A number that may change: its origin, and what it was."""

    origin: Origin
    answer: Any


@dataclass
class Reads:
    """The numbers that a recorded forward pass read.

    Attributes:
        answers: The numbers, in order.
        program: The checks of those that may change, each behind the operations that it needs. None of them is run
            before an earlier number has turned out to be as recorded: it may have guarded what follows.
    """

    answers: list[Any] = field(default_factory=list)
    program: list[Operation | Check] = field(default_factory=list)

    def add(self, origin: Origin, answer: Any) -> None:
        """Adds a number."""
        self.answers.append(answer)
        if isinstance(origin, Made) and not origin.operation.varies:
            return
        waiting = [origin.operation] if isinstance(origin, Made) else []
        there = {step.number for step in self.program if isinstance(step, Operation)}
        needed: dict[int, Operation] = {}
        while waiting:
            operation = waiting.pop()
            if operation.number not in there and operation.number not in needed:
                needed[operation.number] = operation
                waiting.extend(operation.needs())
        self.program += [needed[number] for number in sorted(needed)]
        self.program.append(Check(origin, answer))

    def difference(self, inputs: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Reads the numbers again, for other arguments.

        Returns:
            The first recorded number that is another one now, and that one, or the error on the way to it.
        """
        if not self.program:
            return None
        results: dict[int, list[Tensor]] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Argument):
                return inputs[leaf.position]
            return results[leaf.operation.number][leaf.position] if isinstance(leaf, Made) else leaf

        with torch.no_grad(), without_autocast():
            for step in self.program:
                if isinstance(step, Check):
                    if (now := read(value(step.origin))) != step.answer:
                        return step.answer, now
                    continue
                args, kwargs = tree_map(value, (step.args, step.kwargs))
                try:
                    results[step.number] = _tensors(step.func(*args, **kwargs))
                except Exception as error:  # as native will raise it
                    return "no error", f"{type(error).__name__}: {error}"
        return None


class Origins:
    """Writes down where the integer tensors of a run come from.

    Args:
        inputs: The region's arguments.
        buffers: The region's buffers, without those that it writes: not every operation says what it writes.
    """

    def __init__(self, inputs: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        self._inputs = {_place(tensor): Argument(i) for i, tensor in enumerate(inputs) if is_plain(tensor)}
        self._buffers = {_memory(tensor) for tensor in buffers if is_plain(tensor)}
        # The tensors are kept so that their ids stay unique; one that has been given other memory is another one.
        self._made: dict[int, tuple[Tensor, tuple[Any, ...], Made]] = {}
        self._written: set[int] = set()
        self._number = 0

    def note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Adds an operation."""
        self._written.update(_memory(tensor) for tensor in written_tensors(func, args, kwargs) if is_plain(tensor))
        given_tensors, results = _tensors((args, kwargs)), _tensors(result)
        if not results or not all(map(is_plain, results)):
            return
        plain = [tensor for tensor in given_tensors if is_plain(tensor)]
        views = [shares_memory(leaf, plain) for leaf in results]
        if not func._schema.is_mutable:  # new memory, which may have been another tensor's
            self._written.difference_update(
                _memory(leaf) for leaf, view in zip(results, views, strict=True) if not view
            )
        if not all(view or _is_exact(leaf) for leaf, view in zip(results, views, strict=True)):
            return
        if func._schema.is_mutable or is_allocation(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return
        given = {id(tensor): self.of(tensor) for tensor in given_tensors}
        if any(origin is None for origin in given.values()):
            return
        varies = any(not isinstance(origin, Made) or origin.operation.varies for origin in given.values())
        origin_args, origin_kwargs = tree_map(lambda leaf: given.get(id(leaf), leaf), (args, kwargs))
        self._number += 1
        operation = Operation(self._number, func, origin_args, origin_kwargs, varies)
        for position, leaf in enumerate(results):
            self._made[id(leaf)] = (leaf, _place(leaf), Made(operation, position))

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns where a tensor comes from; None if that is not known, or it has been written since."""
        if not is_plain(tensor) or _memory(tensor) in self._written:
            return None
        if (made := self._made.get(id(tensor))) is not None:
            _, place, origin = made
            return origin if _place(tensor) == place else None
        if (argument := self._inputs.get(_place(tensor))) is not None:
            return argument
        return tensor.detach() if _memory(tensor) in self._buffers else None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
