# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One recording of a region: a forward graph, a backward graph, and the static memory between them.

Note [memory of a recording]
    Forward and backward share one pool, so a recording needs about as much memory as a native step. The price is that
    a forward replay may overwrite anything the backward left in the pool, gradients included. So what others see lives
    elsewhere: arguments and incoming gradients are copied into static tensors outside of the pool, results are handed
    out as fresh copies, and gradients are published into buffers that no other graph writes (gradients.py).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_replay.engine import tree
from lightning_replay.engine.backend import Graph, GraphBackend, Pool
from lightning_replay.engine.layout import (
    allocate_like,
    clone_exactly,
    copy_all,
    is_plain,
    may_overlap,
    overlaps_itself,
    without_expanded,
)
from lightning_replay.engine.modes import Modes
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason


@dataclass(slots=True)
class Call:
    """How a region is called: everything a run of it needs.

    Attributes:
        name: Dotted path of the region.
        run: The region's own forward.
        structure: Structure of `(args, kwargs)`.
        inputs: The tensors in it, detached, owned by whoever made the call object.
        paths: Their dotted paths.
        differentiable: Which of them require a gradient.
        modes: Torch's switches at the call.
    """

    name: str
    run: Callable[..., Any]
    structure: tree.Structure
    inputs: list[Tensor]
    paths: list[str]
    differentiable: list[bool]
    modes: Modes

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Runs the region natively on these tensors, under the modes of the call."""
        with self.modes.entered():
            args, kwargs = tree.rebuild(self.structure, iter(inputs))
            return self.run(*args, **kwargs)

    def leaves(self) -> list[Tensor]:
        """Returns the inputs as fresh autograd leaves on the same memory."""
        return [t.detach().requires_grad_(d) for t, d in zip(self.inputs, self.differentiable, strict=True)]


@dataclass(slots=True)
class Result:
    """What a run returned, taken apart and each tensor counted once.

    Attributes:
        structure: Structure of the result; every tensor in it is the next of `slots`.
        slots: For each tensor of the structure, ("output", i) or ("input", i) if it is the caller's own object.
        outputs: The different tensors that the run made.
    """

    structure: tree.Structure
    slots: tuple[tuple[str, int], ...]
    outputs: list[Tensor]
    paths: list[str]


def take_apart(result: Any, inputs: Sequence[Tensor], name: str) -> Result:
    """Takes a region's result apart.

    Raises:
        CaptureError: If it holds something that cannot be handed out again on a replay.
    """
    try:
        tensors, paths, structure = tree.flatten(result, f"{name}()")
    except tree.OpaqueValueError as error:
        raise CaptureError(Finding(Reason.RESULT, error.path, "tensors and plain values", error.kind)) from None
    known = {id(tensor): ("input", i) for i, tensor in enumerate(inputs)}
    slots: list[tuple[str, int]] = []
    outputs: list[Tensor] = []
    output_paths: list[str] = []
    for tensor, path in zip(tensors, paths, strict=True):
        if id(tensor) not in known:
            known[id(tensor)] = ("output", len(outputs))
            outputs.append(tensor)
            output_paths.append(path)
        slots.append(known[id(tensor)])
    return Result(structure, tuple(slots), outputs, output_paths)


def check_outputs(result: Result, others: Mapping[str, Tensor], device: torch.device) -> Finding | None:
    """Finds a result that cannot be handed out as a fresh copy.

    Args:
        result: The taken-apart result.
        others: Tensors that no result may share memory with, by name.
        device: The device of the recording.
    """
    taken = {tensor.untyped_storage().data_ptr(): name for name, tensor in others.items() if tensor.numel()}
    earlier: list[tuple[Tensor, str]] = []
    for output, path in zip(result.outputs, result.paths, strict=True):
        if not is_plain(output) or output.device != device or overlaps_itself(output):
            return Finding(Reason.UNSUPPORTED_TENSOR, path, f"a plain strided tensor on {device}", describe(output))
        storage = output.untyped_storage().data_ptr()
        if storage in taken and output.numel():
            return Finding(Reason.OUTPUT_ALIAS, path, "memory of its own", f"shares memory with {taken[storage]}")
        for other, name in earlier:
            if may_overlap(output, other):
                return Finding(Reason.OUTPUT_ALIAS, path, "memory of its own", f"shares memory with {name}")
        earlier.append((output, path))
    return None


def describe(tensor: Tensor) -> str:
    """Describes a tensor's type and layout for a message."""
    kind = type(tensor).__name__
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{kind}{layout} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


