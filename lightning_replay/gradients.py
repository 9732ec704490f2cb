# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Who owns `.grad`.

Note [ownership of a gradient]
    A backward graph leaves its gradients in the pool, where only the engine reads them. Nothing there is ever bound to
    a parameter. When Lightning's backward has ended, the gradients are handed over in one of three ways:

    published   No `.grad` is alive and nobody else holds the buffers: a third graph copies the gradients into stable
                buffers, which no other graph writes, and the buffers become `.grad`. The usual step; no launch per
                parameter.
    added       A `.grad` is alive (accumulation, zeroing in place, a user's own tensor): the gradients are added to it
                in place, as AccumulateGrad does. The buffer that holds it is written by nothing else.
    fresh       `.grad` is None, but someone kept a tensor on the buffer (a gradient of an earlier step): the gradient
                gets new memory, and what was kept keeps its value.

    So no replay ever writes a live or a kept gradient, and there is nothing to copy away before a forward replay.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_replay.engine.backend import Graph, GraphBackend, Pool
from lightning_replay.engine.layout import allocate_gradient, copy_all
from lightning_replay.errors import NotReplayedError
from lightning_replay.guards.layouts import Layouts
from lightning_replay.reasons import Finding, Reason

_ADDRESS = 4
"""Where the address is among what is compared for each buffer. All before it are counts of references."""

_storage_use_count = torch._C._storage_Use_Count
_tensor_use_count = Tensor._use_count  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Untouched:
    """What buffers that are looked at together are like while nobody refers to them.

    Attributes:
        handles: Of their memory.
        counts: Of references, and addresses: for each kind a list, see `GradientBuffers._references`.
        layouts: Their shapes and strides.
    """

    handles: list[int]
    counts: list[list[int]]
    layouts: Layouts


class GradientBuffers:
    """One stable gradient buffer for each parameter of a region, shared by all of its recordings.

    Args:
        parameters: The region's parameters.

    Attributes:
        positions: Position of each parameter, by id.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.positions = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.buffers: list[Tensor | None] = [None] * len(self.parameters)
        # The buffers' memory, kept whatever becomes of them: recorded copies write there. And the layout that they had.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._originals: dict[int, Tensor] = {}
        self._alone: dict[int, tuple[int, ...]] = {}
        self._untouched: dict[tuple[int, ...], _Untouched] = {}

    def provide(self, backend: GraphBackend, pool: Pool, positions: Iterable[int]) -> None:
        """Allocates the buffers at these positions that do not exist yet.

        They lie in a recording's pool, where they and the recording fill up each other's gaps; for as long as they
        live, no graph of the pool writes there but the recorded copies.

        Raises:
            Exception: As `GraphBackend.allocate`; nothing has changed then.
        """
        missing = [i for i in positions if self.buffers[i] is None]
        if not missing:
            return
        made = backend.allocate(pool, lambda: [allocate_gradient(self.parameters[i]) for i in missing])
        for i in reversed(missing):
            self.buffers[i] = made.pop()  # the list must not count as a reference
            self._storages[i] = self.at(i).untyped_storage()
            self._originals[i] = self.at(i).detach()
            self._alone[i] = self._count(i)
        self._untouched.clear()

    def _count(self, position: int) -> tuple[int, ...]:
        references = self._references([self.buffers[position]], [position], [self._storages[position]._cdata])
        return next(zip(*references, strict=True))

    @contextlib.contextmanager
    def expecting_references(self, owner: object, positions: Sequence[int] | None = None) -> Iterator[None]:
        """Counts references to buffers that a block adds as nobody's, for as long as their owner lives.

        A tape refers to what it writes; a CUDA graph knows addresses only.
        """
        if positions is None:
            positions = list(self._alone)
        before = [self._count(i)[:_ADDRESS] for i in positions]
        yield
        added = [
            tuple(now - then for now, then in zip(self._count(i)[:_ADDRESS], count, strict=True))
            for i, count in zip(positions, before, strict=True)
        ]
        if any(map(any, added)):
            self._expect(positions, added, 1)
            weakref.finalize(owner, self._expect, positions, added, -1)

    def _expect(self, positions: Sequence[int], added: Sequence[tuple[int, ...]], sign: int) -> None:
        for i, more in zip(positions, added, strict=True):
            counts = (count + sign * change for count, change in zip(self._alone[i][:_ADDRESS], more, strict=True))
            self._alone[i] = (*counts, self._alone[i][_ADDRESS])
        self._untouched.clear()

    def at(self, position: int) -> Tensor:
        """Returns the buffer at a position."""
        buffer = self.buffers[position]
        assert buffer is not None
        return buffer

    def _references(
        self, buffers: list[Any], positions: Sequence[int], handles: list[int]
    ) -> tuple[Iterator[int], ...]:
        """Counts who refers to buffers: Python and C++ to the tensors, Python and C++ to the memory.

        The address comes with them, as `.grad.data = ...` gives a buffer other memory. One pass in C for each: this
        runs every step for every parameter.
        """
        return (
            map(sys.getrefcount, buffers),
            map(_tensor_use_count, buffers),
            map(sys.getrefcount, map(self._storages.__getitem__, positions)),
            map(_storage_use_count, handles),
            map(Tensor.data_ptr, buffers),
        )

    def _find_untouched(self, positions: tuple[int, ...]) -> _Untouched:
        handles = [self._storages[i]._cdata for i in positions]
        counts = list(map(list, zip(*(self._alone[i] for i in positions), strict=True)))
        return _Untouched(handles, counts, Layouts([self._originals[i] for i in positions]))

    def held(self, positions: Sequence[int]) -> bool:
        """Tells whether anyone but this object refers to any of these buffers or their memory, or has changed one."""
        positions = tuple(positions)
        if (untouched := self._untouched.get(positions)) is None:
            untouched = self._untouched[positions] = self._find_untouched(positions)
        buffers: list[Any] = [self.buffers[i] for i in positions]
        references = self._references(buffers, positions, untouched.handles)
        if any(list(now) != then for now, then in zip(references, untouched.counts, strict=False)):
            return True
        return not untouched.layouts.are_same(buffers) or any(untouched.layouts.trainable)

    def is_held(self, position: int) -> bool:
        """Tells whether anyone but this object refers to one buffer or its memory. `.grad` counts, if bound."""
        return self.held([position])

    def in_use(self) -> list[Tensor]:
        """Returns the buffers that anyone refers to."""
        made = [i for i, buffer in enumerate(self.buffers) if buffer is not None]
        return [self.at(i) for i in made if self.is_held(i)]


class Publication:
    """The recorded copy of one recording's gradients into the buffers.

    Args:
        backend: Where to record.
        pool: The recording's pool.
        buffers: The region's buffers.
        gradients: The recording's gradients in the pool, None where native leaves None.
    """

    def __init__(
        self, backend: GraphBackend, pool: Pool, buffers: GradientBuffers, gradients: Sequence[Tensor | None]
    ) -> None:
        self.positions = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
        self.sources = [gradient for gradient in gradients if gradient is not None]
        self.buffers = buffers
        buffers.provide(backend, pool, self.positions)
        self.parameters = [buffers.parameters[i] for i in self.positions]
        self._graph: Graph | None = None
        if self.sources:
            with buffers.expecting_references(self, self.positions):
                self._graph = self._record(backend, pool)

    @torch.no_grad()
    def _record(self, backend: GraphBackend, pool: Pool) -> Graph:
        targets = [self.buffers.at(i) for i in self.positions]
        run = partial(copy_all, targets, self.sources)
        backend.warm_up(run)
        graph, _ = backend.capture(pool, run)
        return graph

    def is_possible(self) -> bool:
        """Tells whether the buffers are free: no `.grad` alive, nothing kept, and no parameter frozen meanwhile."""
        free = all(p.grad is None and p.requires_grad for p in self.parameters)
        return free and not self.buffers.held(self.positions)

    def publish(self) -> None:
        """Replays the copy and binds the buffers."""
        if self._graph is not None:
            self._graph.replay()
        held = self.buffers.buffers
        for parameter, position in zip(self.parameters, self.positions, strict=True):
            parameter.grad = held[position]


def shared_places(gradients: Iterable[Tensor]) -> set[int]:
    """Returns the addresses at which several of these lie. What is empty lies nowhere."""
    places = list(map(Tensor.data_ptr, gradients))
    if len(once := set(places)) == len(places):
        return set()
    return {place for place in once - {0} if places.count(place) > 1}


@torch.no_grad()
def hand_over(
    contributions: Mapping[Parameter, list[Tensor]], buffers: Mapping[Parameter, tuple[GradientBuffers, int]]
) -> tuple[int, int]:
    """Hands gradients over where publishing is not possible, as AccumulateGrad would.

    Several contributions to one parameter are summed first, in order of arrival, as autograd's input buffer does.

    Args:
        contributions: For each parameter its gradients in order of arrival, in memory that only the engine writes.
        buffers: For each parameter the stable buffer to use if it is free.

    Returns:
        The number of live gradients that were added to, and the number of gradients that needed fresh memory because
        their buffer was kept or never made.

    Raises:
        NotReplayedError: If live gradients lie in the same memory, and would be added to in an order of our own.
    """
    fresh = 0
    live: list[Tensor] = []
    added: list[Tensor] = []
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    bound: list[tuple[Parameter, Tensor]] = []
    for parameter, parts in contributions.items():
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if parameter.grad is not None:
            if parameter.grad.layout is torch.strided:
                live.append(parameter.grad)
                added.append(total)
            else:  # a sparse one cannot hold the sum
                parameter.grad = total + parameter.grad
                fresh += 1
            continue
        target = None
        if parameter in buffers:
            owner, position = buffers[parameter]
            if owner.buffers[position] is not None and not owner.is_held(position):
                target = owner.at(position)
        if target is None:
            target = allocate_gradient(parameter)
            fresh += 1
        targets.append(target)
        sources.append(total)
        bound.append((parameter, target))
    if shared_places(live):
        where, actual = "gradients of several parameters", "they share memory, and it counts which is added to first"
        raise NotReplayedError(Finding(Reason.GRADIENT, where, "gradients with memory of their own", actual))
    if live:
        torch._foreach_add_(live, added)
    copy_all(targets, sources)
    for parameter, target in bound:
        parameter.grad = target
    return len(live), fresh
