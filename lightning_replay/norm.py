# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clip gradients by their norm as torch does, from a recording. Knows torch only.

Note [two kinds of recording]
    in place    The gradients were the very same tensors for some calls: stable buffers. Norm, coefficient and scaling
                are recorded straight on them. A replay is one launch.
    on copies   Only their layouts stay the same: autograd makes new gradients each step. They are copied into private
                inputs, the norm is replayed, and torch's own scaling runs on the live gradients.

    A call that fits no recording is native. What it saw is counted, and a new pattern that lasts is recorded instead, a
    bounded number of times. Gradients are never kept alive: who owns them counts the references.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
    addresses_of,
    are_same,
    current_stream,
    find_observer,
    find_unsupported,
    layouts_of,
)
from lightning_replay.reasons import Finding, Reason

BackendName = Literal["auto", "cuda", "tape"]

STABLE_CALLS = 2
"""Native calls that see the same gradients before they are recorded in place."""

MAX_RERECORDS = 3
"""Recordings made after the first because the gradients changed; then clipping stays native."""

_PASSING = frozenset({Reason.WARM_UP, Reason.RECORDING})
_native_clip = torch.nn.utils.clip_grad_norm_


@dataclass(slots=True, eq=False)
class NormRecording:
    """A recorded norm, with or without the clipping.

    Attributes:
        owner: Lives as long as what the graph refers to.
        norm: The total norm; each replay writes it.
        limit: The static limit, in double precision.
        inputs: The private inputs, or None for a recording in place.
        layouts: Of each gradient.
        references: To the gradients of a recording in place.
        addresses: Of the gradients of a recording in place.
        stream: The stream that was current.
        filled: The value in `limit`.
    """

    graph: Graph
    owner: object
    norm: Tensor
    limit: Tensor
    inputs: list[Tensor] | None
    layouts: list[Layout]
    references: list["weakref.ref[Tensor]"]
    addresses: list[int]
    stream: int
    filled: float | None = None

    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Tells whether a replay does for these gradients what the native call would do."""
        if len(gradients) != len(self.layouts) or current_stream(self.norm.device) != self.stream:
            return False
        if self.inputs is None:
            return are_same(self.references, gradients) and addresses_of(gradients) == self.addresses
        if any(type(g) is not Tensor or g.layout is not torch.strided for g in gradients):
            return False
        return layouts_of(gradients) == self.layouts and not any(a % ALIGNMENT for a in addresses_of(gradients))

    def replay(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], limit: float) -> None:
        """Clips the gradients, which are those of the parameters that have one."""
        if self.inputs is None:
            if limit != self.filled:
                self.limit.fill_(limit)
                self.filled = limit
            self.graph.replay()
            return
        copy_all(self.inputs, gradients)
        self.graph.replay()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, self.norm)


class _Owner:
    """Something to hang a lifetime on."""


@dataclass(slots=True)
class _Sightings:
    """What the last calls without a recording in place saw, and for how many calls it has been the same."""

    layouts: list[Layout] = field(default_factory=list)
    references: list["weakref.ref[Tensor]"] = field(default_factory=list)
    same_layouts: int = 0
    same_objects: int = 0

    def add(self, gradients: Sequence[Tensor], layouts: list[Layout]) -> None:
        """Counts one call."""
        self.same_objects = self.same_objects + 1 if are_same(self.references, gradients) else 0
        self.same_layouts = self.same_layouts + 1 if layouts == self.layouts else 0
        if not self.same_objects:
            self.references = [weakref.ref(gradient) for gradient in gradients]
        self.layouts = layouts


class NormClipper:
    """Does what `torch.nn.utils.clip_grad_norm_` does, from a recording where that gives the same bits.

    Copies and pickles of it have its options and nothing else.

    Args:
        backend: "auto" records CUDA graphs on a CUDA device and nothing elsewhere.
        patience: Native calls that see the same layouts before a recording on copies is made.
        on_finding: Called with the finding for which clipping stays native; None warns.
        expecting: Surrounds a capture whose graph may refer to the gradients for as long as the given object lives.

    Attributes:
        replays: Calls that were replayed.
        copied: Those of them that copied the gradients first.
        native: Calls that were native, by reason. A call with nothing to clip is not counted.
        refusal: Why all calls of the fit are native, once they are.
        previous: The clipper that this one stands in for.
        model: The model that is trained.
    """

    def __init__(
        self,
        backend: BackendName = "auto",
        patience: int = STABLE_CALLS,
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
        self.previous: NormClipper | None = None
        self.model: weakref.ref[torch.nn.Module] | None = None
        self._recording: NormRecording | None = None
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
        self._sightings = _Sightings()
        self._made = 0
        self._calls = 0
        self._replays_before = self.replays
        self._native_before = Counter(self.native)

    def end(self) -> None:
        """Ends a fit: gives the recording back, and says so if there never was one though it was asked for."""
        native = self.native - self._native_before
        replays = self.replays - self._replays_before
        telling = {reason: count for reason, count in native.items() if reason not in _PASSING}
        self._release()
        self._replays_before, self._native_before = self.replays, Counter(self.native)
        if replays == 0 and self.refusal is None and telling and Reason.NO_CUDA not in telling:
            reason = max(telling, key=lambda reason: telling[reason])
            actual = f"all {sum(native.values())} calls were native"
            self._say(Finding(reason, WHERE, "replays of a recorded gradient norm", actual))

    def _release(self) -> None:
        if self._recording is not None and self._norm is self._recording.norm:
            self._norm = self.last_norm
        self._recording = None
        self._sightings = _Sightings()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    @property
    def is_engaged(self) -> bool:
        """Tells whether a recording is in use."""
        return self._recording is not None

    @property
    def last_norm(self) -> Tensor | None:
        """A copy of the norm that the last call found, on its device; None before the first."""
        return None if self._norm is None else self._norm.clone()

    @property
    def was_called(self) -> bool:
        """Tells whether anything was clipped in this fit."""
        return self.replays > self._replays_before or self.native != self._native_before

    def count(self, reason: Reason) -> None:
        """Counts a clipping that did not come here."""
        self.native[reason] += 1

    def take(self, other: "NormClipper") -> None:
        """Adds the counts of another clipper, and takes over its last norm."""
        self.replays += other.replays
        self.copied += other.copied
        self.native += other.native
        self._norm = other._norm

    def refuse(self, finding: Finding, say: bool = True) -> None:
        """Makes all further calls of the fit native."""
        self._release()
        self.refusal = finding
        if say:
            self._say(finding)

    def _say(self, finding: Finding) -> None:
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
        limit = float(limit)
        gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
        recording = self._recording
        if (
            recording is not None
            and not error_if_nonfinite
            and recording.fits(gradients)
            and find_observer(recording.norm.device) is None
            and not self._may_be_in_place(recording, gradients)
        ):
            recording.replay(parameters, gradients, limit)
            self._norm = recording.norm
            self.replays += 1
            self.copied += recording.inputs is not None
            return
        self._calls += 1
        finding = self._find_reason(gradients, error_if_nonfinite)
        if finding is None:
            self._record(parameters, gradients, limit)
            return
        if gradients:
            self.native[finding.reason] += 1
        self._norm = torch.nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=error_if_nonfinite)
        if finding.reason is Reason.NORM_RETIRED and self.refusal is None:
            self.refuse(finding)

    def _may_be_in_place(self, recording: NormRecording, gradients: Sequence[Tensor]) -> bool:
        """Tells whether a recording on copies has become unnecessary: the gradients are stable buffers now."""
        if recording.inputs is None:
            self._sightings.same_objects = self._sightings.same_layouts = 0
            return False
        if self._made > MAX_RERECORDS:
            return False
        self._sightings.add(gradients, recording.layouts)
        return self._sightings.same_objects >= STABLE_CALLS

    def _find_reason(self, gradients: Sequence[Tensor], error_if_nonfinite: bool) -> Finding | None:
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
        self._sightings.add(gradients, layouts_of(gradients))
        if self._sightings.same_objects < STABLE_CALLS and self._sightings.same_layouts < self.patience:
            if self._made == 0 and self._calls <= max(STABLE_CALLS, self.patience) + 1:
                return Finding(Reason.WARM_UP, WHERE, "some calls with the same gradients", "not yet")
            return Finding(Reason.NORM_DRIFT, WHERE, "the recorded gradients, layouts and stream", "others")
        if self._made > MAX_RERECORDS:
            actual = f"they changed again after {self._made} recordings"
            return Finding(Reason.NORM_RETIRED, WHERE, "gradients that stay where they are", actual)
        return None

    # -- recording -----------------------------------------------------------------------------------------------

    def _record(self, parameters: Sequence[Tensor], gradients: list[Tensor], limit: float) -> None:
        """Clips natively, and makes a recording that takes effect with the next call.

        Whatever fails on the way, the gradients end as the native call leaves them.
        """
        self.native[Reason.RECORDING] += 1
        in_place = self._sightings.same_objects >= STABLE_CALLS
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
            if in_place and len(saved) == len(gradients):
                copy_all(gradients, saved)
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if finding is not None:
            del recording
            self.refuse(finding)
            return
        self._recording = recording
        self._sightings = _Sightings()

    def _make(self, gradients: list[Tensor], saved: list[Tensor], in_place: bool) -> NormRecording:
        """Records the norm, and in place the clipping too."""
        device = gradients[0].device
        engine: GraphBackend = self._engine or _make_backend(self.backend, device)
        self._engine = engine
        static_limit = torch.ones((), dtype=torch.float64, device=device)

        def run(tensors: list[Tensor]) -> Tensor:
            norm = torch.nn.utils.get_total_norm(tensors)
            if in_place:
                _scale(tensors, norm, static_limit)
            return norm

        recorded = gradients if in_place else saved
        engine.warm_up(lambda: run([clone_exactly(tensor) for tensor in saved] if in_place else saved))
        owner = _Owner()
        with self.expecting(owner) if self.expecting is not None else nullcontext():
            graph, norm = engine.capture(engine.new_pool(), lambda: run(recorded), overwrites_pool=True)
        return NormRecording(
            graph=graph,
            owner=owner,
            norm=norm,
            limit=static_limit,
            inputs=None if in_place else saved,
            layouts=layouts_of(gradients),
            references=[weakref.ref(gradient) for gradient in gradients] if in_place else [],
            addresses=addresses_of(gradients) if in_place else [],
            stream=current_stream(device),
        )


# -- what torch does -----------------------------------------------------------------------------------------------


def _scale(gradients: Sequence[Tensor], norm: Tensor, limit: Tensor) -> None:
    """Scales gradients as `torch.nn.utils.clip_grads_with_norm_` does, with a limit that lies on the device.

    A Python number divided by a tensor is the tensor's reciprocal times the number, and half precision multiplies by a
    Python number in single precision.
    """
    wide = torch.float64 if norm.dtype is torch.float64 else torch.float32
    inverse = (norm + 1e-6).reciprocal()
    if norm.device.type == "cpu":  # a CPU scalar is a Python number to the kernel: the same path, to the bits of a NaN
        coefficient = (inverse.view(1) * limit.to(wide)).view(())
    else:
        coefficient = (inverse.to(wide) * limit.to(wide)).to(norm.dtype)
    clamped = torch.clamp(coefficient, max=1.0)
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.dtype, []).append(gradient)
    for group in groups.values():
        torch._foreach_mul_(group, clamped)


def _certify(recording: NormRecording, gradients: list[Tensor], saved: list[Tensor], limit: float) -> str | None:
    """Replays a fresh recording and compares it as bits with native calls on the same gradients.

    A recording in place also clips to half of the norm, so that a limit that happens to be above it proves something.
    Leaves the gradients changed.

    Returns:
        The first difference.
    """
    if recording.inputs is not None:
        recording.graph.replay()
        return _difference("the norm", torch.nn.utils.get_total_norm(gradients), recording.norm)
    norm = torch.nn.utils.get_total_norm(saved)
    for trial in (limit, 0.5 * float(norm)):
        holders: list[Any] = [SimpleNamespace(grad=clone_exactly(tensor)) for tensor in saved]
        copy_all(gradients, saved)
        torch.nn.utils.clip_grads_with_norm_(holders, trial, norm)
        recording.replay([], gradients, trial)
        if (difference := _difference("the norm", norm, recording.norm)) is not None:
            return difference
        for position, (holder, gradient) in enumerate(zip(holders, gradients, strict=True)):
            if (difference := _difference(f"clipped gradient {position}", holder.grad, gradient)) is not None:
                return difference
    return None


def _difference(what: str, native: Tensor, replay: Tensor) -> str | None:
    return None if same_bits(native, replay) else f"{what}: native and replay have {first_difference(native, replay)}"


def _make_backend(name: BackendName, device: torch.device) -> GraphBackend:
    return TapeBackend(device) if name == "tape" else CudaGraphBackend(device)
