# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Run training steps with recorded regions. Knows torch only; the strategy tells it when a step and a backward begin.

Note [one step]
    forward    Every call of a region goes through `_call`: dispatch decides, and the call is run natively (perhaps
               observed, perhaps kept as a sample) or replayed as one autograd node.
    backward   The node replays the backward graph. When autograd is done, the gradients of all calls are handed over,
               and samples are made into recordings: the native step is over then, its activations are freed, and
               the incoming gradients of the sample are known.

Note [memory between steps]
    Graphs live in pools of their own, and cannot use what the caching allocator keeps for native steps. So that memory
    is given back three times. After the first backward pass: the optimizer is about to allocate its state, and would
    put it among the activations, whose memory could then never be returned. After a recording. And once the gradients
    of the recorded, native step are gone, which lay among its activations too.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lightning_replay.dispatch import MAX_STRIKES, PAYBACK_REPLAYS, Action, Decision, Dispatcher, Region
from lightning_replay.effects import EffectWatch
from lightning_replay.engine import tree
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.interposition import interposed
from lightning_replay.engine.layout import clone_exactly
from lightning_replay.engine.recording import Call, check_outputs, sequence_number, take_apart
from lightning_replay.engine.snapshot import Snapshot
from lightning_replay.errors import CaptureError
from lightning_replay.guards.module import AttributeWatch, IsOutsider, is_moving, join, recurrent_networks
from lightning_replay.guards.parameters import with_line
from lightning_replay.guards.signature import Arguments, read_arguments
from lightning_replay.inspection import Trace, Tracer
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import RecordingStats
from lightning_replay.runner.backward import BackwardPass
from lightning_replay.runner.calls import PendingCall, ReplayFunction, Sample, edge_of, hooked_parameters
from lightning_replay.runner.making import Maker
from lightning_replay.runner.modules import is_compiled, make_region, module_at, uncompiled_modules

StepAction = Literal["native", "record", "replay"]


Watching = Callable[[Callable[[Finding], None]], contextlib.AbstractContextManager[None]]
"""Surrounds an observed call of a region; given a function that refuses the region."""

MAX_UNREADY = 5
"""Calls of a region, never recorded, that its hooks or arguments forbade to record, before its parts are tried."""

MAX_MISSES = 5
"""Calls in a row that read other numbers than the recording, after which another one is to be made."""

MAX_UNSETTLED = 5
"""Calls of a signature that read other numbers from the device than the one before, before a region is given up."""

UNREADY = frozenset({Reason.HOOKS, Reason.ARGUMENT, Reason.UNSUPPORTED_TENSOR})
"""Reasons for which a call is not even observed, and that may end with the next one."""

HOLDING = frozenset(
    {Reason.SCRIPTED_MODULE, Reason.TRAINER_READ, Reason.HOST_RANDOM, Reason.HOST_EFFECT, Reason.ATTRIBUTE_WRITTEN}
)
"""Reasons found in what the modules of a region hold, before a call is observed."""

SPLITTING = UNREADY | frozenset(
    {
        Reason.ATTRIBUTE_WRITTEN,
        Reason.MODULE_CHANGED,
        Reason.SCRIPTED_MODULE,
        Reason.BUFFER_REBOUND,
        Reason.PARAMETER_WRITTEN,
        Reason.LOG_IN_REGION,
        Reason.TRAINER_READ,
        Reason.INPUT_WRITTEN,
        Reason.OUTPUT_ALIAS,
        Reason.RESULT,
        Reason.FOREIGN_GRAPH,
        Reason.HOST_SYNC,
        Reason.HOST_READ,
        Reason.HOST_TENSOR,
        Reason.HOST_RANDOM,
        Reason.HOST_EFFECT,
        Reason.PYTHON_VALUE,
        Reason.SHARED_PARAMETER,
        Reason.GRADIENT,
    }
)
"""Reasons that may concern only a part of a region: its parts are tried by themselves."""


