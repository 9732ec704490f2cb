# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What replay saves, estimated from the host's clock alone: the device is asked nothing, so nothing waits for it.

A step lasts from its start to the start of the next one, which is the pace of training once the device is busy. Native
steps that are observed or recorded take longer than native, and do not count: often nothing is left to compare with,
and no saving is stated then.
"""

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lightning_replay.report import RecordingStats

KEPT = 256
"""Durations kept for each median, the newest ones; also the batch shapes told apart."""

MIN_NATIVE = 2
"""Native steps needed for a median, which is the lower one: it leans towards too little saved."""


def _newest() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class _Replayed:
    """The timed steps in which one recording was replayed."""

    shapes: set[Hashable] = field(default_factory=set)
    durations: deque[float] = field(default_factory=_newest)
    shares: float = 0.0
    steps: int = 0


class StepTimes:
    """Times the steps of a fit and writes what they say into the statistics of the recordings.

    Args:
        recordings: The recordings before the fit. Later ones are only ever appended.
        can_save: Whether replay can be faster than native: a tape never is.
    """

    def __init__(self, recordings: Sequence[RecordingStats], can_save: bool = True) -> None:
        self._can_save = can_save
        self._replays = [recording.replays for recording in recordings]
        self._started: float | None = None
        self._shape: Hashable = None
        self._native: dict[Hashable, deque[float]] = {}
        self._replayed: dict[int, _Replayed] = {}

    def begin_step(self, now: float, shape: Hashable, last_action: str, recordings: Sequence[RecordingStats]) -> None:
        """Notes that a step begins, and so that the one before it is over.

        Args:
            now: Seconds of a monotonic clock.
            shape: What tells batches of one size from others.
            last_action: What the step before was: "native", "record" or "replay", or "watched" if calls were observed.
            recordings: All recordings.
        """
        replays = [recording.replays for recording in recordings]
        before = self._replays + [0] * (len(replays) - len(self._replays))
        if self._started is not None:
            duration = now - self._started
            used = [position for position, count in enumerate(replays) if count > before[position]]
            if used and last_action == "replay":
                self._add_replayed(duration, used)
            elif last_action == "native":
                self._add_native(duration)
        self._replays, self._started, self._shape = replays, now, shape

    def interrupt(self) -> None:
        """Leaves the current step out: something other than training follows it."""
        self._started = None

    def _add_native(self, duration: float) -> None:
        if (durations := self._native.get(self._shape)) is not None:
            durations.append(duration)
        elif len(self._native) < KEPT:
            self._native[self._shape] = _newest()  # the first step of a shape pays for first uses, and is left out

    def _add_replayed(self, duration: float, used: list[int]) -> None:
        for position in used:
            replayed = self._replayed.setdefault(position, _Replayed())
            if len(replayed.shapes) < KEPT:
                replayed.shapes.add(self._shape)
            replayed.durations.append(duration)
            replayed.shares += 1 / len(used)
            replayed.steps += 1

    def write(self, recordings: Sequence[RecordingStats]) -> None:
        """Writes medians and savings into the statistics of the recordings that were replayed."""
        for position, replayed in self._replayed.items():
            stats = recordings[position]
            stats.replay_ms = 1000 * statistics.median(replayed.durations)
            native = [duration for shape in replayed.shapes for duration in self._native.get(shape, ())]
            if len(native) >= MIN_NATIVE:
                stats.native_ms = 1000 * statistics.median_low(native)
                if self._can_save:
                    share = replayed.shares / replayed.steps
                    stats.seconds_saved = (stats.native_ms - stats.replay_ms) * stats.replays * share / 1000
