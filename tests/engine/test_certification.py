# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Nondeterminism is told apart from error, at no more than a few native runs."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_replay import Reason, ReplayReport
from lightning_replay.certification import MAX_NATIVE_RUNS, MAX_REPLAYS, Trial, Verdict, certify, nondeterminism_alerts
from lightning_replay.engine.recording import Recording
from tests.parity.harness import STEPS, WARM_UP, Arm, Learner, batches, mlp, run_both, tape

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _flags() -> None:
    torch.use_deterministic_algorithms(False)  # tests/conftest.py puts it back


class Judge:
    """Certifies a replay of one value; native runs give `native` and then `later`, in turn."""

    trained: Trial = {"net()[0]": torch.ones(2)}  # noqa: RUF012

    def __init__(
        self, native: float | None, *later: float, declared: Sequence[str] = (), replays: Sequence[float] = ()
    ) -> None:
        self.native = native
        self.later = itertools.cycle(later or (native,))
        self.declared = declared
        self.replays = list(replays)
        self.runs = 1  # the one before the capture

    def __call__(self, replay: float | None, mode: Any = "auto") -> Verdict:
        runs = [self.trained, self.trial(self.native)]
        return certify(mode, runs, self.trial(replay), self.run, self.find_declared, self.replay_again)

    @staticmethod
    def trial(value: float | None) -> Trial:
        gradient = None if value is None else torch.tensor([4.0, value])
        return {"net()[0]": torch.ones(2), "net.weight.grad": gradient}

    def run(self) -> Trial:
        self.runs += 1
        return self.trial(next(self.later))

    def find_declared(self) -> Sequence[str]:
        self.runs += 1
        return self.declared

    def replay_again(self) -> Trial:
        return self.trial(self.replays.pop(0))


def test_equal_bits_need_no_further_run() -> None:
    judge = Judge(1.0, 2.0, declared=["add"])

    assert judge(1.0) == Verdict("bitwise")
    assert judge.runs == 1


def test_an_error_names_the_value_and_the_numbers() -> None:
    verdict = Judge(1.0)(1.5)

    assert not verdict.equal
    assert verdict.where == "net.weight.grad"
    assert "1.0 and 1.5 at index [1]" in verdict.difference


def test_native_that_repeats_itself_proves_nothing_where_an_operation_declares() -> None:
    judge = Judge(1.0, declared=["some_backward"])

    assert judge(1.0 + 1e-6) == Verdict("nondeterministic", operations=("some_backward",))
    assert judge.runs == 3, "the reference, the one that names operations, and one to compare with"


SMALL = 1.0 + 1e-6


def test_a_replay_that_seldom_differs_is_tried_again() -> None:
    judge = Judge(1.0, replays=[SMALL, 1.0, 1.0])

    assert judge(SMALL) == Verdict("nondeterministic")
    assert judge.replays == [1.0], "one that has the bits of native is enough"


def test_a_replay_that_never_has_the_bits_of_native_is_refused() -> None:
    judge = Judge(1.0, replays=[SMALL] * (MAX_REPLAYS - 1))

    assert not judge(SMALL).equal
    assert judge.replays == []


@pytest.mark.parametrize(("value", "mode"), [(1.5, "auto"), (SMALL, "bitwise")])
def test_another_replay_does_not_excuse(value: float, mode: str) -> None:
    judge = Judge(1.0, replays=[1.0])

    assert not judge(value, mode).equal
    assert judge.replays == [1.0]


def test_another_replay_does_not_excuse_what_differs_from_the_step_that_trained() -> None:
    """Reruns may all take another way than the step did: they prove nothing of it."""
    judge = Judge(1.0, replays=[1.0] * (MAX_REPLAYS - 1))
    judge.trained = {"net()[0]": torch.tensor([1.0, SMALL])}

    assert judge(1.0).where == "net()[0]"
    assert judge.replays == []


@pytest.mark.parametrize(("native", "replay"), [(1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)])
@pytest.mark.parametrize("declared", [(), ("some_backward",)], ids=["", "declared"])
def test_what_is_not_finite_is_far(native: float, replay: float, declared: tuple[str, ...]) -> None:
    assert not Judge(native, declared=declared, replays=[native])(replay).equal


