# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Run training steps with recorded regions. Knows torch only; the strategy tells it when a step and a backward begin.

Note [one step]
    forward    Every call of a region goes through `_call`: dispatch decides, and the call is run natively (perhaps
               observed, perhaps kept as a sample) or replayed as one autograd node.
    backward   The node replays the backward graph. When autograd is done, the gradients of all calls are handed over,
               and samples are made into recordings: the native step is over then, its activations are freed, and
               the incoming gradients of the sample are known.
"""

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, Parameter

from lightning_replay.certification import Trial, Verdict, certify
from lightning_replay.dispatch import Action, Decision, Dispatcher, Engaged, Region, Slot
from lightning_replay.engine import tree
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.interposition import interposed
from lightning_replay.engine.layout import clone_exactly
from lightning_replay.engine.recording import (
    Call,
    Recorder,
    Recording,
    Reference,
    check_outputs,
    sequence_number,
    take_apart,
)
from lightning_replay.engine.snapshot import Snapshot
from lightning_replay.engine.standins import stand_ins
from lightning_replay.errors import CaptureError, NotReplayedError
from lightning_replay.gradients import GradientBuffers, Publication, hand_over
from lightning_replay.guards.module import AttributeWatch, join
from lightning_replay.inspection import Inspector, Tracer
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import RecordingStats

StepAction = Literal["native", "record", "replay"]

MAX_COTANGENT_MISMATCHES = 3
"""Backward passes redone natively, because another set of results got gradients, before a recording is retired."""

SPLITTING = frozenset(
    {
        Reason.ATTRIBUTE_WRITTEN,
        Reason.BUFFER_REBOUND,
        Reason.PARAMETER_WRITTEN,
        Reason.LOG_IN_REGION,
        Reason.ARGUMENT,
        Reason.UNSUPPORTED_TENSOR,
        Reason.INPUT_WRITTEN,
        Reason.OUTPUT_ALIAS,
        Reason.RESULT,
        Reason.FOREIGN_GRAPH,
        Reason.HOST_SYNC,
        Reason.HOST_TENSOR,
        Reason.HOST_RANDOM,
        Reason.PYTHON_VALUE,
        Reason.SHARED_PARAMETER,
    }
)
"""Reasons that may concern only a part of a region: its parts are tried by themselves."""

MIN_OPERATIONS = 8
"""Forward operations below which a part of a network does not pay for its own replay."""


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
    differentiable: list[bool]
    cotangents: list[Tensor | None]
    edges: list[tuple[Any, int]]
    numbers: range
    input_edges: list[Any]
    unreached: list[int] = field(default_factory=list)
    input_uses: list[int] = field(default_factory=list)

    def keep_outer_cotangents(self, loss: Tensor) -> None:
        """Drops the gradients of outputs that only other outputs of the call are made from."""
        reached = {(loss.grad_fn, loss.output_nr)}
        reached |= {edge for node, edge in _edges(loss) if node._sequence_nr() not in self.numbers}
        self.unreached = [position for position, edge in enumerate(self.edges) if edge not in reached]
        self.edges = []

    def count_input_uses(self, loss: Tensor) -> Finding | None:
        """Counts the operations that use each argument, and finds one whose gradient would add up in another order.

        A recording adds the contributions of its own operations first. Those of a later operation outside come before.
        """
        uses: Counter[Any] = Counter()
        later: set[Any] = set()
        wanted = {edge for edge in self.input_edges if edge is not None}
        for node, edge in _edges(loss) if wanted else ():
            if edge in wanted:
                if node._sequence_nr() in self.numbers:
                    uses[edge] += 1
                elif node._sequence_nr() >= self.numbers.stop:
                    later.add(edge)
        self.input_uses = [0 if edge is None else uses[edge] for edge in self.input_edges]
        edges, self.input_edges = self.input_edges, []
        for path, edge, count in zip(self.call.paths, edges, self.input_uses, strict=True):
            if edge is not None and ((count > 1 and edge in later) or (count > 2 and edges.count(edge) > 1)):
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
    """

    runner: "Runner"
    region: Region
    engaged: Engaged
    random_before: Tensor | None
    hooked: list[Parameter]
    done: bool = False
    gradients: list[Tensor | None] = field(default_factory=list)
    recomputed: bool = False
    input_uses: dict[Any, int] = field(default_factory=dict)


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
        return None, None, None, *ctx.pending.runner._differentiate(ctx.pending, cotangents)


