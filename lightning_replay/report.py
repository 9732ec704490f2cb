# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What was replayed, what was not and why."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_replay.reasons import Reason


@dataclass(slots=True)
class RecordingStats:
    """One recording, counted while it is in use.

    Attributes:
        region: Dotted path of the recorded module.
        signature: The tensor arguments it was recorded for.
        capture_seconds: Time from the end of the native step to the certified recording.
        pool_bytes: Device memory of its pool, shared by the recordings of one call position.
        certified: "bitwise", "nondeterministic" or "off".
        replays: How often it was replayed.
    """

    region: str
    signature: str
    capture_seconds: float
    pool_bytes: int
    certified: str
    replays: int = 0


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The record of all training steps since the strategy was first used or reset.

    Attributes:
        steps_total: Training steps seen.
        steps_replayed: Steps in which at least one region was replayed.
        steps_native: Steps in which none was.
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
        messages: For each reason met, the message of its first finding.
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

    def as_dict(self) -> dict[str, Any]:
        """Returns the report with plain keys and values, ready for JSON."""
        plain = asdict(self)
        plain["reasons"] = {reason.value: count for reason, count in self.reasons.items()}
        plain["norm_native"] = {reason.value: count for reason, count in self.norm_native.items()}
        plain["messages"] = {reason.value: message for reason, message in self.messages.items()}
        return plain

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        share = self.steps_replayed / self.steps_total if self.steps_total else 0.0
        lines = [
            f"steps: {self.steps_total} in all, {self.steps_replayed} replayed ({share:.0%}),"
            f" {self.steps_native} native"
        ]
        if self.gradients_published or self.gradients_added or self.gradients_copied:
            lines.append(
                f"gradients: {self.gradients_published} times published, {self.gradients_added} added to live ones,"
                f" {self.gradients_copied} given fresh memory"
            )
        if self.norm_replays or self.norm_native:
            native = ", ".join(f"{reason.value} {count}" for reason, count in self.norm_native.items())
            lines.append(
                f"gradient norm: {self.norm_replays} replayed ({self.norm_copied} on copies),"
                f" {sum(self.norm_native.values())} native{f' ({native})' if native else ''}"
            )
        if self.recordings:
            rows: list[tuple[str, ...]] = [
                (
                    r.region,
                    r.signature,
                    str(r.replays),
                    f"{r.capture_seconds:.2f} s",
                    _mebibytes(r.pool_bytes),
                    r.certified,
                )
                for r in self.recordings
            ]
            lines += ["", *_table(("region", "signature", "replays", "recorded in", "pool", "certified"), rows)]
        if self.reasons:
            rows = [(r.value, str(count), r.cause) for r, count in sorted(self.reasons.items(), key=_weight)]
            lines += ["", *_table(("native because", "calls", "meaning"), rows)]
        return "\n".join(lines)


def _weight(entry: tuple[Reason, int]) -> tuple[bool, int]:
    """Sorts what needs a cure before what a healthy run meets, and the frequent before the rare."""
    reason, count = entry
    return reason.is_harmless, -count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
