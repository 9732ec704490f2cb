# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Make a recording of a native call after its step: warm up, capture, certify, and leave no trace."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_replay.certification import Trial, Verdict, certify, nondeterminism_alerts
from lightning_replay.dispatch import Engaged, Region
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.layout import clone_exactly, has_memory
from lightning_replay.engine.recording import Call, Recorder, Recording, Reference
from lightning_replay.engine.snapshot import Snapshot
from lightning_replay.engine.standins import stand_ins
from lightning_replay.errors import CaptureError
from lightning_replay.gradients import Publication, shared_places
from lightning_replay.guards.module import AttributeWatch
from lightning_replay.inspection import Inspector
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import RecordingStats
from lightning_replay.runner.calls import Sample
from lightning_replay.runner.modules import is_compiled
from lightning_replay.runner.watching import BackwardWatch

MIN_OPERATIONS = 8
"""Forward operations below which a part of a network does not pay for its own replay."""


class Maker:
    """Makes samples into recordings.

    Args:
        backend: Makes the graphs.
        certify: How a fresh recording is compared with native before it is used.
        regions: The regions of the run; the list may grow.
    """

    def __init__(
        self, backend: GraphBackend, certify: Literal["auto", "bitwise", "off"], regions: list[Region]
    ) -> None:
        self._backend = backend
        self._certify = certify
        self._regions = regions

    def make(self, sample: Sample, step: int) -> Engaged | Finding:
        """Makes a sample into a recording, and leaves no trace whether that succeeds or not.

        Args:
            sample: The native call; its step's backward pass is over.
            step: The number of the step.

        Returns:
            The recording, or why there is none.
        """
        region = sample.region
        assert region.state is not None and region.buffers is not None
        for position in sample.unreached:
            sample.cotangents[position] = None
        started = time.perf_counter()
        try:
            present = Snapshot(self._backend, region.state.buffers)
            weights = Snapshot(self._backend, region.state.parameters)
        except Exception as error:
            return _why_failed(region, error)
        attributes = AttributeWatch(region.members, region.module, region.ignored, region.entry)
        finding = None
        try:
            engaged = self._record(sample, step)
            engaged.stats.capture_seconds = time.perf_counter() - started
        except Exception as error:
            finding = _why_failed(region, error)
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
        return engaged if finding is None else finding

    def _record(self, sample: Sample, step: int) -> Engaged:
        """Warms up, captures and certifies.

        Raises:
            CaptureError: If the call cannot be recorded, or a trial replay differs from native.
        """
        region, call = sample.region, sample.call
        assert region.state is not None and region.buffers is not None
        parameters = region.buffers.parameters
        self._check_gradients(region)
        # First, so that the recording fills what they leave of the pool's segments.
        reached = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        region.buffers.provide(self._backend, sample.slot.pool, reached)
        self._backend.prepare()
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
                [buffer for name, buffer in region.state.buffers.items() if name not in written],
                self._backend.random_state,
            )
            inspects = not is_compiled(region.module)

            def constants() -> contextlib.AbstractContextManager[Any]:
                return inspector.constants if inspector.constants.needed else contextlib.nullcontext()

            native_runs = 0

            def run_native(watch: bool = False) -> tuple[Reference, Trial]:
                nonlocal native_runs
                native_runs += 1
                sample.before.restore()
                inspector.begin()
                backward = BackwardWatch(region.name, self._backend.device)

                def end_forward() -> None:
                    inspector.end_forward()
                    backward.begin()

                with inspector if watch and inspects else constants(), backward:
                    watching = (inspector.begin_forward, end_forward) if watch else ()
                    try:
                        reference = recorder.run_reference(*watching)
                    except Exception as error:
                        if isinstance(error, CaptureError) or inspector.finding is None:
                            raise
                        raise CaptureError(inspector.finding) from error  # TorchScript makes errors its own
                if inspector.finding is not None:  # the region has caught the error, or there was none
                    raise CaptureError(inspector.finding)
                if backward.finding is not None:
                    raise CaptureError(backward.finding)
                trial = self._trial(
                    sample, reference.outputs, reference.gradients, reference.input_gradients, trainable
                )
                return reference, trial

            def find_declared() -> list[str]:
                if not inspects:  # a compiled module would be compiled again
                    return []
                with nondeterminism_alerts() as names, contextlib.suppress(CaptureError):  # other kernels may wait
                    run_native()
                return names

            reference, first = run_native(watch=True)
            if inspects and inspector.difference is not None:
                raise CaptureError(inspector.difference)
            if (finding := region.find_read(inspector.foreign)) is not None:
                raise CaptureError(finding)
            if inspects and region.part and len(inspector.trace) < MIN_OPERATIONS:
                actual = f"{len(inspector.trace)} operations"
                raise CaptureError(Finding(Reason.TOO_SMALL, region.name, f"at least {MIN_OPERATIONS}", actual))
            self._check_sharing(region, call, reference, trainable)

            def capture(unnoticed: bool) -> tuple[Recording, Verdict]:
                sample.before.restore()
                draws = sample.after.drew_since(sample.before)
                recording = recorder.record(reference, written, draws, constants(), unnoticed)
                recording.kept_alive.extend(inspector.foreign)
                recording.gradients = spread(recording.gradients, trainable, len(parameters))
                recording.trainable = trainable
                recording.several_uses = frozenset(trainable[i] for i in recording.several_uses)
                _check_memory(region, parameters, trainable, leaves)
                if self._certify == "off":
                    return recording, Verdict("off")
                return recording, self._try_replay(
                    sample, recording, first, lambda: run_native()[1], find_declared, trainable
                )

            try:
                recording, verdict = capture(sample.unnoticed)
            except CaptureError as error:
                if not sample.unnoticed or error.finding.reason is not Reason.MISMATCH:
                    raise
                recording, verdict = capture(False)  # only so does a capture hold what is launched without torch
        with _keeping(region.buffers.in_use()):
            publication = Publication(self._backend, recording.pool, region.buffers, recording.gradients)
        stats = RecordingStats(region.name, sample.signature, 0.0, recording.pool.bytes(), verdict.equal)
        stats.native_runs, stats.nondeterministic = native_runs, verdict.operations
        trace = inspector.trace if inspects else None
        return Engaged(
            recording,
            publication,
            stats,
            trace,
            last_used=step,
            verified_step=step,
            input_uses=sample.input_uses,
            reads=inspector.constants.reads,
        )

    def _check_gradients(self, region: Region) -> None:
        """Refuses a region in whose gradients it counts in which order their parts arrive.

        Autograd gives each part the dtype that is asked for before it adds it to others, and adds to what several
        parameters share as it comes to them.
        """
        assert region.state is not None
        owned = chain.from_iterable(other.module.parameters() for other in self._regions)  # of refused ones too
        live = {id(p): p.grad for p in owned if p.grad is not None and has_memory(p.grad)}
        shared = shared_places(live.values())
        for name, parameter in region.state.parameters.items():
            wanted = getattr(parameter, "grad_dtype", parameter.dtype)  # older releases of torch have none
            if wanted != parameter.dtype:
                raise CaptureError(Finding(Reason.GRADIENT, name, f"grad_dtype={parameter.dtype}", f"{wanted}"))
            if id(parameter) in live and live[id(parameter)].data_ptr() in shared:
                actual = "that of another parameter too"
                raise CaptureError(Finding(Reason.GRADIENT, name, "a gradient with memory of its own", actual))

    def _check_sharing(self, region: Region, call: Call, reference: Reference, trainable: list[int]) -> None:
        """Refuses a region whose parameters get gradients from several places in an order we cannot keep."""
        assert region.buffers is not None
        several = {trainable[i] for i in reference.several_uses}
        reached = {trainable[i] for i, gradient in enumerate(reference.gradients) if gradient is not None}
        elsewhere = set(region.outside)
        if region.most_calls > 1:
            elsewhere |= reached
        for other in self._regions:
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
        """Collects what a run produced, by dotted name."""
        region = sample.region
        assert region.state is not None
        names = list(region.state.parameters)
        trial: Trial = {f"{names[i]}.grad": gradient for i, gradient in zip(trainable, gradients, strict=True)}
        trial |= {f"{path}.grad": gradient for path, gradient in zip(sample.call.paths, input_gradients, strict=True)}
        return self._forward_trial(sample, outputs) | trial

    def _forward_trial(self, sample: Sample, outputs: list[Tensor]) -> Trial:
        """Collects what a forward pass produced. Only buffers are copied: they will be put back."""
        region = sample.region
        assert region.state is not None
        trial: Trial = {f"{region.name}()[{i}]": output for i, output in enumerate(outputs)}
        for name, buffer in region.state.buffers.items():
            trial[name] = buffer.detach().clone()
        trial["the device's random state"] = self._backend.random_state()
        return trial

    def _try_replay(
        self,
        sample: Sample,
        recording: Recording,
        first: Trial,
        run_native: Callable[[], Trial],
        find_declared: Callable[[], Sequence[str]],
        trainable: list[int],
    ) -> Verdict:
        """Replays a fresh recording from the state of the sample, and compares with native.

        Raises:
            CaptureError: If the replay must not be used.
        """

        def replay() -> Trial:
            self._backend.clear(recording.pool)
            sample.before.restore()
            outputs = recording.forward([clone_exactly(t) for t in sample.call.inputs])
            recording.backward([None if c is None else clone_exactly(c) for c in sample.cotangents])
            gradients = [recording.gradients[i] for i in trainable]
            return self._trial(sample, outputs, gradients, recording.input_gradients, trainable)

        trial = replay()
        sample.after.restore()
        trained = self._forward_trial(sample, sample.outputs)  # its gradients are part of larger sums
        mode: Literal["auto", "bitwise"] = "bitwise" if self._certify == "bitwise" else "auto"
        verdict = certify(mode, [trained, first], trial, run_native, find_declared, replay)
        if not verdict.equal:
            raise CaptureError(Finding(Reason.MISMATCH, verdict.where, "a replay equal to native", verdict.difference))
        return verdict


def _why_failed(region: Region, error: Exception) -> Finding:
    if isinstance(error, CaptureError):
        return error.finding
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return Finding(Reason.OUT_OF_MEMORY, region.name, "memory for a recording", str(error).split("\n")[0])
    return Finding(Reason.CAPTURE_FAILED, region.name, "a recording", f"{type(error).__name__}: {error}")


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


def spread(gradients: list[Tensor | None], positions: list[int], length: int) -> list[Tensor | None]:
    """Places the gradients of some parameters among all."""
    placed: list[Tensor | None] = [None] * length
    for position, gradient in zip(positions, gradients, strict=True):
        placed[position] = gradient
    return placed