@dataclass(slots=True)
class Recording:
    """A recorded call: replayed by copying arguments in, launching, and copying results out.

    Attributes:
        call: The recorded call; its inputs are the static inputs.
        result: The recorded result; its outputs lie in the pool.
        gradients: For each parameter of the region, its gradient in the pool, or None where native leaves None.
        input_gradients: Likewise for each input.
        cotangents: For each output, the static incoming gradient, or None if the output received none.
        draws: Whether a replay moves the device's generator.
        buffers: The buffers that the forward pass writes, by name, and copies of their values before the last replay.
        trainable: Positions of the parameters that required a gradient in the forward pass.
    """

    call: Call
    result: Result
    pool: Pool
    forward_graph: Graph
    backward_graph: Graph | None
    gradients: list[Tensor | None]
    input_gradients: list[Tensor | None]
    cotangents: list[Tensor | None]
    differentiable: list[bool]
    draws: bool
    written: dict[str, Tensor]
    shadows: list[Tensor]
    several_uses: frozenset[int]
    kept_alive: list[Tensor] = field(default_factory=list)
    trainable: list[int] = field(default_factory=list)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Replays the forward graph.

        Args:
            inputs: Tensors with the layout of the static inputs.

        Returns:
            Fresh copies of the outputs.

        Raises:
            Exception: Whatever the replay raised. The buffers are as they were, the device's generator may not be.
        """
        atomic = getattr(self.forward_graph, "atomic", True)
        before = [] if atomic else [(buffer, buffer.detach().clone()) for buffer in self.written.values()]
        copy_all(
            [without_expanded(static) for static in self.call.inputs], [without_expanded(given) for given in inputs]
        )
        try:
            self.forward_graph.replay()
        except Exception:
            for buffer, values in before:
                buffer.data.copy_(values)
            raise
        fresh = [allocate_like(output) for output in self.result.outputs]
        copy_all([without_expanded(t) for t in fresh], [without_expanded(o) for o in self.result.outputs])
        return fresh

    def matches(self, cotangents: Sequence[Tensor | None]) -> bool:
        """Tells whether incoming gradients have the pattern and layout that the backward graph was recorded for."""
        for static, given in zip(self.cotangents, cotangents, strict=True):
            if (static is None) != (given is None):
                return False
            if given is not None and static is not None and cotangent_layout(given) != cotangent_layout(static):
                return False
        return True

    @torch.no_grad()
    def backward(self, cotangents: Sequence[Tensor | None]) -> None:
        """Replays the backward graph; the gradients are then in `gradients` and `input_gradients`."""
        pairs = [(s, g) for s, g in zip(self.cotangents, cotangents, strict=True) if s is not None and g is not None]
        copy_all([without_expanded(s) for s, _ in pairs], [without_expanded(g) for _, g in pairs])
        if self.backward_graph is not None:
            self.backward_graph.replay()


def cotangent_layout(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what a backward graph depends on in an incoming gradient."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


@dataclass(slots=True)
class Reference:
    """A native run of a call: what a replay from the same state has to reproduce.

    Attributes:
        outputs: Copies of its outputs.
        gradients: Its gradients for the parameters.
        input_gradients: Its gradients for the inputs.
    """

    result: Result
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    input_gradients: list[Tensor | None]
    several_uses: frozenset[int]


class Recorder:
    """Makes one recording of one call.

    Args:
        backend: Where to record.
        pool: The memory to record into.
        call: The call; its inputs become the static inputs.
        parameters: The leaves that stand for the region's trainable parameters while it runs.
        cotangents: The incoming gradients of the call's outputs; they become the static ones.
    """

    def __init__(
        self,
        backend: GraphBackend,
        pool: Pool,
        call: Call,
        parameters: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._call = call
        self._parameters = list(parameters)
        self._cotangents = list(cotangents)

    def run_reference(
        self, before_forward: Callable[[], None] = lambda: None, after_forward: Callable[[], None] = lambda: None
    ) -> Reference:
        """Runs the call natively where it will be recorded: the warm-up, and the reference of the certification.

        Args:
            before_forward: Called when the region's own code is about to run.
            after_forward: Called between forward and backward.

        Raises:
            CaptureError: If the call cannot be recorded.
        """

        def run() -> Reference:
            leaves = self._call.leaves()
            marker = sequence_number()
            before_forward()
            made = self._call(leaves)
            after_forward()
            result = take_apart(made, leaves, self._call.name)
            several = self._check_graph(result, leaves, marker)
            outputs = [clone_exactly(output) for output in result.outputs]
            gradients, input_gradients = self._differentiate(result, leaves)
            for gradient in (*gradients, *input_gradients):
                if gradient is not None and not is_plain(gradient):
                    raise CaptureError(
                        Finding(Reason.UNSUPPORTED_TENSOR, self._call.name, "dense gradients", describe(gradient))
                    )
            result.outputs = [output.detach() for output in result.outputs]
            return Reference(result, outputs, gradients, input_gradients, several)

        return self._backend.warm_up(run)

    def differentiate_natively(
        self, apart: Collection[int] = ()
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[tuple[int, Tensor]]]:
        """Runs the call once more where it is, without recording, and differentiates it.

        Args:
            apart: Positions of parameters whose gradients are not to be added up.

        Returns:
            The gradients of parameters and inputs, and the parts of those that are left apart, with their positions, in
            the order in which autograd would add them up.
        """
        leaves = self._call.leaves()
        result = take_apart(self._call(leaves), leaves, self._call.name)
        parts: list[tuple[int, Tensor]] = []
        positions = {id(self._parameters[i]): i for i in apart}

        def take(indices: dict[int, int], gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            taken = [(position, gradients[index]) for index, position in indices.items()]
            parts.extend((position, gradient) for position, gradient in taken if gradient is not None)
            return tuple(None if index in indices else gradient for index, gradient in enumerate(gradients))

        for node in {node for node, _ in edges(*result.outputs)} if apart else ():
            leaves_below = (id(getattr(following, "variable", None)) for following, _ in node.next_functions)
            if indices := {index: positions[leaf] for index, leaf in enumerate(leaves_below) if leaf in positions}:
                node.register_hook(partial(take, indices))  # which goes with the graph
        return *self._differentiate(result, leaves), parts

    def _differentiate(
        self, result: Result, leaves: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Differentiates the outputs that receive a gradient with respect to parameters and inputs."""
        reached = [i for i, cotangent in enumerate(self._cotangents) if cotangent is not None]
        wanted = [*self._parameters, *(leaf for leaf in leaves if leaf.requires_grad)]
        if not reached or not wanted:
            return [None] * len(self._parameters), [None] * len(leaves)
        with torch.autograd.set_multithreading_enabled(False):  # each thread would have a cuBLAS workspace of its own
            found: list[Tensor | None] = list(
                torch.autograd.grad(
                    [result.outputs[i] for i in reached],
                    wanted,
                    [self._cotangents[i] for i in reached],
                    allow_unused=True,
                )
            )
        gradients = found[: len(self._parameters)]
        rest = iter(found[len(self._parameters) :])
        return gradients, [next(rest) if leaf.requires_grad else None for leaf in leaves]

    def _check_graph(self, result: Result, leaves: Sequence[Tensor], marker: int) -> frozenset[int]:
        """Walks the autograd graph of a run.

        Returns:
            Positions of the parameters that several operations use.

        Raises:
            CaptureError: If it reaches a leaf that is neither a parameter nor an input, or an older graph.
        """
        positions = {id(leaf): i for i, leaf in enumerate(self._parameters)}
        own = set(positions) | {id(leaf) for leaf in leaves}
        edges: dict[int, int] = {}
        roots = [output.grad_fn for output in result.outputs if output.grad_fn is not None]
        seen = set(roots)
        while roots:
            node = roots.pop()
            if hasattr(node, "variable"):
                if id(node.variable) not in own:
                    shape = tuple(node.variable.shape)
                    raise CaptureError(
                        Finding(
                            Reason.FOREIGN_GRAPH, self._call.name, "only its own parameters", f"a leaf of shape {shape}"
                        )
                    )
                continue
            if node._sequence_nr() < marker:
                raise CaptureError(
                    Finding(Reason.FOREIGN_GRAPH, self._call.name, "only its own operations", f"an older {node.name()}")
                )
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if hasattr(following, "variable"):
                    edges[id(following.variable)] = edges.get(id(following.variable), 0) + 1
                if following not in seen:
                    seen.add(following)
                    roots.append(following)
        return frozenset(positions[leaf] for leaf, count in edges.items() if count > 1 and leaf in positions)

    def record(
        self,
        reference: Reference,
        written: dict[str, Tensor],
        draws: bool,
        constants: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008
        unnoticed: bool = False,
    ) -> Recording:
        """Captures forward and backward. State moved meanwhile is for the caller to put back.

        Args:
            reference: The native run of the same call.
            written: Buffers that the forward pass writes, by name.
            draws: Whether the call draws from the device's generator.
            constants: Surrounds what is captured: puts device constants in the place of host tensors.
            unnoticed: The region's code must not find out that it is being captured.

        Raises:
            CaptureError: If the call cannot be recorded.
        """
        leaves = self._call.leaves()
        shadows = [clone_exactly(buffer) for buffer in written.values()]
        buffers = [buffer.detach() for buffer in written.values()]
        hiding = self._backend.unnoticed if unnoticed else contextlib.nullcontext

        def forward() -> Result:
            with torch.no_grad():
                copy_all([without_expanded(s) for s in shadows], [without_expanded(b) for b in buffers])
            with hiding(), constants:
                return take_apart(self._call(leaves), leaves, self._call.name)

        def backward() -> tuple[list[Tensor | None], list[Tensor | None]]:
            with hiding(), constants:
                return self._differentiate(result, leaves)

        forward_graph, result = self._backend.capture(self._pool, forward, overwrites_pool=True)
        if (result.structure, result.slots) != (reference.result.structure, reference.result.slots):
            raise CaptureError(Finding(Reason.RESULT, self._call.name, "the structure of the call before", "another"))
        differentiable = [output.requires_grad for output in result.outputs]
        backward_graph, gradients, input_gradients = None, reference.gradients, reference.input_gradients
        if any(gradient is not None for gradient in (*gradients, *input_gradients)):
            backward_graph, (gradients, input_gradients) = self._backend.capture(self._pool, backward)
        result.outputs = [output.detach() for output in result.outputs]
        return Recording(
            call=self._call,
            result=result,
            pool=self._pool,
            forward_graph=forward_graph,
            backward_graph=backward_graph,
            gradients=[None if g is None else g.detach() for g in gradients],
            input_gradients=[None if g is None else g.detach() for g in input_gradients],
            cotangents=self._cotangents,
            differentiable=differentiable,
            draws=draws,
            written=written,
            shadows=shadows,
            several_uses=reference.several_uses,
        )


def edges(*outputs: Tensor) -> Iterator[tuple[Any, tuple[Any, int]]]:
    """Yields each operation of an autograd graph with each place it gives a gradient to."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for edge in node.next_functions:
            if edge[0] is None:
                continue
            yield node, edge
            if edge[0] not in seen:
                seen.add(edge[0])
                pending.append(edge[0])


def sequence_number() -> int:
    """Returns the autograd sequence number of the next node that this thread makes, in whatever mode it is."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
