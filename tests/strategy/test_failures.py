# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Failures injected into warm-up, capture and replay: the run goes on natively, equal to native, and says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replay import Reason
from lightning_replay.engine.tape import Tape, TapeBackend
from tests.parity.harness import Learner, PoisonedStrategy, mlp, run_both, script

pytestmark = pytest.mark.filterwarnings("ignore")


class BrokenTape:
    """A graph that raises at one of its replays, before or in the middle of it."""

    atomic = False

    def __init__(self, tape: Tape, at: int, half_way: bool) -> None:
        self.tape, self.at, self.half_way, self.replays = tape, at, half_way, 0

    def replay(self) -> None:
        self.replays += 1
        if self.replays != self.at:
            self.tape.replay()
            return
        if self.half_way:
            entries = self.tape._entries
            self.tape._entries = [*entries[: len(entries) // 2], (self.fail, (), {}, [], False)]
            self.fail.__func__.overloadpacket = torch.ops.aten.add
            self.tape.replay()
        raise RuntimeError("the device said no")

    def fail(self) -> None:
        raise RuntimeError("the device said no")


class BrokenBackend(TapeBackend):
    """A tape backend that fails where it is told to.

    Args:
        warm_up: Which warm-up raises, counted from 1.
        capture: Which capture raises.
        allocate: Which allocation raises.
        half_way: Raise after the work was done, or in the middle of it.
        replay: Which replay of which graph raises.
        error: What is raised.
    """

    def __init__(
        self,
        device: torch.device,
        warm_up: int = 0,
        capture: int = 0,
        allocate: int = 0,
        half_way: bool = False,
        replay: tuple[int, int] = (0, 0),
        error: Callable[[str], Exception] = RuntimeError,
    ) -> None:
        super().__init__(device, poison=True)
        self.fails = {"warm_up": warm_up, "capture": capture, "allocate": allocate}
        self.half_way, self.replay, self.error = half_way, replay, error
        self.counts = dict.fromkeys(self.fails, 0)

    def _fail(self, kind: str, run: Callable[[], Any]) -> Callable[[], Any]:
        self.counts[kind] += 1
        if self.counts[kind] != self.fails[kind]:
            return run

        def failing() -> Any:
            if self.half_way:
                run()
                torch.rand(3)
            raise self.error("the device said no")

        return failing

    def warm_up(self, run: Callable[[], Any]) -> Any:
        return super().warm_up(self._fail("warm_up", run))

    def allocate(self, pool: Any, make: Callable[[], Any]) -> Any:
        return super().allocate(pool, self._fail("allocate", make))

    def capture(self, pool: Any, run: Callable[[], Any], *, overwrites_pool: bool = False) -> Any:
        tape, result = super().capture(pool, self._fail("capture", run), overwrites_pool=overwrites_pool)
        graph, at = self.replay
        return (BrokenTape(tape, at, self.half_way) if self.counts["capture"] == graph else tape), result


class BrokenStrategy(PoisonedStrategy):
    failure: dict[str, Any]

    def _make_backend(self) -> Any:
        return BrokenBackend(self.root_device, **self.failure)


def broken(**failure: Any) -> BrokenStrategy:
    strategy = BrokenStrategy(backend="tape", warmup_steps=2, on_native="ignore", capture_gradient_norm=False)
    strategy.failure = failure
    return strategy


def learner() -> Learner:
    return Learner(mlp())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("half_way", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "failure",
    [{"warm_up": 1}, {"warm_up": 2}, {"capture": 1}, {"capture": 2}, {"capture": 3}, {"allocate": 1}],
    ids=["reference", "warm-up of the hand-over", "forward", "backward", "hand-over", "gradient buffers"],
)
def test_recording_fails(failure: dict[str, int], half_way: bool, window: int) -> None:
    _, replay = run_both(
        learner, strategy=broken(half_way=half_way, **failure), accumulate_grad_batches=window, steps=8
    )

    assert replay.trace is not None
    report = replay.trace.report
    assert report.reasons[Reason.CAPTURE_FAILED] >= 1
    assert "the device said no" in report.messages[Reason.CAPTURE_FAILED]
    assert "net" not in {recording.region for recording in report.recordings}


@pytest.mark.parametrize("kind", ["capture", "allocate"])
def test_out_of_memory(kind: str) -> None:
    _, replay = run_both(learner, strategy=broken(**{kind: 1}, error=torch.cuda.OutOfMemoryError))

    assert replay.trace is not None
    assert replay.trace.report.reasons[Reason.OUT_OF_MEMORY] >= 1


AGAIN = ["native", "native", "record", "replay", "replay"]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("half_way", [False, True], ids=["before", "half-way"])
@pytest.mark.parametrize(
    ("graph", "name"), [(1, "forward"), (2, "backward"), (3, "hand-over")], ids=["forward", "backward", "hand-over"]
)
def test_a_later_replay_fails(graph: int, name: str, half_way: bool, window: int) -> None:
    at = 4 if graph < 3 else 2  # certification replays forward and backward once; the hand-over is not replayed there
    if graph == 3 and window == 3:
        at = 1  # only the first backward of a window publishes

    _, replay = run_both(
        learner, strategy=broken(replay=(graph, at), half_way=half_way), accumulate_grad_batches=window, steps=16
    )

    assert replay.trace is not None
    report = replay.trace.report
    assert report.reasons[Reason.REPLAY_FAILED] == 1
    assert "the device said no" in report.messages[Reason.REPLAY_FAILED]
    assert len(report.recordings) == 2, replay.trace.actions
    if graph == 1:
        assert replay.trace.actions == [*script(5), "native", *AGAIN, *["replay"] * 5]


def test_certification_replay_fails() -> None:
    _, replay = run_both(learner, strategy=broken(replay=(1, 1)))

    assert replay.trace is not None
    assert "the device said no" in replay.trace.report.messages[Reason.CAPTURE_FAILED]


def test_a_wrong_replay_is_never_engaged() -> None:
    class Wrong(PoisonedStrategy):
        def _make_backend(self) -> Any:
            return WrongBackend(self.root_device)

    class WrongBackend(TapeBackend):
        def capture(self, pool: Any, run: Callable[[], Any], *, overwrites_pool: bool = False) -> Any:
            tape, result = super().capture(pool, run, overwrites_pool=overwrites_pool)
            if overwrites_pool:
                tape._entries.pop(len(tape._entries) // 2)
            return tape, result

    _, replay = run_both(learner, strategy=Wrong(backend="tape", warmup_steps=2, on_native="ignore"))

    assert replay.trace is not None
    assert Reason.MISMATCH in replay.trace.report.reasons
    assert "net" not in {recording.region for recording in replay.trace.report.recordings}


class Raises(nn.Module):
    """Raises at one call, at one point of its forward."""

    def __init__(self, at: int, point: int) -> None:
        super().__init__()
        self.inner = mlp()
        self.fails = (at, point)

    def forward(self, inputs: Any) -> Any:
        for point, layer in enumerate(self.inner):
            _tick(self.fails, point)
            inputs = layer(inputs)
        return inputs


_CALLS = [0]


def _tick(fails: tuple[int, int], point: int) -> None:
    _CALLS[0] += 1
    if _CALLS[0] == fails[0] * 5 + fails[1] + 1:
        raise ValueError("inside")


@pytest.mark.parametrize("point", [0, 2, 4])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_forward_raises_in_native_steps(at: int, point: int) -> None:
    """The user's own error comes out as it would natively, and nothing is left on the modules."""

    def make() -> Learner:
        _CALLS[0] = 0
        return Learner(Raises(at, point))

    native, replay = run_both(make)

    assert str(native.error) == "inside"
    assert all("forward" not in module.__dict__ for module in replay.modules[0].modules())


class RaisesWhileRecorded(nn.Module):
    """Raises where its weight is not its own, which is so only while it is being recorded."""

    def __init__(self, point: int) -> None:
        super().__init__()
        self.inner, self.point = mlp(), point
        self.own = id(self.inner[0].weight)

    def forward(self, inputs: Any) -> Any:
        for point, layer in enumerate(self.inner):
            if point == self.point and id(self.inner[0].weight) != self.own:
                raise ValueError("inside")
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize("point", [0, 2, 4])
def test_forward_raises_while_recorded(point: int) -> None:
    _, replay = run_both(lambda: Learner(RaisesWhileRecorded(point)))

    assert replay.trace is not None
    assert "ValueError: inside" in replay.trace.report.messages[Reason.CAPTURE_FAILED]
