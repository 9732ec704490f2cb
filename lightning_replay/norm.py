# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clip gradients by their norm as torch does, from a recording. Knows torch only.

Note [two kinds of recording]
    in place    The gradients lay in the same places for some calls: stable buffers, or new tensors to which the
                allocator gave the same memory again, as it does in a steady loop. Norm, coefficient and scaling are
                recorded straight on them. A replay is one launch. There can be one recording for each of a few places.
    on copies   Only their layouts stay the same. They are copied into private inputs, norm and coefficient are
                replayed, and the live gradients are scaled by it.

    A call that fits no recording is native. What it saw is counted, and a new pattern that lasts is recorded too, a
    bounded number of times; the last recording is one on copies, which fits all places. Gradients are never kept
    alive, as who owns them counts the references: a CUDA graph knows addresses only, and is replayed only while
    gradients like the recorded ones lie at them.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_replay.engine.backend import Graph, GraphBackend
from lightning_replay.engine.bits import first_difference, same_bits
from lightning_replay.engine.cuda import CudaGraphBackend
from lightning_replay.engine.layout import clone_exactly, copy_all
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.errors import CaptureError, warn
from lightning_replay.guards.gradients import (
    ALIGNMENT,
    WHERE,
    Layout,
    Place,
    are_same,
    current_stream,
    describe_layout,
    find_observer,
    find_unsupported,
    layouts_of,
    place_of,
)
from lightning_replay.reasons import Finding, Reason

BackendName = Literal["auto", "cuda", "tape"]

STABLE_CALLS = 2
"""Calls that saw the gradients in the same place before they are recorded there."""

COPY_CALLS = 6
"""Calls that saw the same layouts before a recording on copies: new gradients have found their places by then."""

PLACES = 8
"""Places that are remembered until they are met again."""

MAX_RERECORDS = 3
"""Recordings made after the first because the gradients changed; then clipping stays native."""

_PASSING = frozenset({Reason.WARM_UP, Reason.RECORDING, Reason.TIMED})
_native_clip = torch.nn.utils.clip_grad_norm_


