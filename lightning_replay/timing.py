# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What replay saves, estimated from the times of single steps, without waiting for the device.

A step lasts from its start to the start of the next one. On a GPU it is the device that has to have come there: the
host may run ahead, and how fast it does says nothing about the pace of training. Native steps that are observed or
recorded take longer than native, and do not count. Where no others are left to compare with, no saving is stated.
"""

import statistics
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_replay.report import RecordingStats

KEPT = 256
"""Durations kept for each median, the newest ones; also the batch shapes told apart."""

MIN_NATIVE = 2
"""Native steps needed for a median, which is the lower one: it leans towards too little saved."""


class Clock(Protocol):
    """Marks moments, and tells later how far they are apart."""

    def mark(self) -> Any:
        """Returns the present moment."""

    def between(self, start: Any, end: Any) -> float | None:
        """Returns the seconds between two moments; None if that cannot be told yet."""


class HostClock:
    """Times by the host: a moment is when it is marked."""

    def mark(self) -> float:
        """Returns the present moment."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float | None:
        """Returns the seconds between two moments."""
        return end - start


def _newest() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class _Replayed:
    """The timed steps in which one recording was replayed."""

    shapes: set[Hashable] = field(default_factory=set)
    durations: deque[float] = field(default_factory=_newest)
    shares: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is over for the host.

    Attributes:
        start: When it began.
        end: When the next one did.
        shape: What tells batches of one size from others.
        used: The recordings that were replayed in it, by position; none in a native step.
    """

    start: Any
    end: Any
    shape: Hashable
    used: list[int]


class StepTimes:
    """Times the steps of a fit and writes what they say into the statistics of the recordings.

    Args:
        recordings: The recordings before the fit. Later ones are only ever appended.
        can_save: Whether replay can be faster than native: a tape never is.
        clock: Tells when steps begin.
    """

    def __init__(self, recordings: Sequence[RecordingStats], can_save: bool = True, clock: Clock | None = None) -> None:
        self._can_save = can_save
        self._clock = clock or HostClock()
        self._replays = [recording.replays for recording in recordings]
        self._started: Any = None
        self._shape: Hashable = None
        self._ended: deque[_Step] = deque()
        self._native: dict[Hashable, deque[float]] = {}
        self._replayed: dict[int, _Replayed] = {}

    def begin_step(self, shape: Hashable, last_action: str, recordings: Sequence[RecordingStats]) -> None:
        """Notes that a step begins, and so that the one before it is over.

        Args:
            shape: What tells batches of one size from others.
            last_action: What the step before was: "native", "record" or "replay", or "watched" if calls were observed.
            recordings: All recordings.
        """
        replays = [recording.replays for recording in recordings]
        before = self._replays + [0] * (len(replays) - len(self._replays))
        now = self._clock.mark()
        if self._started is not None:
            used = [position for position, count in enumerate(replays) if count > before[position]]
            if last_action == "native" or (used and last_action == "replay"):
                self._ended.append(_Step(self._started, now, self._shape, used if last_action == "replay" else []))
        self._replays, self._started, self._shape = replays, now, shape
        self._add_ended()

    def interrupt(self) -> None:
        """Leaves the current step out: something other than training follows it."""
        self._started = None

    def _add_ended(self) -> None:
        """Adds the steps whose duration can be told by now, in their order."""
        while self._ended and (duration := self._clock.between(self._ended[0].start, self._ended[0].end)) is not None:
            step = self._ended.popleft()
            if step.used:
                self._add_replayed(duration, step)
            else:
                self._add_native(duration, step.shape)

    def _add_native(self, duration: float, shape: Hashable) -> None:
        if (durations := self._native.get(shape)) is not None:
            durations.append(duration)
        elif len(self._native) < KEPT:
            self._native[shape] = _newest()  # the first step of a shape pays for first uses, and is left out

    def _add_replayed(self, duration: float, step: _Step) -> None:
        for position in step.used:
            replayed = self._replayed.setdefault(position, _Replayed())
            if len(replayed.shapes) < KEPT:
                replayed.shapes.add(step.shape)
            replayed.durations.append(duration)
            replayed.shares += 1 / len(step.used)
            replayed.steps += 1

    def write(self, recordings: Sequence[RecordingStats]) -> None:
        """Writes medians and savings into the statistics of the recordings that were replayed."""
        self._add_ended()
        for position, replayed in self._replayed.items():
            stats = recordings[position]
            stats.replay_ms = 1000 * statistics.median(replayed.durations)
            native = [duration for shape in replayed.shapes for duration in self._native.get(shape, ())]
            if len(native) >= MIN_NATIVE:
                stats.native_ms = 1000 * statistics.median_low(native)
                if self._can_save:
                    share = replayed.shares / replayed.steps
                    stats.seconds_saved = (stats.native_ms - stats.replay_ms) * stats.replays * share / 1000