class Runner:
    """Records and replays the regions of one training run.

    Args:
        backend: Makes the graphs.
        warmup_steps: Native sightings of a signature before it is recorded.
        max_recordings: Recordings kept for each region.
        certify: How a fresh recording is compared with native before it is used.
        on_finding: Called for each finding that makes a call native.
        root: The module tree that runs in a step; an RNN anywhere in it may forbid recording.
        recordings: The list that gets what is known of each recording as it is made; None makes one.
        watching: Surrounds each observed call.
        is_outsider: Tells of an object, and of the one that holds it, whether it changes unseen.
    """

    def __init__(
        self,
        backend: GraphBackend,
        warmup_steps: int,
        max_recordings: int,
        certify: Literal["auto", "bitwise", "off"],
        on_finding: Callable[[Finding], None],
        root: Module | None = None,
        recordings: list[RecordingStats] | None = None,
        watching: Watching = lambda _: contextlib.nullcontext(),
        is_outsider: IsOutsider = is_moving,
    ) -> None:
        self._recurrent = [] if root is None else recurrent_networks("", root)
        self._backend = backend
        self._dispatcher = Dispatcher(backend.device, backend.new_pool, warmup_steps, max_recordings, is_outsider)
        self.regions: list[Region] = []
        self._maker = Maker(backend, certify, self.regions)
        self._backward = BackwardPass(backend, self.regions, on_finding)
        self._on_finding = on_finding
        self._root: Module | None = None
        self._counts = True
        self._samples: list[Sample] = []
        self._trims = True
        self.recordings = [] if recordings is None else recordings
        self._step: Counter[Action] = Counter()
        self._to_split: list[Region] = []
        self._split: set[Region] = set()
        self._anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self._watching = watching

    @property
    def gradients(self) -> BackwardPass:
        """Counts how gradients were handed over."""
        return self._backward

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def inside_region(self) -> Region | None:
        """The region whose own code is running natively, if any."""
        return self._inside

    _inside: Region | None = None

    def add_region(self, name: str, module: Module) -> None:
        """Adds a module whose calls are to be recorded."""
        self.regions.append(make_region(name, module))

    def discover(self, root: Module, step: Callable[[], Any]) -> Any:
        """Runs a step and takes the outermost calls of parameter-owning modules as regions.

        Args:
            root: The module tree in which calls are watched, the root itself included.
            step: The step.
        """
        self._root = root
        self._begin_step(counts=True)
        wrappers = {}
        for path, module in uncompiled_modules(root):
            if any(True for _ in module.parameters()):
                wrappers[module] = self._discovering(path or "self", module)
        with interposed(wrappers):
            return step()

    def _discovering(self, path: str, module: Module, part: bool = False) -> Callable[..., Any]:
        """Returns a forward that makes its module a region at the first call from outside of all regions."""
        candidate = make_region(path, module)
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

    def run_call(
        self, region: Region, args: tuple[Any, ...], counts: bool, otherwise: Callable[[], Any]
    ) -> tuple[bool, Any]:
        """Runs a step that is one call of a region.

        Args:
            region: The region.
            args: The arguments of the call.
            counts: Whether the call counts towards a new recording.
            otherwise: Runs the step if the call is not to be recorded.

        Returns:
            Whether the region was called, and what it or `otherwise` returned.
        """
        self._begin_step(counts)
        decision = self._decide(region, args, {})
        if decision.action is Action.NATIVE:
            return False, otherwise()
        return True, self._act(region, decision, args, {})

    def _find_replaced_region(self) -> Finding | None:
        """Finds a discovered region whose place in the tree another module has taken."""
        if self._root is None:
            return None
        for region in self.regions:
            if module_at(self._root, region.name) is not region.module:
                return Finding(Reason.MODULE_CHANGED, region.name, "the module first seen", "another one, or none")
        return None

    def _parts(self, region: Region, taken: Container[Module]) -> dict[Module, Callable[..., Any]]:
        """Returns wrappers that make the outermost calls inside a refused region regions of their own."""
        prefix = "" if region.name == "self" else region.name
        return {
            module: self._discovering(join(prefix, path), module, part=True)
            for path, module in uncompiled_modules(region.module)
            if module is not region.module and module not in taken and any(True for _ in module.parameters())
        }

    def _begin_step(self, counts: bool) -> None:
        self._dispatcher.step += 1
        self._dispatcher.look_for_hidden_state(self._recurrent)
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

    @property
    def watched(self) -> bool:
        """Tells whether calls of the last step ran natively under observation, which takes longer than native."""
        return self._step[Action.OBSERVE] + self._step[Action.AUDIT] > 0

    @property
    def partial(self) -> bool:
        """Tells whether the last step replayed something, and ran other calls, or the rest of a network, natively."""
        replayed = self._step[Action.REPLAY]
        return replayed > 0 and (bool(self._split) or self._step.total() > replayed)

    @property
    def called(self) -> bool:
        """Tells whether the last step called any region, or parts of one that was split."""
        return self._step.total() > 0 or bool(self._split)

    def _forget_step(self) -> None:
        """Drops what a step without a backward left behind."""
        self._samples.clear()
        self._backward.forget()

    # -- forward -------------------------------------------------------------------------------------------------

    def _wrapper(self, region: Region) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(region, args, kwargs)

        return forward

    def _call(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of a region, natively or as a replay."""
        if self._inside is not None:
            return region.run(*args, **kwargs)
        if self._backward.running:  # activation checkpointing around a region runs it again
            return self._run_natively(region, args, kwargs)
        decision = self._decide(region, args, kwargs)
        if decision.finding is not None:
            self._count_unready(region, decision.finding)
        return self._act(region, decision, args, kwargs)

    def _decide(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """Has a call decided, and counts what was."""
        refused = region.refusal is not None
        decision = self._dispatcher.decide(region, args, kwargs, self._counts)
        self._step[decision.action] += 1
        if decision.finding is not None:
            self._on_finding(decision.finding)
            if decision.finding.reason is Reason.HOST_READ:
                self._count_miss(region, decision, decision.finding)
            elif not refused and (region.refusal is not None or decision.finding.reason in HOLDING):
                self._give_up(region, decision.finding)
        return decision

    def _count_miss(self, region: Region, decision: Decision, finding: Finding) -> None:
        """Drops a recording whose numbers are not read any more, and gives the region up where that goes on."""
        if decision.slot is None or (engaged := decision.slot.engaged.get(decision.key)) is None:
            return
        engaged.misses += 1
        if engaged.misses < MAX_MISSES:
            return
        decision.slot.forget(decision.key)
        region.strikes += engaged.stats.replays < PAYBACK_REPLAYS
        if region.strikes >= MAX_STRIKES:
            self.refuse(region, finding)

    def _count_unready(self, region: Region, finding: Finding) -> None:
        """Gives a region up whose calls cannot even be observed, so that its parts are tried."""
        if finding.reason in UNREADY and region.refusal is None and not region.engaged():
            region.unready += 1
            if region.unready == MAX_UNREADY:
                self._give_up(region, finding)

    def _act(self, region: Region, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does what was decided for a call."""
        if decision.action is Action.REPLAY:
            return self._replay(region, decision, args, kwargs)
        if decision.action is Action.NATIVE:
            return self._run_natively(region, args, kwargs)
        if decision.action is Action.AUDIT:
            return self._audit(region, decision, args, kwargs)
        return self._observe(region, decision, args, kwargs)

    def _run_natively(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._noting_nodes():
            return self._run(region, args, kwargs)

    def _run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = region
        try:
            return region.run(*args, **kwargs)
        finally:
            self._inside = None

    @contextlib.contextmanager
    def _noting_nodes(self) -> Iterator[None]:
        """Surrounds a native call, outside of what watches it, and notes which autograd nodes are the call's own."""
        first = sequence_number()
        try:
            yield
        finally:
            self._backward.native_calls.append(range(first, sequence_number()))

    def refuse(self, region: Region, finding: Finding) -> None:
        """Makes a region native for good; from the next step on its parts are looked at instead."""
        region.retire(finding)
        self._give_up(region, finding)
        self._on_finding(finding)

    def _give_up(self, region: Region, finding: Finding) -> None:
        region.refusal = finding
        if finding.reason in SPLITTING:
            self._to_split.append(region)

    def _refuse_from_inside(self, region: Region, finding: Finding) -> None:
        """Makes a region native for what its own code does, unless it is already, or that code is not running."""
        if self._inside is region and region.refusal is None:
            self.refuse(region, finding)

    def _audit(self, region: Region, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a recorded call natively and compares its operations with the recorded ones."""
        assert decision.slot is not None and decision.arguments is not None
        engaged = decision.slot.engaged[decision.key]
        self._dispatcher.audit_requested.discard(region)
        watch = AttributeWatch(region.members, region.module, region.ignored, region.entry)
        with (
            self._noting_nodes(),
            self._tracer(region, engaged.trace, decision.arguments) as tracer,
            EffectWatch(self._backend.device) as effects,
        ):
            result = self._run(region, args, kwargs)
        tracer.end_forward()
        difference = watch.difference() or tracer.difference or effects.finding
        step = self._dispatcher.step
        if difference is None:
            engaged.audited(step)
            return result
        since = f"{difference.actual}; replays from step {engaged.verified_step + 1} to {step - 1} may have deviated"
        finding = Finding(difference.reason, difference.where, difference.expected, since)
        region.retire(finding)
        self._on_finding(finding)
        return result

    def _tracer(self, region: Region, expected: Trace | None, arguments: Arguments) -> Tracer:
        """Makes what writes a call's operations down."""
        assert region.state is not None
        return Tracer(region.name, expected, self._backend.device, arguments.tensors, region.state.buffers.values())

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
            run=region.again or region.run,
            structure=decision.arguments.structure,
            inputs=[clone_exactly(t) for t in tensors] if recording else [],
            paths=decision.arguments.paths,
            differentiable=[t.requires_grad for t in tensors],
            modes=decision.modes,
        )
        watch = AttributeWatch(region.members, region.module, region.ignored, region.entry)
        versions = [t._version for t in tensors]
        marks = _gradient_marks(state.parameters.values())
        before = Snapshot(self._backend, state.buffers if recording else {})
        watched = decision.trace or recording
        traced = watched and not is_compiled(region.module)
        expected = decision.slot.traces.get(decision.key) if recording else None
        with (
            self._noting_nodes(),
            self._tracer(region, expected, decision.arguments) if traced else contextlib.nullcontext() as tracer,
            EffectWatch(self._backend.device, active=watched) as effects,
            self._watching(partial(self._refuse_from_inside, region)),
        ):
            result = self._run(region, args, kwargs)
        numbers = self._backward.native_calls[-1]
        if region.refusal is not None:  # its own code did something that refuses it, such as logging
            return result
        finding = None
        if tracer is not None:
            tracer.end_forward()
            decision.slot.traces[decision.key] = tracer.trace
            finding = tracer.difference and (tracer.access or tracer.difference)
            if finding is not None and self._may_settle(decision, finding):
                self._on_finding(finding)
                return result
        after = Snapshot(self._backend, state.buffers if recording else {})
        if watched:  # libraries say things once, at a first call: what a call does that is to be recorded counts
            finding = finding or effects.finding
        changed = watch.difference()
        if changed is not None and changed.reason is Reason.ATTRIBUTE_WRITTEN and not (watched or region.wrote):
            region.wrote = True  # many networks settle something in their first call; a second time they are refused
        elif changed is not None:
            finding = with_line(changed, region.module, region.members)
        if watched and (drawn := after.host_random.moved_since(before.host_random)) is not None:
            finding = Finding(
                Reason.HOST_RANDOM,
                effects.random_line or region.name,
                f"random numbers drawn on {self._backend.device}",
                drawn,
            )
        for path, tensor, version in zip(call.paths, tensors, versions, strict=True):
            if tensor._version != version:
                finding = Finding(Reason.INPUT_WRITTEN, path, "arguments that are only read", "written in place")
        after_arguments = read_arguments(region.name, args, kwargs, self._backend.device)
        if isinstance(after_arguments, Finding) or after_arguments.structure != decision.arguments.structure:
            actual = "something in them was replaced, added or removed"
            finding = Finding(Reason.INPUT_WRITTEN, region.name, "arguments that are only read", actual)
        if _gradient_marks(state.parameters.values()) != marks:
            actual = "a gradient, or a hook on a parameter, was set"
            finding = Finding(Reason.ATTRIBUTE_WRITTEN, region.name, "parameters whose .grad is left alone", actual)
        if region.again is not None and watched and effects.blind:
            actual = "a Python profiler is at work, and effects cannot be seen"
            finding = finding or Finding(Reason.HOST_EFFECT, region.name, "no profile function", actual)
        others: dict[str, Tensor] = dict(zip(call.paths, tensors, strict=True))
        others |= state.parameters | state.buffers
        try:
            parts = take_apart(result, tensors, region.name)
            finding = finding or check_outputs(parts, others, self._backend.device)
            earlier = decision.slot.results.get(decision.key, parts.structure)
            if watched:
                decision.slot.results[decision.key] = parts.structure
            if finding is None and recording and parts.structure != earlier:
                finding = Finding(Reason.RESULT, region.name, "the plain values of the call before", "others")
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
                cotangents=[None] * len(outputs),
                edges=[(output.grad_fn, output.output_nr) for output in outputs],
                numbers=numbers,
                input_edges=[edge_of(tensor) if tensor.requires_grad else None for tensor in tensors],
                unnoticed=effects.asks,
            )
            self._samples.append(sample)
        for position, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(self._observer(region, sample, position))
        return result

    def _may_settle(self, decision: Decision, finding: Finding) -> bool:
        """Tells whether two calls that read different numbers are no reason yet to give a region up."""
        slot, key = decision.slot, decision.key
        assert slot is not None
        if finding.reason is not Reason.HOST_READ or slot.unsettled[key] >= MAX_UNSETTLED:
            return False
        slot.unsettled[key] += 1
        self._dispatcher.observe_again(slot, key)
        self._step[decision.action] -= 1
        self._step[Action.OBSERVE] += 1
        return True

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
            elif seen or not self._backward.running:
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
                pending = PendingCall(self._backward, region, engaged, random_before, hooked_parameters(engaged))
                trainable = [t for t in tensors if t.requires_grad]
                if trainable:
                    counted = zip(tensors, engaged.input_uses, strict=True)
                    pending.input_uses = {edge_of(t): uses for t, uses in counted if t.requires_grad}
                    self._backward.must_check_inputs |= any(uses > 1 for uses in pending.input_uses.values())
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
            self._backward.drop_failed(region, error)
            return self._run_natively(region, args, kwargs)
        engaged.stats.replays += 1
        engaged.last_used = self._dispatcher.step
        kinds = {"output": outputs, "input": tensors}
        given = (kinds[kind][position] for kind, position in recording.result.slots)
        return tree.rebuild(recording.result.structure, given)

    # -- backward ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Surrounds the autograd pass of a step, and records its samples afterwards.

        Args:
            loss: The tensor that is differentiated.
        """
        for sample in self._samples:
            sample.keep_outer_cotangents(loss)
            if (finding := sample.count_input_uses(loss)) is not None:
                self.refuse(sample.region, finding)
        with self._backward.around(loss, self._step[Action.REPLAY] > 0):
            yield
        samples, self._samples = self._samples, []
        self.trim()
        self._trims = bool(samples)
        while samples:
            self._record(samples.pop(0))
            self._backend.trim()

    def trim(self) -> None:
        """Gives memory back if it is time to after a backward pass: see Note [memory between steps]."""
        if self._trims:
            self._backend.trim()
            self._trims = False

    def _record(self, sample: Sample) -> None:
        region = sample.region
        if region.refusal is not None or region.state is None or sample.slot.is_pending():
            return  # refused or retired since, by another call of the same step
        if self._dispatcher.hidden_state is not None:
            return  # found in another call of the same step
        if not self._dispatcher.still_fits(region, sample.key):
            return  # something was frozen, or put into another mode, between forward and backward
        made = self._maker.make(sample, self._dispatcher.step)
        if isinstance(made, Finding):
            self.refuse(region, made)
            return
        sample.slot.engaged[sample.key] = made
        sample.slot.attempts.clear()
        self.recordings.append(made.stats)

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


def _gradient_marks(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Returns what tells whether a gradient was replaced, or a hook put on a parameter."""
    return [(id(p.grad), len(p._backward_hooks or ())) for p in parameters]