@dataclass(slots=True, eq=False)
class NormRecording:
    """A recorded norm, with or without the scaling.

    Attributes:
        owner: Lives as long as what the graph refers to.
        norm: The total norm; each replay writes it.
        coefficient: What gradients are scaled by; each replay writes it.
        limit: The static limit, in double precision.
        inputs: The private inputs, or None for a recording in place.
        layouts: Of each gradient.
        groups: The positions of the gradients of each dtype.
        references: To the gradients of a recording in place.
        follows: Whether a recording in place fits any tensors that lie where the recorded ones lay.
        stream: The stream that was current.
        filled: The value in `limit`.
    """

    graph: Graph
    owner: object
    norm: Tensor
    coefficient: Tensor
    limit: Tensor
    inputs: list[Tensor] | None
    layouts: list[Layout]
    groups: list[list[int]]
    references: list["weakref.ref[Tensor]"]
    follows: bool
    stream: int
    filled: float | None = None

    def fits(self, gradients: Sequence[Tensor], place: Place) -> bool:
        """Tells whether a replay does what the native call would do; a recording in place was made for this place."""
        if len(gradients) != len(self.layouts) or current_stream(self.norm.device) != self.stream:
            return False
        if self.inputs is None:
            return are_same(self.references, gradients) or (self.follows and layouts_of(gradients) == self.layouts)
        return layouts_of(gradients) == self.layouts and not any(address % ALIGNMENT for address in place)

    def replay(self, gradients: list[Tensor], limit: float) -> None:
        """Clips the gradients."""
        if limit != self.filled:
            self.limit.fill_(limit)
            self.filled = limit
        if self.inputs is None:
            self.graph.replay()
            return
        inputs = self._grouped(self.inputs)
        live = self._grouped(gradients)
        for targets, sources in zip(inputs, live, strict=True):
            torch._foreach_copy_(targets, sources)
        self.graph.replay()
        for group in live:
            torch._foreach_mul_(group, self.coefficient)

    def _grouped(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Splits tensors by dtype, as one multi-tensor kernel takes a single one."""
        return [tensors] if len(self.groups) == 1 else [[tensors[i] for i in group] for group in self.groups]


class _Owner:
    """Something to hang a lifetime on."""


@dataclass(slots=True)
class _Sightings:
    """What the last calls saw that were not replayed in place.

    Attributes:
        layouts: Those of the last call.
        same_layouts: For how many calls before it they had been the same.
        same_place: How many of the calls before it had seen the same place.
        same_tensors: Whether the call before it had seen the same tensors.
    """

    layouts: list[Layout] = field(default_factory=list)
    same_layouts: int = 0
    same_place: int = 0
    same_tensors: bool = False
    _places: dict[Place, int] = field(default_factory=dict)
    _references: list["weakref.ref[Tensor]"] = field(default_factory=list)

    def add(self, gradients: Sequence[Tensor], layouts: list[Layout], place: Place, follow: bool) -> None:
        """Counts one call. Unless places are to be followed, new tensors are never in the place of others."""
        watched = gradients[:1] if follow else gradients  # where places tell, the first tensor is hint enough
        self.same_tensors = are_same(self._references, watched)
        if not self.same_tensors:
            self._references = [weakref.ref(gradient) for gradient in watched]
            if not follow:
                self._places.clear()
        self.same_place = self._places.pop(place, -1) + 1
        self._places[place] = self.same_place
        if len(self._places) > PLACES:
            del self._places[next(iter(self._places))]
        self.same_layouts = self.same_layouts + 1 if layouts == self.layouts else 0
        self.layouts = layouts

    def forget(self, place: Place) -> None:
        """Counts anew what is seen from now on, other places aside."""
        self.same_layouts = self.same_place = 0
        self._places.pop(place, None)


class NormClipper:
    """Does what `torch.nn.utils.clip_grad_norm_` does, from a recording where that gives the same bits.

    Copies and pickles of it have its options and nothing else.

    Args:
        backend: "auto" records CUDA graphs on a CUDA device and nothing elsewhere.
        patience: Calls that saw the same layouts before a recording on copies is made.
        on_finding: Called with the finding for which clipping stays native; None warns.
        expecting: Surrounds a capture whose graph may refer to the gradients for as long as the given object lives.

    Attributes:
        replays: Calls that were replayed.
        copied: Those of them that copied the gradients first.
        native: Calls that were native, by reason. A call with nothing to clip is not counted.
        findings: The first finding of each of these reasons.
        arrivals: Clippings that came here, or were counted here, whatever became of them.
        refusal: Why all calls of the fit are native, once they are.
        aside: Why calls are left to torch for now, without a look at their gradients; None if they are not.
        previous: The clipper that this one stands in for.
    """

    def __init__(
        self,
        backend: BackendName = "auto",
        patience: int = COPY_CALLS,
        on_finding: Callable[[Finding], None] | None = None,
        expecting: Callable[[object], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.backend = backend
        self.patience = patience
        self.on_finding = on_finding
        self.expecting = expecting
        self.replays = 0
        self.copied = 0
        self.native: Counter[Reason] = Counter()
        self.findings: dict[Reason, Finding] = {}
        self.arrivals = 0
        self.previous: NormClipper | None = None
        self._recordings: dict[Place | None, NormRecording] = {}
        self._norm: Tensor | None = None
        self._engine: GraphBackend | None = None
        self.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend, self.patience)

    # -- a fit ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts a fit: nothing is recorded, nothing refused."""
        self._release()
        self._norm = None
        self.refusal: Finding | None = None
        self.aside: Finding | None = None
        self._said = False
        self._sightings = _Sightings()
        self._made = 0
        self._calls = 0
        self._replays_before, self._copied_before = self.replays, self.copied
        self._native_before = Counter(self.native)

    def end(self) -> None:
        """Ends a fit: gives the recordings back, and says so if none was ever replayed though it was asked for."""
        native = self.native - self._native_before
        replays = self.replays - self._replays_before
        telling = {reason: count for reason, count in native.items() if reason not in _PASSING}
        self._release()
        if replays == 0 and telling and not self._said:
            finding = self.findings[max(telling, key=lambda reason: telling[reason])]
            actual = f"{finding.actual}; all {native.total()} clippings of the fit were native"
            self._say(replace(finding, actual=actual))

    def _release(self) -> None:
        if any(self._norm is recording.norm for recording in self._recordings.values()):
            self._norm = self.last_norm
        self._recordings = {}
        self._sightings = _Sightings()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    @property
    def is_engaged(self) -> bool:
        """Tells whether a recording is in use."""
        return bool(self._recordings)

    @property
    def last_norm(self) -> Tensor | None:
        """A copy of the norm that the last call found, on its device; None before the first."""
        return None if self._norm is None else self._norm.clone()

    @property
    def messages(self) -> dict[Reason, str]:
        """The message of the first finding of each reason."""
        return {reason: str(finding) for reason, finding in self.findings.items()}

    def count(self, finding: Finding) -> None:
        """Counts a clipping that is native for a finding."""
        self.arrivals += 1
        self.native[finding.reason] += 1
        self.findings.setdefault(finding.reason, finding)

    def take(self, other: "NormClipper") -> None:
        """Adds what another clipper has counted since its last fit began, and takes over its last norm."""
        self.replays += other.replays - other._replays_before
        self.copied += other.copied - other._copied_before
        self.native += other.native - other._native_before
        self.findings = {**other.findings, **self.findings}
        self._norm = other._norm

    def refuse(self, finding: Finding, say: bool = True) -> None:
        """Makes all further calls of the fit native."""
        self._release()
        self.refusal = finding
        if say:
            self._say(finding)

    def _say(self, finding: Finding) -> None:
        self._said = True
        if self.on_finding is not None:
            self.on_finding(finding)
        else:
            warn(finding)

    # -- a call --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor], limit: float, *, error_if_nonfinite: bool = False) -> None:
        """Scales the gradients of parameters down to a total norm, in place.

        Args:
            parameters: The parameters.
            limit: The norm that the gradients may have; read at each call.
            error_if_nonfinite: Raise where the norm is not finite, which waits for the device.
        """
        if self.aside is not None:
            self.count(self.aside)
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=error_if_nonfinite)
            return
        limit = float(limit)
        gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
        place = place_of(gradients)
        recording = None if error_if_nonfinite else self._find_recording(gradients, place)
        if recording is not None:
            recording.replay(gradients, limit)
            self._norm = recording.norm
            self.arrivals += 1
            self.replays += 1
            self.copied += recording.inputs is not None
            return
        self._calls += 1
        finding = self._find_reason(gradients, place, error_if_nonfinite)
        if finding is None:
            self._record(parameters, gradients, place, limit)
            return
        if gradients:
            self.count(finding)
        else:
            self.arrivals += 1
        self._norm = torch.nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=error_if_nonfinite)
        if finding.reason is Reason.NORM_RETIRED and self.refusal is None:
            self.refuse(finding)

    @property
    def _follows(self) -> bool:
        """Tells whether new tensors can lie in the place of recorded ones: a tape keeps what it wrote alive."""
        return self.backend != "tape"

    def _find_recording(self, gradients: list[Tensor], place: Place) -> NormRecording | None:
        """Finds a recording whose replay does what the native call would do."""
        if not self._recordings or not place:
            return None
        if (recording := self._recordings.get(place) or self._recordings.get(None)) is None:
            return None
        if not recording.fits(gradients, place) or find_observer(recording.norm.device) is not None:
            return None
        if torch.nn.utils.clip_grad_norm_ is not _native_clip:
            return None
        if recording.inputs is None:
            self._sightings.same_place = self._sightings.same_layouts = 0
        else:
            self._sightings.add(gradients, recording.layouts, place, self._follows)
            if self._may_be_in_place():
                return None  # copies have become unnecessary
        return recording

    def _may_be_in_place(self) -> bool:
        """Tells whether the gradients are where they have been before. The last recording is one on copies.

        New tensors are waited for before the first recording: they may find other places yet, or become buffers.
        """
        seen = self._sightings
        settled = self._made > 0 or seen.same_tensors or seen.same_layouts >= self.patience
        return settled and seen.same_place >= STABLE_CALLS and self._made < MAX_RERECORDS

    def _find_reason(self, gradients: Sequence[Tensor], place: Place, error_if_nonfinite: bool) -> Finding | None:
        """Finds why a call that fits no recording is native; None if it is to be recorded."""
        if self.refusal is not None:
            return self.refusal
        if error_if_nonfinite:
            return Finding(Reason.NORM_ERROR_IF_NONFINITE, WHERE, "error_if_nonfinite=False", "True")
        if torch.nn.utils.clip_grad_norm_ is not _native_clip:
            actual = f"{torch.nn.utils.clip_grad_norm_!r}"
            return Finding(Reason.NORM_OVERRIDDEN, "torch.nn.utils.clip_grad_norm_", "torch's own", actual)
        if not hasattr(torch.nn.utils, "get_total_norm") or not hasattr(torch.nn.utils, "clip_grads_with_norm_"):
            return Finding(Reason.NORM_TORCH, "torch.nn.utils", "get_total_norm", f"torch {torch.__version__}")
        if not gradients:
            return Finding(Reason.NO_GRADIENT, WHERE, "gradients", "none")
        if self.backend != "tape" and all(gradient.device.type != "cuda" for gradient in gradients):
            return Finding(Reason.NO_CUDA, WHERE, "gradients on a CUDA device", f"{gradients[0].device}")
        if (finding := find_unsupported(gradients) or find_observer(gradients[0].device)) is not None:
            self._sightings = _Sightings()
            return finding
        layouts = layouts_of(gradients)
        self._sightings.add(gradients, layouts, place, self._follows)
        if not self._may_be_in_place() and self._sightings.same_layouts < self.patience:
            if self._made == 0 and self._calls <= max(STABLE_CALLS, self.patience) + 1:
                return Finding(Reason.WARM_UP, WHERE, "some calls with the same gradients", "not yet")
            return self._find_drift(gradients, layouts)
        if self._made > MAX_RERECORDS:
            actual = f"they changed again after {self._made} recordings"
            return Finding(Reason.NORM_RETIRED, WHERE, "the same set of gradients in every step", actual)
        return None

    def _find_drift(self, gradients: Sequence[Tensor], layouts: list[Layout]) -> Finding:
        """Tells what is not as recorded."""
        if not self._recordings:
            expected = f"the same gradients for {STABLE_CALLS + 1} calls"
            return Finding(Reason.NORM_DRIFT, WHERE, expected, "others in every call")
        recording = next(reversed(self._recordings.values()))
        if len(layouts) != len(recording.layouts):
            expected, actual = f"{len(recording.layouts)} gradients", f"{len(layouts)}"
            return Finding(Reason.NORM_DRIFT, WHERE, expected, actual)
        for position, (then, now) in enumerate(zip(recording.layouts, layouts, strict=True)):
            if then != now:
                where = f"gradient {position} of {len(layouts)}"
                return Finding(Reason.NORM_DRIFT, where, describe_layout(then), describe_layout(now))
        if current_stream(gradients[0].device) != recording.stream:
            return Finding(Reason.NORM_DRIFT, WHERE, "the stream on which the recording was made", "another stream")
        return Finding(Reason.NORM_MOVED, WHERE, "gradients in recorded memory", "the same gradients elsewhere")

    def _record(self, parameters: Sequence[Tensor], gradients: list[Tensor], place: Place, limit: float) -> None:
        """Clips natively, and makes a recording that takes effect with the next call.

        Whatever fails on the way, the gradients end as the native call leaves them.
        """
        self.count(Finding(Reason.RECORDING, WHERE, "a recording", "one is made"))
        in_place = self._may_be_in_place()
        self._made += 1
        finding: Finding | None = None
        recording: NormRecording | None = None
        saved: list[Tensor] = []
        try:
            saved = [clone_exactly(gradient) for gradient in gradients]
            recording = self._make(gradients, saved, in_place)
            difference = _certify(recording, gradients, saved, limit)
            if difference is not None:
                finding = Finding(Reason.MISMATCH, WHERE, "a replay equal to native", difference)
        except CaptureError as error:
            finding = error.finding
        except torch.OutOfMemoryError as error:
            finding = Finding(Reason.OUT_OF_MEMORY, WHERE, "memory for a recording", str(error))
        except Exception as error:
            finding = Finding(Reason.CAPTURE_FAILED, WHERE, "a recording", f"{type(error).__name__}: {error}")
        finally:
            if len(saved) == len(gradients):
                copy_all(gradients, saved)
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
            saved.clear()
        if self.expecting is not None and self._engine is not None:
            self._engine.trim()  # the copies were as much memory as all gradients
        if finding is not None:
            del recording
            self.refuse(finding)
            return
        assert recording is not None
        # One on copies is not worth its memory beside one in place; others than these gradients may never come again.
        kept: dict[Place | None, NormRecording] = {
            key: old for key, old in self._recordings.items() if key and old.layouts == recording.layouts
        }
        self._recordings = {**kept, (place if in_place else None): recording}
        self._sightings.forget(place)

    def _make(self, gradients: list[Tensor], saved: list[Tensor], in_place: bool) -> NormRecording:
        """Records norm and coefficient, and in place the scaling too. May leave the gradients changed."""
        device = gradients[0].device
        engine: GraphBackend = self._engine or _make_backend(self.backend, device, self.expecting is not None)
        self._engine = engine
        static_limit = torch.ones((), dtype=torch.float64, device=device)

        def run(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
            norm = torch.nn.utils.get_total_norm(tensors)
            return norm, _scale(tensors, norm, static_limit) if in_place else _find_coefficient(norm, static_limit)

        recorded = gradients if in_place else saved
        engine.warm_up(lambda: run(recorded))
        owner = _Owner()
        with self.expecting(owner) if self.expecting is not None else nullcontext():
            graph, made = engine.capture(engine.new_pool(), lambda: run(recorded), overwrites_pool=True)
        positions: dict[torch.dtype, list[int]] = {}
        for position, gradient in enumerate(gradients):
            positions.setdefault(gradient.dtype, []).append(position)
        return NormRecording(
            graph=graph,
            owner=owner,
            norm=made[0],
            coefficient=made[1],
            limit=static_limit,
            inputs=None if in_place else list(saved),  # the caller empties its own list
            layouts=layouts_of(gradients),
            groups=list(positions.values()),
            references=[weakref.ref(gradient) for gradient in gradients] if in_place else [],
            follows=self._follows,
            stream=current_stream(device),
        )


# -- what torch does -----------------------------------------------------------------------------------------------


def _find_coefficient(norm: Tensor, limit: Tensor) -> Tensor:
    """Finds what `torch.nn.utils.clip_grads_with_norm_` multiplies gradients by, with a limit that lies on the device.

    A Python number divided by a tensor is the tensor's reciprocal times the number, and half precision multiplies by a
    Python number in single precision.
    """
    wide = torch.float64 if norm.dtype is torch.float64 else torch.float32
    inverse = (norm + 1e-6).reciprocal()
    if norm.device.type == "cpu":  # a CPU scalar is a Python number to the kernel: the same path, to the bits of a NaN
        coefficient = (inverse.view(1) * limit.to(wide)).view(())
    else:
        coefficient = (inverse.to(wide) * limit.to(wide)).to(norm.dtype)
    return torch.clamp(coefficient, max=1.0)


def _scale(gradients: Sequence[Tensor], norm: Tensor, limit: Tensor) -> Tensor:
    """Scales gradients as `torch.nn.utils.clip_grads_with_norm_` does, and returns the coefficient."""
    coefficient = _find_coefficient(norm, limit)
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.dtype, []).append(gradient)
    for group in groups.values():
        torch._foreach_mul_(group, coefficient)
    return coefficient


