# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Times of steps, by a clock of our own."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay import Reason, ReplayReport
from lightning_replay.report import RecordingStats
from lightning_replay.timing import KEPT, StepTimes


class Run:
    """Plays steps of given durations, in milliseconds, and is the clock.

    Attributes:
        lag: Milliseconds that the device is behind: what lies less far back cannot be told yet.
    """

    def __init__(self, recordings: Sequence[RecordingStats], can_save: bool = True) -> None:
        self.recordings = recordings
        self.times = StepTimes(recordings, can_save, clock=self)
        self.now = 0.0
        self.lag = 0.0
        self.last = "native"

    def mark(self) -> float:
        return self.now

    def between(self, start: float, end: float) -> float | None:
        return end - start if end <= self.now - self.lag / 1000 else None

    def step(
        self,
        milliseconds: float,
        action: str,
        replayed: Sequence[int] = (),
        shape: object = None,
        interrupt: bool = False,
    ) -> None:
        self.times.begin_step(shape, self.last, self.recordings)
        self.last = action
        for position in replayed:
            self.recordings[position].replays += 1
        self.now += milliseconds / 1000
        if interrupt:
            self.times.interrupt()

    def report(self) -> ReplayReport:
        self.times.begin_step(None, self.last, self.recordings)
        self.times.write(self.recordings)
        replayed = max((recording.replays for recording in self.recordings), default=0)
        return ReplayReport(replayed + 4, replayed, 4, {Reason.WARM_UP: 3}, tuple(self.recordings))


def stats(*seconds: float) -> list[RecordingStats]:
    return [RecordingStats(f"net.{i}", "(2, 3)", cost, 2**20, "bitwise") for i, cost in enumerate(seconds)]


WATCHED = ((500, "watched"), (35, "watched"), (40, "watched"), (900, "record"))
UNDISTURBED = ((70, "native"), (20, "native"), (22, "native"))


def warm_up(run: Run, shape: object = None) -> None:
    """What every recording meets, and then some native steps, of which the first pays for first uses."""
    for milliseconds, action in (*WATCHED, *UNDISTURBED):
        run.step(milliseconds, action, shape=shape)


def test_first_watched_and_recorded_steps_are_no_savings() -> None:
    run = Run(stats(0.9))
    warm_up(run)
    for milliseconds in (5, 4, 6):
        run.step(milliseconds, "replay", [0])

    report = run.report()

    (recording,) = report.recordings
    assert recording.native_ms == pytest.approx(20)
    assert recording.replay_ms == pytest.approx(5)
    assert recording.seconds_saved == pytest.approx(3 * 0.015)
    assert report.estimated_seconds_saved == pytest.approx(3 * 0.015)
    assert report.break_even_step == recording.break_even_step == 60  # 0.9 s at 15 ms each


def test_a_step_before_a_break_is_left_out() -> None:
    run = Run(stats(0.1))
    warm_up(run)
    run.step(5, "replay", [0])
    run.step(7000, "replay", [0], interrupt=True)

    assert run.report().recordings[0].replay_ms == pytest.approx(5)


def test_steps_count_once_the_device_has_come_by_and_with_their_own_shape() -> None:
    run = Run(stats(0.1))
    run.lag = 10_000
    warm_up(run, "small")
    for _ in range(3):
        run.step(5, "replay", [0], "small")
        run.step(80, "native", shape="large")
    assert run.report().recordings[0].replay_ms is None

    run.lag = 0
    (recording,) = run.report().recordings

    assert (recording.native_ms, recording.replay_ms) == (pytest.approx(20), pytest.approx(5))
    assert recording.seconds_saved == pytest.approx(3 * 0.015)