def test_an_infinite_value_excuses_no_other() -> None:
    class Infinite(Judge):
        @staticmethod
        def trial(value: float | None) -> Trial:
            assert value is not None
            return {"net()[0]": torch.ones(2), "net.weight.grad": torch.tensor([math.inf, value])}

    assert not Infinite(2.0, declared=["some_backward"])(2.5).equal
    assert Infinite(2.0, declared=["some_backward"])(2.0 + 1e-6).equal == "nondeterministic"


def test_another_replay_does_not_excuse_where_determinism_was_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    judge = Judge(1.0, replays=[1.0])

    assert not judge(SMALL).equal
    assert judge.replays == [1.0]


def test_native_that_repeats_itself_for_long_is_tried_again() -> None:
    judge = Judge(1.0, *[1.0] * 6, 1.5)

    assert judge(1.4) == Verdict("nondeterministic")
    assert judge.runs == MAX_NATIVE_RUNS - 1


def test_native_that_always_repeats_itself_is_not_asked_for_ever() -> None:
    judge = Judge(1.0)

    assert not judge(1.4).equal
    assert judge.runs == MAX_NATIVE_RUNS


@pytest.mark.parametrize("declared", [(), ("some_backward",)], ids=["seen", "declared"])
def test_native_differs_from_itself(declared: tuple[str, ...]) -> None:
    assert Judge(1.0, 1.5, 2.0, declared=declared)(1.7) == Verdict("nondeterministic", operations=declared)
    assert not Judge(1.0, 1.5, 2.0, declared=declared)(9.0).equal


def test_native_that_promises_to_repeat_itself() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)

    assert not Judge(1.0, 1.5)(1.2).equal
    assert Judge(1.0, 1.5, declared=["some_backward"])(1.2).equal == "nondeterministic"


def test_bitwise_accepts_nothing_else() -> None:
    judge = Judge(1.0, 1.5, declared=["some_backward"])

    assert not judge(1.2, "bitwise").equal
    assert judge.runs == 1


@pytest.mark.parametrize(("native", "replay"), [(None, 0.0), (0.0, None)])
def test_no_gradient_is_not_zero(native: float | None, replay: float | None) -> None:
    verdict = Judge(native, 0.0, declared=["some_backward"])(replay)

    assert not verdict.equal
    assert "None" in verdict.difference


# -- what torch says -----------------------------------------------------------------------------------------------


def put(values: Tensor) -> Tensor:
    """Declares itself nondeterministic, on a CPU too."""
    return torch.zeros_like(values).put_(torch.arange(values.numel()), values.detach())