def _certify(recording: NormRecording, gradients: list[Tensor], saved: list[Tensor], limit: float) -> str | None:
    """Replays a fresh recording and compares it as bits with native calls on the same gradients.

    Clips to half of the norm too, so that a limit that happens to be above it proves something. Leaves the gradients
    changed.

    Returns:
        The first difference.
    """
    norm = torch.nn.utils.get_total_norm(saved)
    for trial in (limit, 0.5 * float(norm)):
        holders: list[Any] = [SimpleNamespace(grad=clone_exactly(tensor)) for tensor in saved]
        copy_all(gradients, saved)
        torch.nn.utils.clip_grads_with_norm_(holders, trial, norm)
        recording.replay(gradients, trial)
        if (difference := _difference("the norm", norm, recording.norm)) is not None:
            return difference
        for position, (holder, gradient) in enumerate(zip(holders, gradients, strict=True)):
            if (difference := _difference(f"clipped gradient {position}", holder.grad, gradient)) is not None:
                return difference
    return None


def _difference(what: str, native: Tensor, replay: Tensor) -> str | None:
    return None if same_bits(native, replay) else f"{what}: native and replay have {first_difference(native, replay)}"


def _make_backend(name: BackendName, device: torch.device, steps_are_replayed: bool) -> GraphBackend:
    """Makes a backend. Beside native steps it leaves the allocator alone, so that gradients keep their addresses."""
    return TapeBackend(device) if name == "tape" else CudaGraphBackend(device, spares_memory=steps_are_replayed)