def test_replays_are_compared_with_native_steps_of_their_shape() -> None:
    run = Run(stats(0.1, 0.1))
    warm_up(run, "small")
    for milliseconds, action in ((90, "native"), (80, "native"), (85, "native"), (900, "record")):
        run.step(milliseconds, action, shape="large")
    for _ in range(4):
        run.step(5, "replay", [0], "small")
        run.step(10, "replay", [1], "large")

    small, large = run.report().recordings

    assert (small.native_ms, small.replay_ms) == (pytest.approx(20), pytest.approx(5))
    assert (large.native_ms, large.replay_ms) == (pytest.approx(80), pytest.approx(10))


def test_a_tape_saves_nothing() -> None:
    run = Run(stats(0.1), can_save=False)
    warm_up(run)
    run.step(5, "replay", [0])

    report = run.report()

    assert (report.recordings[0].native_ms, report.recordings[0].replay_ms) == (pytest.approx(20), pytest.approx(5))
    assert report.estimated_seconds_saved is report.recordings[0].seconds_saved is report.break_even_step is None
    assert "what was saved is unknown" in str(report)


@pytest.mark.parametrize("native", [(), UNDISTURBED[:1], UNDISTURBED[:2]], ids=len)
def test_without_enough_native_steps_nothing_is_claimed(native: Sequence[tuple[float, str]]) -> None:
    run = Run(stats(0.1))
    for milliseconds, action in (*WATCHED, *native):
        run.step(milliseconds, action)
    run.step(5, "replay", [0])

    report = run.report()

    assert report.recordings[0].replay_ms == pytest.approx(5)
    assert report.recordings[0].native_ms is None
    assert report.estimated_seconds_saved is None
    assert report.break_even_step is None
    assert "saved in replayed steps" not in str(report)
    assert "0.10 s spent on recording; what was saved is unknown" in str(report)
    assert {"unknown"} == {cell for row in report.tables()[1].rows for cell in row[2:3] + row[4:]}


def test_slower_replays_are_shown_as_a_loss_that_is_never_repaid() -> None:
    run = Run(stats(0.1))
    warm_up(run)
    run.step(30, "replay", [0])
    run.step(30, "replay", [0])

    report = run.report()

    assert report.estimated_seconds_saved == pytest.approx(-0.02)
    assert report.break_even_step is None
    assert "about -0.02 s saved" in str(report)
    assert "never" in str(report)


def test_recordings_that_never_replayed_still_cost() -> None:
    run = Run(stats(0.3, 0.6))
    warm_up(run)
    for _ in range(10):
        run.step(5, "replay", [0])

    report = run.report()

    assert report.recordings[0].break_even_step == 20
    assert report.break_even_step == 60
    assert report.as_dict()["break_even_step"] == 60
    assert [entry["break_even_step"] for entry in report.as_dict()["recordings"]] == [20, None]
    assert report.as_dict()["recordings"][1]["seconds_saved"] is None


def test_recordings_of_an_earlier_fit_keep_their_times() -> None:
    recordings = stats(0.1)
    recordings[0].replays, recordings[0].replay_ms = 40, 3.0
    run = Run(recordings)
    recordings.append(*stats(0.2))
    warm_up(run)
    run.step(5, "replay", [1])
    run.step(5, "replay", [1])

    earlier, later = run.report().recordings

    assert (earlier.replay_ms, earlier.seconds_saved) == (3.0, None)
    assert later.seconds_saved == pytest.approx(0.03)


@given(used=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=20))
def test_shares_of_several_recordings_add_up(used: list[set[int]]) -> None:
    run = Run(stats(0.1, 0.1, 0.1))
    warm_up(run)
    for positions in used:
        run.step(5, "replay", sorted(positions))

    assert run.report().estimated_seconds_saved == pytest.approx(len(used) * 0.015)


def test_what_is_kept_is_bounded() -> None:
    run = Run(stats(0.1))
    warm_up(run)
    for shape in range(3 * KEPT):
        run.step(20, "native", shape=shape)
        run.step(5, "replay", [0], shape=shape)

    assert run.report().recordings[0].replay_ms == pytest.approx(5)
    assert len(run.times._native) == KEPT
    assert len(run.times._replayed[0].shapes) == KEPT
    assert len(run.times._replayed[0].durations) == KEPT