@pytest.mark.parametrize("mode", [(False, False), (True, True), (True, False)], ids=["off", "warn", "on"])
def test_alerts_are_collected_and_leave_no_trace(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    shown, always = warnings.showwarning, torch.is_warn_always_enabled()

    for _ in range(2):
        with nondeterminism_alerts() as names:
            put(torch.ones(3))
            put(torch.ones(3))
            torch.ones(3).mul(2)
            warnings.warn("a sentence of the user's about deterministic algorithms", stacklevel=1)
        assert names == ["put_"]

    assert torch.are_deterministic_algorithms_enabled() == mode[0]
    assert torch.is_deterministic_algorithms_warn_only_enabled() == mode[1]
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert (warnings.showwarning, torch.is_warn_always_enabled()) == (shown, always)


# -- whole fits ----------------------------------------------------------------------------------------------------

_library = torch.library.Library("lightning_replay_tests", "DEF")
_library.define("unsteady(Tensor values, float size) -> Tensor")
_noise = itertools.count()


def _unsteady(values: Tensor, size: float) -> Tensor:
    """Adds something else in every run, as sums in no fixed order do."""
    return values + size * (next(_noise) % 3)


_library.impl("unsteady", _unsteady, "CompositeExplicitAutograd")


class Unsteady(nn.Module):
    def __init__(self, size: float, declares: bool) -> None:
        super().__init__()
        self.net = mlp(dropout=0.0)
        self.size, self.declares = size, declares

    def forward(self, inputs: Tensor) -> Tensor:
        if self.declares:
            inputs = put(inputs)
        return self.net(torch.ops.lightning_replay_tests.unsteady(inputs, self.size))


class Undetermined(Learner):
    """Trains without deterministic algorithms, as a fit does by default."""

    def on_fit_start(self) -> None:
        torch.use_deterministic_algorithms(False)


def fit(size: float, declares: bool, learner: type[Learner] = Learner, **options: Any) -> ReplayReport:
    """Fits with `deterministic="warn"`."""
    arm = Arm(lambda: learner(Unsteady(size, declares)), batches(), tape(modules=["net"], **options))
    assert arm.error is None, arm.error
    assert arm.trace is not None
    return arm.trace.report


def test_declared_nondeterminism_is_replayed_and_reported() -> None:
    report = fit(1e-3, True)

    (recording,) = report.recordings
    assert report.steps_replayed == STEPS - WARM_UP - 1
    assert recording.certified == "nondeterministic"
    assert recording.nondeterministic == ("put_",)
    assert recording.native_runs == 3
    assert "net: exact up to native nondeterminism (put_)" in str(report)
    assert report.as_dict()["recordings"][0]["nondeterministic"] == ("put_",)


def test_bitwise_keeps_it_native() -> None:
    report = fit(1e-3, True, certify="bitwise")

    assert report.steps_replayed == 0
    assert Reason.MISMATCH in report.reasons


def test_undeclared_nondeterminism_is_an_error_under_deterministic_algorithms() -> None:
    report = fit(1e-3, False)

    assert report.steps_replayed == 0
    assert "where:    net()[0]" in report.messages[Reason.MISMATCH]
    assert "at index [0, 0]" in report.messages[Reason.MISMATCH]


def test_an_ordinary_recording_costs_one_native_run() -> None:
    (recording,) = fit(0.0, True).recordings

    assert (recording.certified, recording.native_runs, recording.nondeterministic) == ("bitwise", 1, ())


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_wrong_recording_is_an_error_whatever_declares_itself(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = Recording.forward, Recording.backward

    def wrong_forward(self: Recording, inputs: Any) -> Any:
        return [output * 1.5 for output in forward(self, inputs)]

    def wrong_backward(self: Recording, cotangents: Any) -> None:
        backward(self, cotangents)
        for gradient in self.gradients:
            if gradient is not None:
                gradient.mul_(1.5)

    monkeypatch.setattr(Recording, wrong, wrong_forward if wrong == "forward" else wrong_backward)
    for learner in (Learner, Undetermined):
        report = fit(0.0, True, learner)
        assert report.steps_replayed == 0
        assert Reason.MISMATCH in report.reasons


def test_nondeterminism_that_is_seen() -> None:
    report = fit(1e-3, False, Undetermined)

    (recording,) = report.recordings
    assert (recording.certified, recording.nondeterministic) == ("nondeterministic", ())
    assert "runs from the same state differ" in str(report)


def _rounded_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Makes the first backward replays differ by rounding, as a kernel does that adds in no fixed order."""
    backward, left = Recording.backward, itertools.repeat(None, times)

    def rounded(self: Recording, cotangents: Any) -> None:
        backward(self, cotangents)
        if next(left, self) is None:
            for gradient in self.gradients:
                if gradient is not None:
                    gradient.mul_(1 + 2e-7)

    monkeypatch.setattr(Recording, "backward", rounded)


def test_a_trial_replay_that_differs_once_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    _rounded_once(monkeypatch, 1)
    _, replay = run_both(lambda: Undetermined(Unsteady(0.0, False)), strategy=tape(modules=["net"]))

    assert replay.trace is not None
    report = replay.trace.report
    assert report.steps_replayed == STEPS - WARM_UP - 1
    assert [recording.certified for recording in report.recordings] == ["nondeterministic"]
    assert report.recordings[0].native_runs == MAX_NATIVE_RUNS


@pytest.mark.parametrize(("learner", "times"), [(Undetermined, MAX_REPLAYS), (Learner, 1)])
def test_a_trial_replay_that_differs_is_an_error(
    learner: type[Learner], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rounded_once(monkeypatch, times)
    report = fit(0.0, False, learner)

    assert report.steps_replayed == 0
    assert Reason.MISMATCH in report.reasons