class Runner:
    """Records and replays the regions of one training run.

    Args:
        backend: Makes the graphs.
        warmup_steps: Native sightings of a signature before it is recorded.
        max_recordings: Recordings kept for each region.
        certify: How a fresh recording is compared with native before it is used.
        on_finding: Called for each finding that makes a call native.
    """

    def __init__(
        self,
        backend: GraphBackend,
        warmup_steps: int,
        max_recordings: int,
        certify: Literal["auto", "bitwise", "off"],
        on_finding: Callable[[Finding], None],
    ) -> None:
        self._backend = backend
        self._dispatcher = Dispatcher(backend.device, backend.new_pool, warmup_steps, max_recordings)
        self._certify = certify
        self._on_finding = on_finding
        self.regions: list[Region] = []
        self._root: Module | None = None
        self._in_backward = False
        self._counts = True
        self._samples: list[Sample] = []
        self._roots: list[tuple[Region, Any]] = []
        self._arrived: list[PendingCall | NativePart] = []
        self.recordings: list[RecordingStats] = []
        self._step: Counter[Action] = Counter()
        self._to_split: list[Region] = []
        self._split: set[Region] = set()
        self._anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self.published = 0
        self.added = 0
        self.copied = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def inside_region(self) -> Region | None:
        """The region whose own code is running natively, if any."""
        return self._inside

    _inside: Region | None = None

    def add_region(self, name: str, module: Module) -> None:
        """Adds a module whose calls are to be recorded."""
        self.regions.append(_make_region(name, module))

    def discover(self, root: Module, step: Callable[[], Any]) -> Any:
        """Runs a step and takes the outermost calls of parameter-owning modules as regions.

        Args:
            root: The module tree in which calls are watched, the root itself included.
            step: The step.
        """
        self._root = root
        self._begin_step(counts=True)
        wrappers = {}
        for path, module in _uncompiled_modules(root):
            if any(True for _ in module.parameters()):
                wrappers[module] = self._discovering(path or "self", module)
        with interposed(wrappers):
            return step()

    def _discovering(self, path: str, module: Module, part: bool = False) -> Callable[..., Any]:
        """Returns a forward that makes its module a region at the first call from outside of all regions."""
        candidate = _make_region(path, module)
        candidate.part = part

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside is None and candidate not in self.regions:
                self.regions.append(candidate)
            return self._call(candidate, args, kwargs)

        return forward

    def run_step(self, step: Callable[[], Any], counts: bool) -> Any:
        """Runs a step with the regions interposed.

        Args:
            step: The step.
            counts: Whether its calls count towards new recordings.
        """
        if (finding := self._find_replaced_region()) is not None:
            assert self._root is not None
            self.invalidate(finding)
            for forgotten in (self.regions, self._split, self._to_split):
                forgotten.clear()
            self._on_finding(finding)
            return self.discover(self._root, step)
        self._begin_step(counts)
        wrappers = {}
        for region in self.regions:
            forward = region.module.__dict__.get("forward")
            if forward is not region.instance_forward:
                actual = f"an instance attribute {forward!r}"
                self._on_finding(Finding(Reason.REPLACED_FORWARD, region.name, "the forward as first seen", actual))
            elif region not in self._split:
                wrappers[region.module] = self._wrapper(region)
        while self._to_split:
            region = self._to_split.pop()
            if region.module in wrappers:
                self._split.add(region)
                del wrappers[region.module]
                wrappers |= self._parts(region, wrappers)
        for region in self._split:
            assert region.refusal is not None
            self._on_finding(region.refusal)
        with interposed(wrappers):
            return step()

    def _find_replaced_region(self) -> Finding | None:
        """Finds a discovered region whose place in the tree another module has taken."""
        if self._root is None:
            return None
        for region in self.regions:
            if _module_at(self._root, region.name) is not region.module:
                return Finding(Reason.MODULE_CHANGED, region.name, "the module first seen", "another one, or none")
        return None

    def _parts(self, region: Region, taken: Container[Module]) -> dict[Module, Callable[..., Any]]:
        """Returns wrappers that make the outermost calls inside a refused region regions of their own."""
        prefix = "" if region.name == "self" else region.name
        return {
            module: self._discovering(join(prefix, path), module, part=True)
            for path, module in _uncompiled_modules(region.module)
            if module is not region.module and module not in taken and any(True for _ in module.parameters())
        }

    def _begin_step(self, counts: bool) -> None:
        self._dispatcher.step += 1
        self._step = Counter()
        self._counts = counts
        self._forget_step()
        for region in self.regions:
            region.calls = 0

    @property
    def last_action(self) -> StepAction:
        """What the last step was: "record" if any call was sampled, "replay" if any was replayed, else "native"."""
        if self._step[Action.RECORD]:
            return "record"
        return "replay" if self._step[Action.REPLAY] else "native"

    def _forget_step(self) -> None:
        """Drops what a step without a backward left behind."""
        self._samples.clear()
        self._roots.clear()
        self._arrived.clear()

    # -- forward -------------------------------------------------------------------------------------------------

    def _wrapper(self, region: Region) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(region, args, kwargs)

        return forward

    def _call(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of a region, natively or as a replay."""
        if self._inside is not None:
            return region.run(*args, **kwargs)
        if self._in_backward:  # activation checkpointing around a region runs it again
            return self._run_natively(region, args, kwargs)
        decision = self._dispatcher.decide(region, args, kwargs, self._counts)
        self._step[decision.action] += 1
        if decision.finding is not None:
            self._on_finding(decision.finding)
        if decision.action is Action.REPLAY:
            return self._replay(region, decision, args, kwargs)
        if decision.action is Action.NATIVE:
            return self._run_natively(region, args, kwargs)
        if decision.action is Action.AUDIT:
            return self._audit(region, decision, args, kwargs)
        return self._observe(region, decision, args, kwargs)

    def _run_natively(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = region
        try:
            return region.run(*args, **kwargs)
        finally:
            self._inside = None

    def refuse(self, region: Region, finding: Finding) -> None:
        """Makes a region native for good; from the next step on its parts are looked at instead."""
        region.retire(finding)
        region.refusal = finding
        if finding.reason in SPLITTING:
            self._to_split.append(region)
        self._on_finding(finding)

    def _audit(self, region: Region, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a recorded call natively and compares its operations with the recorded ones."""
        assert decision.slot is not None
        engaged = decision.slot.engaged[decision.key]
        self._dispatcher.audit_requested.discard(region)
        watch = AttributeWatch(region.name, region.module)
        with Tracer(region.name, engaged.trace) as tracer:
            result = self._run_natively(region, args, kwargs)
        tracer.end_forward()
        difference = watch.difference() or tracer.difference
        step = self._dispatcher.step
        if difference is None:
            engaged.audited(step)
            return result
        since = f"{difference.actual}; replays from step {engaged.verified_step + 1} to {step - 1} may have deviated"
        finding = Finding(difference.reason, difference.where, difference.expected, since)
        region.retire(finding)
        self._on_finding(finding)
        return result

    def request_audit(self) -> None:
        """Makes the next call of each region an audit."""
        self._dispatcher.audit_requested.update(self.regions)

    def _observe(self, region: Region, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call natively and watches what it does; keeps it as a sample if it is to be recorded."""
        assert decision.arguments is not None and decision.modes is not None and decision.slot is not None
        state = region.state  # a refusal in the middle of the call drops the region's
        assert state is not None
        tensors = decision.arguments.tensors
        recording = decision.action is Action.RECORD
        call = Call(
            name=region.name,
            run=region.run,
            structure=decision.arguments.structure,
            inputs=[clone_exactly(t) for t in tensors] if recording else [],
            paths=decision.arguments.paths,
            differentiable=[t.requires_grad for t in tensors],
            modes=decision.modes,
        )
        watch = AttributeWatch(region.name, region.module)
        versions = [t._version for t in tensors]
        before = Snapshot(self._backend, state.buffers if recording else {})
        traced = decision.trace and not _is_compiled(region.module)
        first_number = sequence_number()
        with Tracer(region.name) if traced else contextlib.nullcontext() as tracer:
            result = self._run_natively(region, args, kwargs)
        numbers = range(first_number, sequence_number())
        if region.refusal is not None:  # its own code did something that refuses it, such as logging
            return result
        if tracer is not None:
            decision.slot.traces[decision.key] = tracer.trace
        after = Snapshot(self._backend, state.buffers if recording else {})
        finding = watch.difference()
        if (drawn := after.host_random.moved_since(before.host_random)) is not None:
            finding = Finding(Reason.HOST_RANDOM, region.name, f"random numbers drawn on {self._backend.device}", drawn)
        for path, tensor, version in zip(call.paths, tensors, versions, strict=True):
            if tensor._version != version:
                finding = Finding(Reason.INPUT_WRITTEN, path, "arguments that are only read", "written in place")
        others: dict[str, Tensor] = dict(zip(call.paths, tensors, strict=True))
        others |= state.parameters | state.buffers
        try:
            parts = take_apart(result, tensors, region.name)
            finding = finding or check_outputs(parts, others, self._backend.device)
        except CaptureError as error:
            finding = finding or error.finding
        if finding is not None:
            self.refuse(region, finding)
            return result
        outputs = parts.outputs
        sample = None
        if recording:
            sample = Sample(
                region=region,
                slot=decision.slot,
                key=decision.key,
                call=call,
                signature=str(decision.arguments),
                before=before,
                after=after,
                outputs=[clone_exactly(output) for output in outputs],
                differentiable=[output.requires_grad for output in outputs],
                cotangents=[None] * len(outputs),
                edges=[(output.grad_fn, output.output_nr) for output in outputs],
                numbers=numbers,
                input_edges=[_edge(tensor) if tensor.requires_grad else None for tensor in tensors],
            )
            self._samples.append(sample)
        for position, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(self._observer(region, sample, position))
                self._roots.append((region, output.grad_fn))
        return result

    def _observer(self, region: Region, sample: Sample | None, position: int) -> Callable[[Tensor], None]:
        """Returns a hook that notes the gradient an output of a native call receives."""
        seen = False
        refuse = weakref.WeakMethod(self.refuse)

        def note(gradient: Tensor) -> None:
            nonlocal seen
            if (act := refuse()) is None or region.refusal is not None:
                return
            if torch.is_grad_enabled():
                act(region, Finding(Reason.HIGHER_ORDER, region.name, "one plain backward", "create_graph=True"))
            elif seen or not self._in_backward:
                actual = "another backward" if seen else "a backward inside training_step"
                act(region, Finding(Reason.REPEATED_BACKWARD, region.name, "one backward by Lightning", actual))
            elif sample is not None:
                sample.cotangents[position] = clone_exactly(gradient)
            seen = True

        return note

    def _replay(self, region: Region, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays a call: arguments in, launch, results out. A replay that raises has done nothing: native then."""
        assert decision.slot is not None and decision.arguments is not None
        engaged = decision.slot.engaged[decision.key]
        recording = engaged.recording
        tensors = decision.arguments.tensors
        random_before = self._backend.random_state() if recording.draws else None
        try:
            if any(recording.differentiable):
                pending = PendingCall(self, region, engaged, random_before, _hooked(engaged))
                trainable = [t for t in tensors if t.requires_grad]
                if trainable:
                    counted = zip(tensors, engaged.input_uses, strict=True)
                    pending.input_uses = {_edge(t): uses for t, uses in counted if t.requires_grad}
                outputs = ReplayFunction.apply(  # type: ignore[no-untyped-call]
                    pending, tensors, self._anchor, *trainable, *pending.hooked
                )
                decision.slot.waiting = weakref.ref(pending)
            else:
                outputs = recording.forward(tensors)
        except Exception as error:  # whatever the driver reports
            if random_before is not None:
                self._backend.set_random_state(random_before)
            self._step[Action.REPLAY] -= 1
            self._step[Action.NATIVE] += 1
            self._drop_failed(region, error)
            return self._run_natively(region, args, kwargs)
        engaged.stats.replays += 1
        engaged.last_used = self._dispatcher.step
        kinds = {"output": outputs, "input": tensors}
        given = (kinds[kind][position] for kind, position in recording.result.slots)
        return tree.rebuild(recording.result.structure, given)

    def _drop_failed(self, region: Region, error: Exception) -> None:
        """Drops the recordings of a region after a replay that raised."""
        finding = Finding(Reason.REPLAY_FAILED, region.name, "a replay", f"{type(error).__name__}: {error}")
        region.retire(finding)
        self._on_finding(finding)

    # -- backward ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Surrounds the autograd pass of a step.

        Args:
            loss: The tensor that is differentiated.
        """
        outside = self._outside_uses(loss)
        for sample in self._samples:
            sample.keep_outer_cotangents(loss)
            if (finding := sample.count_input_uses(loss)) is not None:
                self.refuse(sample.region, finding)
        if self._step[Action.REPLAY]:
            self._check_inputs(loss)
        # A parameter gets native gradients only where the walk met it, or below an observed call.
        hooks = self._collect_native_parts(loss) if outside or self._roots else []
        before = {p: p.grad for p in outside}
        for parameter in before:
            parameter.grad = None
        self._in_backward = True
        try:
            yield
            self._settle(before)
        except Exception:  # what has been differentiated until then has its gradients, as in native
            with contextlib.suppress(NotReplayedError):
                self._settle(before)
            raise
        finally:
            self._in_backward = False
            for hook in hooks:
                hook.remove()
            for parameter, gradient in before.items():
                if gradient is not None and parameter.grad is not gradient:
                    if parameter.grad is not None:
                        with torch.no_grad():
                            gradient.add_(parameter.grad)
                    parameter.grad = gradient
            self._arrived.clear()
        samples, self._samples = self._samples, []
        self._roots.clear()
        while samples:
            if (sample := samples.pop(0)).region.refusal is None:
                self._record(sample)
            del sample
            self._backend.trim()

    def _outside_uses(self, loss: Tensor) -> list[Parameter]:
        """Walks the autograd graph around the regions' calls and finds their parameters in it.

        Returns:
            The parameters that replayed calls and operations outside of them share.
        """
        inner = {node for _, node in self._roots}
        shared: list[Parameter] = []
        replayed: set[int] = set()
        pending = [loss.grad_fn] if loss.grad_fn is not None else []
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node in inner:
                continue
            if isinstance(node, ReplayFunction._backward_cls):
                call: PendingCall = node.pending  # type: ignore[attr-defined]
                replayed |= call.engaged.publication.buffers.positions.keys()
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                for region in self.regions:
                    if region.buffers is not None and id(variable) in region.buffers.positions:
                        region.outside.add(region.buffers.positions[id(variable)])
                        shared.append(variable)
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return [parameter for parameter in dict.fromkeys(shared) if id(parameter) in replayed]

    def _check_inputs(self, loss: Tensor) -> None:
        """Refuses a backward pass that would add up the gradient of a replayed call's argument in another order.

        Raises:
            NotReplayedError: If another operation uses an argument that the recorded call uses several times.
        """
        calls: dict[Any, list[tuple[PendingCall, int]]] = {}
        for node, edge in _edges(loss):
            if isinstance(node, ReplayFunction._backward_cls):
                call: PendingCall = node.pending  # type: ignore[attr-defined]
                if edge in call.input_uses:
                    calls.setdefault(edge, []).append((call, node._sequence_nr()))
        if not any(call.input_uses[edge] > 1 for edge, users in calls.items() for call, _ in users):
            return
        for node, edge in _edges(loss):
            for call, number in calls.get(edge, ()):
                if call.input_uses[edge] > 1 and node._sequence_nr() > number:
                    actual = "a use that was not there when the region was recorded"
                    where = call.region.name
                    raise NotReplayedError(Finding(Reason.SHARED_PARAMETER, where, "one use of an argument", actual))

    def _collect_native_parts(self, loss: Tensor) -> list[Any]:
        """Collects native contributions to parameters that replayed calls contribute to as well, in order of arrival.

        Two parts of a sum may be swapped, three may not, a live gradient included: there the order in which autograd
        adds them counts.

        Returns:
            Handles of the hooks that collect them.

        Raises:
            NotReplayedError: If a recording holds a sum that other parts belong into.
        """
        replayed: Counter[int] = Counter()
        fragile: dict[int, Region] = {}  # where a recording has already added or cast what others should have joined
        native: dict[int, list[tuple[Any, int, Parameter]]] = {}
        pending = [loss.grad_fn] if loss.grad_fn is not None else []
        seen = set(pending)
        while pending:
            node = pending.pop()
            replays = isinstance(node, ReplayFunction._backward_cls)
            if replays:
                call: PendingCall = node.pending  # type: ignore[attr-defined]
                publication = call.engaged.publication
                recording = call.engaged.recording
                cached = recording.call.modes.autocast_caches_weights
                positions = publication.positions if cached else recording.several_uses
                fragile |= {id(publication.buffers.parameters[i]): call.region for i in positions}
                hooked = set(map(id, call.hooked))
                replayed.update(
                    key
                    for key in (id(publication.buffers.parameters[i]) for i in publication.positions)
                    if key not in hooked
                )
            for index, (following, _) in enumerate(node.next_functions):
                if following is None:
                    continue
                variable = getattr(following, "variable", None)
                if variable is not None:
                    if not replays:
                        native.setdefault(id(variable), []).append((node, index, variable))
                elif following not in seen:
                    seen.add(following)
                    pending.append(following)
        for key, region in fragile.items():
            if replayed[key] + len(native.get(key, ())) > 1:
                actual = "a use that was not there when the region was recorded"
                raise NotReplayedError(Finding(Reason.SHARED_PARAMETER, region.name, "one use of it", actual))
        mixed = [
            key
            for key, count in replayed.items()
            if key in native and (count + len(native[key]) > 2 or native[key][0][2].grad is not None)
        ]
        places: dict[Any, dict[int, Parameter]] = {}
        for key in mixed:
            for node, index, parameter in native[key]:
                places.setdefault(node, {})[index] = parameter
        return [node.register_hook(partial(self._take_native_parts, places)) for node, places in places.items()]

    def _take_native_parts(
        self, places: dict[int, Parameter], gradients: tuple[Tensor | None, ...], _: Any
    ) -> tuple[Tensor | None, ...]:
        """Keeps contributions of a native operation from autograd, to be added in their turn."""
        for index, parameter in places.items():
            gradient = gradients[index]
            if gradient is not None:
                self._arrived.append(NativePart(parameter, gradient))
        return tuple(None if index in places else gradient for index, gradient in enumerate(gradients))

    def _differentiate(self, pending: PendingCall, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Replays the backward of a call; called by autograd.

        Raises:
            NotReplayedError: If the call is differentiated in a way that a recording cannot give.
        """
        name = pending.region.name
        if torch.is_grad_enabled():
            raise NotReplayedError(Finding(Reason.HIGHER_ORDER, name, "one plain backward", "create_graph=True"))
        if pending.done or not self._in_backward:
            actual = "another backward" if pending.done else "a backward outside of Lightning's"
            raise NotReplayedError(Finding(Reason.REPEATED_BACKWARD, name, "one backward by Lightning", actual))
        pending.done = True
        engaged = pending.engaged
        recording = engaged.recording
        failed = None
        if matches := recording.matches(cotangents):
            try:
                recording.backward(cotangents)
            except Exception as error:  # whatever the driver reports
                failed = error
        if matches and failed is None:
            pending.gradients = recording.gradients
            inputs = [None if g is None else clone_exactly(g) for g in recording.input_gradients]
        else:
            pending.recomputed = True
            pending.gradients, inputs = self._recompute(pending, cotangents)
        if failed is not None:
            self._drop_failed(pending.region, failed)
        elif not matches:
            engaged.mismatches += 1
            finding = Finding(Reason.COTANGENTS, name, "gradients for the same results", "another set or layout")
            self._on_finding(finding)
            if engaged.mismatches >= MAX_COTANGENT_MISMATCHES:
                pending.region.retire(finding)
        self._arrived.append(pending)
        trainable = [g for g, wanted in zip(inputs, recording.call.differentiable, strict=True) if wanted]
        return *trainable, *self._through_autograd(pending)

    def _through_autograd(self, pending: PendingCall) -> list[Tensor | None]:
        """Gives the gradients of hooked parameters to autograd, in memory of their own."""
        if not pending.hooked:
            return []
        positions = pending.engaged.publication.buffers.positions
        gradients = list(pending.gradients)
        given: list[Tensor | None] = []
        for parameter in pending.hooked:
            position = positions[id(parameter)]
            gradient = gradients[position]
            given.append(None if gradient is None else clone_exactly(gradient))
            gradients[position] = None
        pending.gradients = gradients
        return given

    def _recompute(
        self, pending: PendingCall, cotangents: tuple[Tensor | None, ...]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Runs a replayed call natively from the state at its entry, and differentiates that run."""
        recording = pending.engaged.recording
        buffers = pending.engaged.publication.buffers
        now = Snapshot(self._backend, recording.written)
        for buffer, shadow in zip(recording.written.values(), recording.shadows, strict=True):
            buffer.data.copy_(shadow)
        if pending.random_before is not None:
            self._backend.set_random_state(pending.random_before)
        trainable = [i for i, p in enumerate(buffers.parameters) if p.requires_grad]
        try:
            with stand_ins(pending.region.module, [buffers.parameters[i] for i in trainable]) as leaves:
                recorder = Recorder(self._backend, recording.pool, recording.call, leaves, cotangents)
                gradients, inputs = recorder.differentiate_natively()
        finally:
            now.restore()
        return _spread(gradients, trainable, len(buffers.parameters)), inputs

    def _settle(self, shared: dict[Parameter, Tensor | None]) -> None:
        """Hands the gradients of all calls of the step over to the parameters."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        pending = arrived[0]
        if len(arrived) == 1 and not shared and isinstance(pending, PendingCall) and not pending.recomputed:
            publication = pending.engaged.publication
            whole = pending.gradients is pending.engaged.recording.gradients and not _hooked(pending.engaged)
            if whole and publication.is_possible():
                try:
                    publication.publish()
                except Exception as error:  # whatever the driver reports
                    self._drop_failed(pending.region, error)
                else:
                    self.published += 1
                    return
        contributions: dict[Parameter, list[Tensor]] = {}
        several: dict[Parameter, Region] = {}
        owners: dict[Parameter, tuple[GradientBuffers, int]] = {}
        for pending in arrived:
            if isinstance(pending, NativePart):
                contributions.setdefault(pending.parameter, []).append(pending.gradient)
                continue
            buffers = pending.engaged.publication.buffers
            recording = pending.engaged.recording
            for position, gradient in enumerate(pending.gradients):
                if gradient is not None:
                    parameter = buffers.parameters[position]
                    contributions.setdefault(parameter, []).append(gradient)
                    owners.setdefault(parameter, (buffers, position))
                    if position in recording.several_uses:
                        several[parameter] = pending.region
        for parameter, parts in contributions.items():
            region = several.get(parameter)
            if region is not None and len(parts) + (parameter in shared) > 1:
                actual = "a use that was not there when the region was recorded"
                raise NotReplayedError(Finding(Reason.SHARED_PARAMETER, region.name, "one use of it", actual))
        late = {p: contributions.pop(p) for p in [*contributions] if p._backward_hooks or p._post_accumulate_grad_hooks}
        added, fresh = hand_over(contributions, owners)
        self.added += added > 0
        self.copied += fresh > 0
        for parameter, parts in late.items():  # hooks that came after the forward pass
            if parameter in shared:
                expected, actual = "hooks from before the forward pass", "a hook that came later"
                where = f"a parameter of shape {tuple(parameter.shape)}"
                raise NotReplayedError(Finding(Reason.SHARED_PARAMETER, where, expected, actual))
            torch.autograd.backward(parameter, sum(parts[1:], start=clone_exactly(parts[0])))

    # -- recording -----------------------------------------------------------------------------------------------

    def _record(self, sample: Sample) -> None:
        """Makes a sample into a recording, or refuses its region. Leaves no trace either way."""
        region = sample.region
        if region.state is None or sample.slot.is_pending():  # retired since, by another call of the same step
            return
        for position in sample.unreached:
            sample.cotangents[position] = None
        started = time.perf_counter()
        present = Snapshot(self._backend, region.state.buffers)
        weights = Snapshot(self._backend, region.state.parameters)
        attributes = AttributeWatch(region.name, region.module)
        finding = None
        try:
            engaged = self._make(sample)
            engaged.stats.capture_seconds = time.perf_counter() - started
        except CaptureError as error:
            finding = error.finding
        except torch.cuda.OutOfMemoryError as error:
            finding = Finding(Reason.OUT_OF_MEMORY, region.name, "memory for a recording", str(error).split("\n")[0])
        except Exception as error:
            finding = Finding(Reason.CAPTURE_FAILED, region.name, "a recording", f"{type(error).__name__}: {error}")
        finally:
            changed = attributes.difference()
            attributes.restore()
            written = Snapshot(self._backend, region.state.parameters).names_changed_since(weights)
            weights.restore()
            present.restore()
        if finding is None and changed is not None:
            finding = changed
        if finding is None and written:
            finding = Finding(Reason.PARAMETER_WRITTEN, written[0], "parameters that are only read", "written in place")
        if finding is not None:
            self.refuse(region, finding)
            return
        sample.slot.engaged[sample.key] = engaged
        self.recordings.append(engaged.stats)

    def _make(self, sample: Sample) -> Engaged:
        """Warms up, captures and certifies.

        Raises:
            CaptureError: If the call cannot be recorded, or a trial replay differs from native.
        """
        region, call = sample.region, sample.call
        assert region.state is not None and region.buffers is not None
        parameters = region.buffers.parameters
        trainable = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        written = {name: region.state.buffers[name] for name in sample.after.names_changed_since(sample.before)}
        with stand_ins(region.module, [parameters[i] for i in trainable]) as leaves:
            recorder = Recorder(self._backend, sample.slot.pool, call, leaves, sample.cotangents)
            watched = (*region.state.buffers.values(), *(c for c in sample.cotangents if c is not None))
            inspector = Inspector(
                region.name,
                sample.slot.traces.get(sample.key),
                self._backend.device,
                call.inputs,
                parameters,
                watched,
                self._backend.random_state,
            )
            inspects = not _is_compiled(region.module)

            def run_native(watch: bool) -> tuple[Reference, Trial]:
                sample.before.restore()
                inspector.begin()
                with inspector if watch and inspects else contextlib.nullcontext():
                    watching = (inspector.begin_forward, inspector.end_forward) if watch else ()
                    reference = recorder.run_reference(*watching)
                trial = self._trial(
                    sample, reference.outputs, reference.gradients, reference.input_gradients, trainable
                )
                return reference, trial

            reference, first = run_native(watch=True)
            if inspects and inspector.difference is not None:
                raise CaptureError(inspector.difference)
            if inspects and region.part and len(inspector.trace) < MIN_OPERATIONS:
                actual = f"{len(inspector.trace)} operations"
                raise CaptureError(Finding(Reason.TOO_SMALL, region.name, f"at least {MIN_OPERATIONS}", actual))
            self._check_sharing(region, call, reference, trainable)
            sample.before.restore()
            recording = recorder.record(reference, written, sample.after.drew_since(sample.before))
            recording.kept_alive.extend(inspector.foreign)
            recording.gradients = _spread(recording.gradients, trainable, len(parameters))
            recording.several_uses = frozenset(trainable[i] for i in recording.several_uses)
            _check_memory(region, parameters, trainable, leaves)
            verdict = Verdict("off")
            if self._certify != "off":
                verdict = self._try_replay(sample, recording, first, lambda: run_native(watch=False)[1], trainable)
        with _keeping([buffer for buffer in region.buffers.buffers if buffer is not None]):
            publication = Publication(self._backend, recording.pool, region.buffers, recording.gradients)
        stats = RecordingStats(region.name, sample.signature, 0.0, recording.pool.bytes(), verdict.equal)
        step = self._dispatcher.step
        trace = inspector.trace if inspects else None
        return Engaged(
            recording, publication, stats, trace, last_used=step, verified_step=step, input_uses=sample.input_uses
        )

    def _check_sharing(self, region: Region, call: Call, reference: Reference, trainable: list[int]) -> None:
        """Refuses a region whose parameters get gradients from several places in an order we cannot keep."""
        assert region.buffers is not None
        several = {trainable[i] for i in reference.several_uses}
        reached = {trainable[i] for i, gradient in enumerate(reference.gradients) if gradient is not None}
        elsewhere = set(region.outside)
        if region.most_calls > 1:
            elsewhere |= reached
        for other in self.regions:
            if other is not region and other.buffers is not None:
                owned = other.buffers.positions
                elsewhere |= {i for i in reached if id(region.buffers.parameters[i]) in owned}
        critical = (elsewhere & reached) if call.modes.autocast_caches_weights else (elsewhere & several)
        if critical:
            assert region.state is not None
            name = list(region.state.parameters)[min(critical)]
            raise CaptureError(
                Finding(Reason.SHARED_PARAMETER, name, "one place that gives it a gradient", "several calls or uses")
            )

    def _trial(
        self,
        sample: Sample,
        outputs: list[Tensor],
        gradients: list[Tensor | None],
        input_gradients: list[Tensor | None],
        trainable: list[int],
    ) -> Trial:
        """Collects what a run produced: copies, by dotted name."""
        region = sample.region
        assert region.state is not None
        names = list(region.state.parameters)
        trial: Trial = {f"{region.name}()[{i}]": output.clone() for i, output in enumerate(outputs)}
        for i, gradient in zip(trainable, gradients, strict=True):
            trial[f"{names[i]}.grad"] = None if gradient is None else gradient.clone()
        for path, gradient in zip(sample.call.paths, input_gradients, strict=True):
            trial[f"{path}.grad"] = None if gradient is None else gradient.clone()
        for name, buffer in region.state.buffers.items():
            trial[name] = buffer.detach().clone()
        trial["the device's random state"] = self._backend.random_state()
        return trial

    def _try_replay(
        self, sample: Sample, recording: Recording, first: Trial, run_native: Callable[[], Trial], trainable: list[int]
    ) -> Verdict:
        """Replays a fresh recording once from the state of the sample, and compares with native.

        Raises:
            CaptureError: If the replay must not be used.
        """
        sample.before.restore()
        outputs = recording.forward([clone_exactly(t) for t in sample.call.inputs])
        recording.backward([None if c is None else clone_exactly(c) for c in sample.cotangents])
        gradients = [recording.gradients[i] for i in trainable]
        replay = self._trial(sample, outputs, gradients, recording.input_gradients, trainable)
        sample.after.restore()
        trained = self._trial(sample, sample.outputs, gradients, recording.input_gradients, trainable)
        verdict = certify(
            "bitwise" if self._certify == "bitwise" else "auto",
            [trained, first],
            replay,
            run_native,
            repeats=torch.are_deterministic_algorithms_enabled(),
        )
        if not verdict.equal:
            raise CaptureError(
                Finding(Reason.MISMATCH, sample.region.name, "a replay equal to native", verdict.difference)
            )
        return verdict

    # -- the end -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def expecting_references(self, owner: object) -> Iterator[None]:
        """Counts references that a block adds to gradient buffers as nobody's, for as long as their owner lives."""
        with contextlib.ExitStack() as stack:
            for region in self.regions:
                if region.buffers is not None:
                    stack.enter_context(region.buffers.expecting_references(owner))
            yield

    def invalidate(self, finding: Finding) -> None:
        """Drops all recordings; they are made again when their signatures have been seen often enough."""
        for region in self.regions:
            strikes = region.strikes
            region.retire(finding)
            region.strikes, region.refusal = strikes, None

    def close(self) -> None:
        """Gives all recordings back."""
        self._forget_step()
        for region in self.regions:
            region.slots.clear()
        self.regions.clear()
        self._backend.close()


@contextlib.contextmanager
def _keeping(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Puts the values of gradient buffers back: another recording's may be bound to parameters, or kept by the user."""
    values = [clone_exactly(tensor) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """Returns the place of a tensor in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _edges(loss: Tensor) -> Iterator[tuple[Any, tuple[Any, int]]]:
    """Yields each operation of an autograd graph with each place it gives a gradient to."""
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
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


def _make_region(name: str, module: Module) -> Region:
    """Makes a region. The forward of its class is looked up at each call, as Python does."""
    given = module.__dict__.get("forward")
    region = Region(name, module, given or partial(_run_own_forward, module), instance_forward=given)
    if given is not None and type(module).__name__ != "OptimizedModule":
        actual = f"an instance attribute {given!r}"
        region.refusal = Finding(Reason.REPLACED_FORWARD, name, "the forward of its class", actual)
    return region


def _run_own_forward(module: Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _module_at(root: Module, name: str) -> Module | None:
    """Returns the module at a dotted path, or None."""
    module: Module | None = root
    for part in () if name == "self" else name.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def _hooked(engaged: Engaged) -> list[Parameter]:
    """Returns the parameters with tensor hooks or post-accumulate hooks."""
    publication = engaged.publication
    parameters = [publication.buffers.parameters[i] for i in publication.positions]
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def _check_memory(
    region: Region, parameters: Sequence[Parameter], trainable: Sequence[int], leaves: Sequence[Parameter]
) -> None:
    """Refuses a region that moved its parameters to other memory while it was recorded: a recording would miss them."""
    for position, leaf in zip(trainable, leaves, strict=True):
        if leaf.data_ptr() != parameters[position].data_ptr():
            assert region.state is not None
            name = list(region.state.parameters)[position]
            raise CaptureError(
                Finding(
                    Reason.PARAMETER_WRITTEN, name, "parameters that stay where they are", "new memory (set_ or .data)"
                )
            )


def _spread(gradients: list[Tensor | None], positions: list[int], length: int) -> list[Tensor | None]:
    """Places the gradients of some parameters among all."""
    placed: list[Tensor | None] = [None] * length
    for position, gradient in zip(positions, gradients, strict=True):
        placed[position] = gradient
    return placed


def _is_compiled(root: Module) -> bool:
    """Tells whether torch.compile is at work in a module tree; a dispatch mode would switch it off."""
    return any(_is_compiled_itself(module) for module in root.modules())


def _is_compiled_itself(module: Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _uncompiled_modules(root: Module, path: str = "") -> Iterator[tuple[str, Module]]:
    """Yields a module tree without what lies inside compiled modules: an attribute set there would recompile them."""
    if root._compiled_call_impl is None:
        yield path, root
    if _is_compiled_itself(root):
        return
    for name, child in root.named_children():
        yield from _uncompiled_modules(child, join(path, name))
