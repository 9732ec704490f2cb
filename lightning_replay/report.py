# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What was replayed, what was not and why."""

import json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_replay.reasons import Reason

WIDTH = 120
"""Columns of a table, where names are not too long for that."""

# Widths of a signature, which leaves room for the path of a module and for figures, and of an argument in it.
_SIGNATURE, _ARGUMENT = 48, 28


@dataclass(slots=True)
class RecordingStats:
    """One recording, counted while it is in use.

    Attributes:
        region: Dotted path of the recorded module.
        signature: The tensor arguments it was recorded for.
        capture_seconds: Time from the end of the native step to the certified recording.
        pool_bytes: Device memory of its pool after it was made. The recordings of one call position share a pool:
            their sizes are not to be added up.
        certified: "bitwise", "nondeterministic" (exact up to native nondeterminism) or "off".
        replays: How often it was replayed.
        native_runs: Native runs that were made for it, beside the step that trained.
        nondeterministic: If it is not equal to native bit for bit, the operations that torch says never are.
        native_ms: Milliseconds of a native step with a batch of the same shapes; None unless a `ReplayMonitor`
            measured, and met some that were neither observed nor recorded, as the first ones of a fit with it are. It
            is a median of the time from one step's start to the next one's, on the device if that is a GPU.
        replay_ms: The same of steps in which it was replayed.
        seconds_saved: Its share of what the steps with it saved by these medians, negative if they took longer; None
            where one of them is, and with the tape.
    """

    region: str
    signature: str
    capture_seconds: float
    pool_bytes: int
    certified: str
    replays: int = 0
    native_runs: int = 0
    nondeterministic: tuple[str, ...] = ()
    native_ms: float | None = None
    replay_ms: float | None = None
    seconds_saved: float | None = None

    @property
    def break_even_step(self) -> int | None:
        """Replays after which the time that the recording took is won back; None if unknown, or never."""
        return _break_even(self.capture_seconds, self.seconds_saved, self.replays)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The record of all training steps since the strategy was first used.

    Attributes:
        steps_total: Training steps seen.
        steps_replayed: Steps in which at least one region was replayed, and none was being recorded.
        steps_native: All other steps.
        reasons: For each reason, the number of calls that were native because of it: a step can hold several, and one
            that is native as a whole counts as one.
        recordings: The recordings, retired ones included.
        norm_replays: Replays of a recorded gradient norm.
        norm_copied: Those of them that copied the gradients first, because they lay in new memory.
        norm_native: Clippings that were native, by reason.
        gradients_published: Replayed backward passes whose gradients were published: one recorded copy into the stable
            buffers, which became `.grad`.
        gradients_added: Those that added gradients to live ones in place (accumulation, zeroing in place).
        gradients_copied: Those in which gradients needed fresh memory, because someone kept a tensor on their buffers.
            A pass that added as well counts in both; one that wrote free buffers without the recorded copy (several
            calls a step, hooked parameters) counts in none.
        messages: For each of `reasons`, the message of its first finding.
        norm_messages: The same for `norm_native`.
        steps_partial: Those of the replayed steps in which other regions, or the rest of a network of which only parts
            can be recorded, were native.
    """

    steps_total: int = 0
    steps_replayed: int = 0
    steps_native: int = 0
    reasons: dict[Reason, int] = field(default_factory=dict)
    recordings: tuple[RecordingStats, ...] = ()
    norm_replays: int = 0
    norm_copied: int = 0
    norm_native: dict[Reason, int] = field(default_factory=dict)
    gradients_published: int = 0
    gradients_added: int = 0
    gradients_copied: int = 0
    messages: dict[Reason, str] = field(default_factory=dict)
    norm_messages: dict[Reason, str] = field(default_factory=dict)
    steps_partial: int = 0

    @property
    def estimated_seconds_saved(self) -> float | None:
        """What replayed steps saved, before the time spent on recording; None unless a `ReplayMonitor` can tell."""
        saved = [r.seconds_saved for r in self.recordings if r.seconds_saved is not None]
        return sum(saved) if saved else None

    @property
    def capture_seconds(self) -> float:
        """Time spent on making the recordings."""
        return sum(r.capture_seconds for r in self.recordings)

    @property
    def break_even_step(self) -> int | None:
        """Replayed steps after which the time spent on recording is won back; None if unknown, or never."""
        return _break_even(self.capture_seconds, self.estimated_seconds_saved, self.steps_replayed)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report with plain keys and values, ready for JSON."""
        plain = asdict(self)
        for name in ("reasons", "messages", "norm_native", "norm_messages"):
            plain[name] = {reason.value: value for reason, value in getattr(self, name).items()}
        for recording, stats in zip(plain["recordings"], self.recordings, strict=True):
            recording["break_even_step"] = stats.break_even_step
        plain["estimated_seconds_saved"] = self.estimated_seconds_saved
        plain["break_even_step"] = self.break_even_step
        return plain

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def summary(self) -> list[str]:
        """Returns lines about the whole of it: steps, gradients, the gradient norm, time."""
        share = self.steps_replayed / self.steps_total if self.steps_total else 0.0
        partly = f", {self.steps_partial} of them in part" if self.steps_partial else ""
        lines = [
            f"steps: {self.steps_total} in all, {self.steps_replayed} replayed ({share:.0%}){partly},"
            f" {self.steps_native} native"
        ]
        if self.gradients_published or self.gradients_added or self.gradients_copied:
            lines.append(
                f"gradients: {self.gradients_published} times published, {self.gradients_added} added to live ones,"
                f" {self.gradients_copied} given fresh memory"
            )
        if self.norm_replays or set(self.norm_native) - {Reason.NORM_NO_LIMIT}:
            native = ", ".join(f"{reason.value} {count}" for reason, count in self.norm_native.items())
            lines.append(
                f"gradient norm: {self.norm_replays} replayed ({self.norm_copied} on copies),"
                f" {sum(self.norm_native.values())} native{f' ({native})' if native else ''}"
            )
        for recording in self.recordings:
            if recording.certified == "nondeterministic":
                names = ", ".join(recording.nondeterministic) or "runs from the same state differ"
                lines.append(f"{recording.region}: exact up to native nondeterminism ({names})")
        spent = f"{self.capture_seconds:.2f} s spent on recording"
        if (saved := self.estimated_seconds_saved) is not None:
            steps = self.break_even_step
            repaid = "never repaid" if steps is None else f"repaid by {steps} replayed steps"
            lines.append(f"time: about {saved:.2f} s saved in replayed steps, {spent}, {repaid}")
        elif timed := [recording for recording in self.recordings if recording.replay_ms is not None]:
            known = all(recording.native_ms is not None for recording in timed)
            why = "the tape backend saves nothing" if known else "no native step to compare with"
            lines.append(f"time: {spent}; what was saved is unknown ({why})")
        if to_cure := [reason.value for reason in self.reasons if not reason.is_harmless]:
            lines += textwrap.wrap(f"to cure: {', '.join(to_cure)}", WIDTH)
            lines.append("`messages` of the report says where, and what to do")
        return lines

    def tables(self) -> list["Table"]:
        """Returns tables of the recordings, of their times and of the reasons of native calls, where there are any.

        Long signatures are shortened: `recordings` has all of them.
        """
        tables = []
        if self.recordings:
            columns = ("region", "signature", "replays", "recorded in", "pool", "certified")
            unit = _unit([recording.pool_bytes for recording in self.recordings])
            tables.append(Table(columns, [_cells(recording, *unit) for recording in self.recordings]))
        if timed := [recording for recording in self.recordings if recording.replay_ms is not None]:
            columns = ("region", "signature", "native step", "replayed step", "saved", "repaid by")
            tables.append(Table(columns, [_times(recording) for recording in timed]))
        if self.reasons:
            reasons = sorted(self.reasons.items(), key=_weight)
            rows = [(reason.value, str(count), reason.cause) for reason, count in reasons]
            tables.append(Table(("reason", "calls native for it", "meaning"), rows))
        return tables

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.summary()), *map(str, self.tables())])


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under a header. As text, the last column is wrapped where it would pass the width of a table."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        *others, last = zip(self.header, *self.rows, strict=True)
        widths = [max(map(len, column)) for column in others]
        room = max(WIDTH - sum(width + 2 for width in widths), WIDTH // 3)
        wrapped = [textwrap.wrap(cell, room) or [""] for cell in last]
        widths.append(max(len(line) for lines in wrapped for line in lines))
        printed = []
        for cells, (first, *rest) in zip([self.header, *self.rows], wrapped, strict=True):
            printed.append((*cells[:-1], first))
            printed += [(*[""] * len(others), line) for line in rest]
        printed.insert(1, tuple("-" * width for width in widths))
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in printed
        )


