# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Calls of regions on their way through a step: replayed ones, and native ones kept to be recorded."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from lightning_replay.dispatch import Engaged, Region, Slot
from lightning_replay.engine.recording import Call, edges
from lightning_replay.engine.snapshot import Snapshot
from lightning_replay.reasons import Finding, Reason

if TYPE_CHECKING:
    from lightning_replay.runner.backward import BackwardPass


@dataclass(eq=False)
class Sample:
    """A native call kept to be recorded after its backward.

    Attributes:
        before: Random states and buffers at entry.
        after: The same at exit.
        outputs: Copies of its outputs.
        cotangents: Copies of the gradients that its outputs received.
        edges: For each output its place in the autograd graph.
        numbers: Sequence numbers of the call's own autograd nodes.
        input_edges: Likewise for each argument that requires a gradient.
        unnoticed: Whether its code asks if it is being captured, and must not find out.
        unreached: Outputs that nothing outside of the call leads a gradient to.
        input_uses: For each argument the number of operations that give it a gradient.
    """

    region: Region
    slot: Slot
    key: Any
    call: Call
    signature: str
    before: Snapshot
    after: Snapshot
    outputs: list[Tensor]
    cotangents: list[Tensor | None]
    edges: list[tuple[Any, int]]
    numbers: range
    input_edges: list[Any]
    unnoticed: bool
    unreached: list[int] = field(default_factory=list)
    input_uses: list[int] = field(default_factory=list)

    def keep_outer_cotangents(self, loss: Tensor) -> None:
        """Drops the gradients of outputs that only other outputs of the call are made from."""
        reached = {(loss.grad_fn, loss.output_nr)}
        reached |= {edge for node, edge in edges(loss) if node._sequence_nr() not in self.numbers}
        self.unreached = [position for position, edge in enumerate(self.edges) if edge not in reached]
        self.edges = []

    def count_input_uses(self, loss: Tensor) -> Finding | None:
        """Counts the operations that use each argument, and finds one whose gradient would add up in another order.

        A recording adds the contributions of its own operations first. Those of a later operation outside come before.
        """
        uses: Counter[Any] = Counter()
        later: set[Any] = set()
        wanted = {edge for edge in self.input_edges if edge is not None}
        for node, edge in edges(loss) if wanted else ():
            if edge in wanted:
                if node._sequence_nr() in self.numbers:
                    uses[edge] += 1
                elif node._sequence_nr() >= self.numbers.stop:
                    later.add(edge)
        self.input_uses = [0 if edge is None else uses[edge] for edge in self.input_edges]
        wanted_edges, self.input_edges = self.input_edges, []
        for path, edge, count in zip(self.call.paths, wanted_edges, self.input_uses, strict=True):
            if edge is not None and ((count > 1 and edge in later) or (count > 2 and wanted_edges.count(edge) > 1)):
                actual = "several operations of the module and others outside"
                return Finding(Reason.SHARED_PARAMETER, path, "one place that gives it a gradient", actual)
        return None


@dataclass(eq=False)
class PendingCall:
    """A replayed call whose backward has not come yet.

    Attributes:
        random_before: The generator's state at entry, if the call draws from it.
        hooked: Parameters whose gradients go through autograd because hooks wait there.
        done: Its backward has been.
        gradients: Its gradients for the region's parameters, once it has been differentiated.
        recomputed: They come from a native run instead of the backward graph.
        input_uses: For each argument's place in the autograd graph the number of operations that use it.
        apart: Positions of parameters whose gradients the recording would add up before others join them.
    """

    backward: "BackwardPass"
    region: Region
    engaged: Engaged
    random_before: Tensor | None
    hooked: list[Parameter]
    done: bool = False
    gradients: list[Tensor | None] = field(default_factory=list)
    recomputed: bool = False
    input_uses: dict[Any, int] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Tells whether all its gradients are those of the backward graph, none of them on a way of its own."""
        whole = self.gradients is self.engaged.recording.gradients and not self.recomputed
        return whole and not hooked_parameters(self.engaged)


@dataclass(frozen=True, slots=True)
class NativePart:
    """One contribution of a native operation to a parameter's gradient."""

    parameter: Parameter
    gradient: Tensor


class ReplayFunction(torch.autograd.Function):
    """One replayed call as one autograd node."""

    @staticmethod
    def forward(ctx: Any, pending: PendingCall, inputs: list[Tensor], anchor: Tensor, *trainable: Tensor) -> Any:
        """Replays the forward graph; `trainable` are the inputs and parameters that get gradients through autograd."""
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        recording = pending.engaged.recording
        outputs = recording.forward(inputs)
        flags = zip(outputs, recording.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in flags if not differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Replays the backward graph."""
        return None, None, None, *ctx.pending.backward.differentiate(ctx.pending, cotangents)


def hooked_parameters(engaged: Engaged) -> list[Parameter]:
    """Returns the parameters with tensor hooks or post-accumulate hooks."""
    parameters = engaged.publication.parameters
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def edge_of(tensor: Tensor) -> tuple[Any, int]:
    """Returns the place of a tensor in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
