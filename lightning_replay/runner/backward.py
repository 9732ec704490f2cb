# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The autograd pass of a step: replayed calls are differentiated, and their gradients handed over at its end."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_replay.dispatch import Region
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.layout import clone_exactly
from lightning_replay.engine.recording import Recorder, edges
from lightning_replay.engine.snapshot import Snapshot
from lightning_replay.engine.standins import stand_ins
from lightning_replay.errors import NotReplayedError
from lightning_replay.gradients import GradientBuffers, hand_over
from lightning_replay.reasons import Finding, Reason
from lightning_replay.runner.calls import NativePart, PendingCall, ReplayFunction
from lightning_replay.runner.making import spread

MAX_COTANGENT_MISMATCHES = 3
"""Backward passes redone natively, because another set of results got gradients, before a recording is retired."""


class BackwardPass:
    """Differentiates the replayed calls of a step and hands their gradients over.

    Attributes:
        running: Autograd is at work on a loss of Lightning's.
        must_check_inputs: A replayed call of this step uses a trainable argument several times.
        native_calls: Sequence numbers of the autograd nodes of each native call of a region in this step.
        published: Passes whose gradients were published into stable buffers.
        added: Passes in which gradients were added to live ones.
        copied: Passes in which gradients needed memory of their own.

    Args:
        backend: Gives the device's generator.
        regions: The regions of the run; the list may grow.
        on_finding: Called for each finding.
    """

    def __init__(self, backend: GraphBackend, regions: list[Region], on_finding: Callable[[Finding], None]) -> None:
        self._backend = backend
        self._regions = regions
        self._on_finding = on_finding
        self._arrived: list[PendingCall | NativePart] = []
        self._hooks: list[tuple[dict[int, Any], int, Any]] = []
        self.running = False
        self.must_check_inputs = False
        self.native_calls: list[range] = []
        self.published = 0
        self.added = 0
        self.copied = 0

    def forget(self) -> None:
        """Drops what a step without a backward left behind."""
        self._arrived.clear()
        self.native_calls.clear()
        self.must_check_inputs = False

    @contextlib.contextmanager
    def around(self, loss: Tensor, replays: bool) -> Iterator[None]:
        """Surrounds the autograd pass of a step.

        Args:
            loss: The tensor that is differentiated.
            replays: A call of the step was replayed. Autograd then works in this thread, in the order it always has: a
                handful of nodes, one of them in Python, are not worth waking its own thread and handing Python over.
        """
        outside = self._outside_uses(loss)
        if self.must_check_inputs:
            self._check_inputs(loss)
        # A parameter gets native gradients only where the walk met it, or below a native call.
        hooks = self._collect_native_parts(loss) if outside or self.native_calls else {}
        shared = frozenset(outside)
        self.running = True
        try:
            with torch.autograd.set_multithreading_enabled(False) if replays else contextlib.nullcontext():
                yield
            self._settle(shared)
        except Exception:  # gradients of which all parts have arrived are there, as in native
            with contextlib.suppress(NotReplayedError):
                self._settle(shared, self._incomplete(loss, hooks.values()))
            raise
        finally:
            self.running = False
            for hook in hooks:
                hook.remove()
            self._put_hooks_back()
            self._arrived.clear()
        self.forget()

    def drop_failed(self, region: Region, error: Exception) -> None:
        """Drops the recordings of a region after a replay that raised."""
        finding = Finding(Reason.REPLAY_FAILED, region.name, "a replay", f"{type(error).__name__}: {error}")
        region.retire(finding)
        self._on_finding(finding)

    def _outside_uses(self, loss: Tensor) -> list[Parameter]:
        """Walks the autograd graph around the regions' calls and finds their parameters in it.

        Returns:
            The parameters that replayed calls and operations outside of them share.
        """
        inside = set().union(*self.native_calls)
        shared: list[Parameter] = []
        replayed: set[int] = set()
        for node, (following, _) in edges(loss):
            if isinstance(node, ReplayFunction._backward_cls):
                call: PendingCall = node.pending  # type: ignore[attr-defined]
                replayed |= call.engaged.publication.buffers.positions.keys()
                continue  # it leads to arguments, and to its own parameters with hooks
            variable = getattr(following, "variable", None)
            if variable is None or node._sequence_nr() in inside:
                continue
            for region in self._regions:
                if region.buffers is not None and id(variable) in region.buffers.positions:
                    region.outside.add(region.buffers.positions[id(variable)])
                    shared.append(variable)
        return [parameter for parameter in dict.fromkeys(shared) if id(parameter) in replayed]

    def _check_inputs(self, loss: Tensor) -> None:
        """Refuses a backward pass that would add up the gradient of a replayed call's argument in another order.

        Raises:
            NotReplayedError: If another operation uses an argument that the recorded call uses several times.
        """
        calls: dict[Any, list[tuple[PendingCall, int]]] = {}
        for node, edge in edges(loss):
            if isinstance(node, ReplayFunction._backward_cls):
                call: PendingCall = node.pending  # type: ignore[attr-defined]
                if edge in call.input_uses:
                    calls.setdefault(edge, []).append((call, node._sequence_nr()))  # type: ignore[attr-defined]
        if not any(call.input_uses[edge] > 1 for edge, users in calls.items() for call, _ in users):
            return
        for node, edge in edges(loss):
            for call, number in calls.get(edge, ()):
                if call.input_uses[edge] > 1 and node._sequence_nr() > number:
                    actual = "a use that was not there when the region was recorded"
                    where = call.region.name
                    raise NotReplayedError(Finding(Reason.SHARED_PARAMETER, where, "one use of an argument", actual))

    def _collect_native_parts(self, loss: Tensor) -> dict[Any, dict[int, Parameter]]:
        """Collects native contributions to parameters that replayed calls contribute to as well, in order of arrival.

        Autograd adds up all parts of a gradient, in the order in which they arrive, before a live gradient or a hook
        sees anything of them.

        Returns:
            Handles of the hooks that collect them, one for each operation, with what has not arrived from it yet.

        Raises:
            NotReplayedError: If a sum that other parts belong into cannot be taken apart.
        """
        calls: list[PendingCall] = []
        replayed: Counter[int] = Counter()
        possible: set[int] = set()  # a call that is differentiated anew may reach parameters it did not reach
        fragile: set[int] = set()  # where a recording has already added or cast what others should have joined
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
                parameters = publication.buffers.parameters
                fragile |= {id(parameters[i]) for i in positions}
                hooked = set(map(id, call.hooked))
                calls.append(call)
                replayed.update(id(parameters[i]) for i in publication.positions)
                possible |= {id(p) for p in parameters if p.requires_grad} - hooked
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
        joined = {key for key in fragile if replayed[key] + len(native.get(key, ())) > 1}
        if joined:
            casts = {key for key in joined & native.keys() if any("ToCopy" in node.name() for node, *_ in native[key])}
            for call in calls:
                _leave_apart(call, joined, casts | {key for key in joined if replayed[key] > 1})
        places: dict[Any, dict[int, Parameter]] = {}
        for key in possible & native.keys():
            for node, index, parameter in native[key]:
                places.setdefault(node, {})[index] = parameter
        return {
            node.register_hook(partial(self._take_native_parts, missing)): missing for node, missing in places.items()
        }

    def _take_native_parts(
        self, missing: dict[int, Parameter], gradients: tuple[Tensor | None, ...], _: Any
    ) -> tuple[Tensor | None, ...]:
        """Keeps contributions of a native operation from autograd, to be added in their turn."""
        places = dict(missing)
        missing.clear()
        for index, parameter in places.items():
            gradient = gradients[index]
            self._spare_hooks(parameter)
            if gradient is not None:
                self._arrived.append(NativePart(parameter, gradient))
        return tuple(None if index in places else gradient for index, gradient in enumerate(gradients))

    def differentiate(self, pending: PendingCall, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Replays the backward of a call; called by autograd.

        Raises:
            NotReplayedError: If the call is differentiated in a way that a recording cannot give.
        """
        name = pending.region.name
        if torch.is_grad_enabled():
            raise NotReplayedError(Finding(Reason.HIGHER_ORDER, name, "one plain backward", "create_graph=True"))
        if pending.done or not self.running:
            actual = "another backward" if pending.done else "a backward outside of Lightning's"
            raise NotReplayedError(Finding(Reason.REPEATED_BACKWARD, name, "one backward by Lightning", actual))
        pending.done = True
        engaged = pending.engaged
        recording = engaged.recording
        failed = None
        if matches := not pending.apart and recording.matches(cotangents):
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
            self.drop_failed(pending.region, failed)
        elif pending.apart:
            finding = _new_use(pending.region)
            self._on_finding(finding)
            pending.region.retire(finding)
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
            if gradient is None:
                self._spare_hooks(parameter)
        pending.gradients = gradients
        return given

    def _spare_hooks(self, parameter: Parameter) -> None:
        """Keeps the hooks of a parameter from being called without a gradient, until the pass is over.

        Autograd comes to it all the same, with nothing. A hook of several tensors counts that.
        """
        mark = _mark(parameter.grad)
        for hooks, guarded in (
            (parameter._backward_hooks or {}, _call_with_gradient),
            (parameter._post_accumulate_grad_hooks or {}, partial(_call_after_change, mark)),
        ):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", None) != torch.autograd.graph.__name__:
                    self._hooks.append((hooks, key, hook))
                    hooks[key] = partial(guarded, hook)

    def _put_hooks_back(self) -> None:
        while self._hooks:
            hooks, key, hook = self._hooks.pop()
            if key in hooks:  # not removed meanwhile
                hooks[key] = hook

    def _recompute(
        self, pending: PendingCall, cotangents: tuple[Tensor | None, ...]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Runs a replayed call natively from the state at its entry, and differentiates that run.

        What is to be left apart arrives here, part by part.
        """
        recording = pending.engaged.recording
        buffers = pending.engaged.publication.buffers
        now = Snapshot(self._backend, recording.written)
        for buffer, shadow in zip(recording.written.values(), recording.shadows, strict=True):
            buffer.data.copy_(shadow)
        if pending.random_before is not None:
            self._backend.set_random_state(pending.random_before)
        trainable = recording.trainable  # a graph of autograd does not change with what is frozen later
        try:
            with stand_ins(pending.region.module, [buffers.parameters[i] for i in trainable]) as leaves:
                recorder = Recorder(self._backend, recording.pool, recording.call, leaves, cotangents)
                apart = [trainable.index(position) for position in pending.apart]
                gradients, inputs, parts = recorder.differentiate_natively(apart)
        finally:
            now.restore()
        self._arrived += [NativePart(buffers.parameters[trainable[i]], gradient) for i, gradient in parts]
        return spread(gradients, trainable, len(buffers.parameters)), inputs

    def _incomplete(self, loss: Tensor, missing: Iterable[dict[int, Parameter]]) -> set[Parameter]:
        """Finds the parameters that miss a part of their gradient after a backward pass that raised.

        Args:
            loss: The tensor that was differentiated.
            missing: The native parts that have not arrived.
        """
        found = {parameter for places in missing for parameter in places.values()}
        outputs: dict[PendingCall, set[int]] = {}
        for node, output in [(loss.grad_fn, loss.output_nr), *(edge for _, edge in edges(loss))]:
            if isinstance(node, ReplayFunction._backward_cls):
                outputs.setdefault(node.pending, set()).add(output)  # type: ignore[attr-defined]
        for call in outputs.keys() - set(self._arrived):
            recorded = {i for i, cotangent in enumerate(call.engaged.recording.cotangents) if cotangent is not None}
            publication = call.engaged.publication
            # With gradients for other outputs it would have been differentiated anew, and may have reached any.
            found.update(publication.parameters if outputs[call] <= recorded else publication.buffers.parameters)
        return found

    def _publish(self, arrived: list[PendingCall | NativePart]) -> bool:
        """Publishes the gradients of all calls, if each parameter has one part and its buffer is free."""
        calls = [call for call in arrived if isinstance(call, PendingCall) and call.is_whole]
        publications = [call.engaged.publication for call in calls]
        parameters = [id(p) for publication in publications for p in publication.parameters] if len(calls) > 1 else []
        if len(calls) < len(arrived) or len(set(parameters)) < len(parameters):
            return False
        if not all(publication.is_possible() for publication in publications):
            return False
        for call in calls:
            try:
                call.engaged.publication.publish()
            except Exception as error:  # whatever the driver reports
                self.drop_failed(call.region, error)
                arrived[:] = calls[calls.index(call) :]
                return False
        self.published += 1
        return True

    def _settle(self, shared: frozenset[Parameter], incomplete: Collection[Parameter] = ()) -> None:
        """Hands the gradients of all calls of the step over to the parameters.

        Args:
            shared: Parameters that operations outside of the calls use too.
            incomplete: Parameters that get nothing, as parts of their gradients are missing.
        """
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        if not shared and not incomplete and self._publish(arrived):
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
        # What was frozen since the forward pass gets nothing, as AccumulateGrad asks at the end too.
        contributions = {p: parts for p, parts in contributions.items() if p.requires_grad and p not in incomplete}
        for parameter, parts in contributions.items():
            region = several.get(parameter)
            if region is not None and len(parts) + (parameter in shared) > 1:
                raise NotReplayedError(_new_use(region))
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


def _call_with_gradient(hook: Callable[[Tensor], Any], gradient: Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def _call_after_change(mark: tuple[int, int] | None, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
    if _mark(parameter.grad) != mark:
        hook(parameter)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    """Returns what tells whether a gradient was replaced or added to."""
    return None if gradient is None else (id(gradient), gradient._version)


def _new_use(region: Region) -> Finding:
    actual = "a use that was not there when the region was recorded"
    return Finding(Reason.SHARED_PARAMETER, region.name, "one use of it", actual)


def _leave_apart(call: PendingCall, joined: set[int], cast: set[int]) -> None:
    """Has a call differentiated so that others can join its parts of some gradients.

    Args:
        call: The replayed call.
        joined: Parameters, by id, that others give a gradient too.
        cast: Those of them of which others may use a cast, one that autocast would have shared with this call.

    Raises:
        NotReplayedError: If the parts are added up where others cannot join them: below a shared cast, or for a hook.
    """
    buffers, recording = call.engaged.publication.buffers, call.engaged.recording
    cached = recording.call.modes.autocast_caches_weights
    hooked = set(map(id, call.hooked))
    for key in joined & buffers.positions.keys():
        several = buffers.positions[key] in recording.several_uses
        if (cached and key in cast) or (several and key in hooked):
            raise NotReplayedError(_new_use(call.region))
        if several:
            call.apart.add(buffers.positions[key])