def _cells(recording: RecordingStats, unit: str, unit_bytes: int) -> tuple[str, ...]:
    pool = recording.pool_bytes / unit_bytes
    return (
        recording.region,
        _shortened(recording.signature),
        str(recording.replays),
        f"{recording.capture_seconds:.2f} s",
        f"<0.1 {unit}" if 0 < pool < 0.1 else f"{pool:.1f} {unit}",
        recording.certified,
    )


def _unit(sizes: Sequence[int]) -> tuple[str, int]:
    """Returns one unit for a column of sizes, and its bytes."""
    return ("MiB", 2**20) if max(sizes) >= 2**20 else ("KiB", 2**10)


def _shortened(signature: str) -> str:
    """Returns a signature that fits into its column: its first arguments, and the last one where there is room."""
    if len(signature) <= _SIGNATURE:
        return signature
    # A comma between brackets belongs to a shape.
    parts = [_cut(part, _ARGUMENT) for part in re.split(r", (?![^()]*\))", signature)]
    for left_out in range(len(parts) - 1):
        gap = [f"... {left_out} more"] if left_out else []
        text = ", ".join([*parts[: len(parts) - 1 - left_out], *gap, parts[-1]])
        if len(text) <= _SIGNATURE:
            return text
    return ", ".join([parts[0], *([f"... {len(parts) - 1} more"] if len(parts) > 1 else [])])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _times(recording: RecordingStats) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "unknown" if value is None else form.format(value)

    repaid = text(recording.break_even_step, "{} replays")
    return (
        recording.region,
        _shortened(recording.signature),
        text(recording.native_ms, "{:.2f} ms"),
        text(recording.replay_ms, "{:.2f} ms"),
        text(recording.seconds_saved, "{:.2f} s"),
        "never" if recording.seconds_saved is not None and recording.break_even_step is None else repaid,
    )


def _break_even(cost: float, saved: float | None, count: int) -> int | None:
    """Returns how many of `count` equal savings repay a cost."""
    return None if saved is None or saved <= 0 else math.ceil(cost * count / saved)


def _weight(entry: tuple[Reason, int]) -> tuple[bool, int]:
    """Sorts what needs a cure before what a healthy run meets, and the frequent before the rare."""
    reason, count = entry
    return reason.is_harmless, -count
