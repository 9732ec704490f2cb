# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The first steps of a fit with ReplayMonitor: Lightning's alone, and what replayed ones are compared with."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_replay import Reason, ReplayMonitor, ReplayStrategy
from lightning_replay.callbacks import monitor as monitor_module
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.tape import TapeBackend
from tests.parity.harness import WARM_UP, Learner, batches, classify, loader, mlp, run_both, script, tape

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 14
NATIVE = 3
SECONDS = {"native": 0.020, "watched": 0.030, "record": 0.9, "replay": 0.005}


def monitors(**options: Any) -> Any:
    return lambda: [ReplayMonitor(**options)]


def fit(
    strategy: ReplayStrategy, monitor: ReplayMonitor | None = None, checkpoint: str | None = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        strategy=strategy,
        callbacks=[monitor or ReplayMonitor()],
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Learner(mlp()), *loader(batches(), STEPS), ckpt_path=checkpoint)
    return trainer


# -- which steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["network", "step"])
@pytest.mark.parametrize("native_steps", [0, 1, 3, 5])
def test_the_first_steps_are_native_and_bits_are_those_of_a_native_run(native_steps: int, scope: str) -> None:
    callbacks = monitors(native_steps=native_steps)
    _, replay = run_both(lambda: Learner(mlp()), strategy=tape(scope=scope), callbacks=callbacks, steps=STEPS)

    assert replay.trace is not None, replay.error
    assert replay.trace.actions == ["native"] * native_steps + script(STEPS - native_steps)
    timed = {Reason.TIMED: native_steps} if native_steps else {}
    assert replay.trace.report.reasons == {**timed, Reason.WARM_UP: WARM_UP, Reason.RECORDING: 1}
    assert replay.trace.report.steps_native == native_steps + WARM_UP + 1


class Notes(nn.Module):
    """A network that looks for what may watch it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.seen: list[tuple[bool, int, bool]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        self.seen.append(("forward" in self.__dict__, modes, sys.getprofile() is not None))
        return self.body(inputs)


@pytest.mark.parametrize("scope", ["network", "step"])
def test_nothing_watches_them(scope: str) -> None:
    nets: list[Notes] = []

    def noting_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        nets[-1].seen.append(
            ("log" in module.__dict__, "_trainer" in module.__dict__, module.trainer.__class__ is type(module.trainer))
        )
        return classify(module, batch, batch_idx)

    def make() -> Learner:
        nets.append(Notes())
        return Learner(nets[-1], noting_step)

    native, replay = run_both(make, strategy=tape(scope=scope), callbacks=monitors(), steps=NATIVE + 1)

    assert native.trace is not None
    assert replay.trace is not None
    theirs, ours = (net.seen for net in nets)
    assert len(theirs) == 2 * (NATIVE + 1)
    assert ours[: 2 * NATIVE] == theirs[: 2 * NATIVE]
    assert ours[2 * NATIVE :] != theirs[2 * NATIVE :]


def test_a_batch_is_a_step_where_gradients_are_accumulated() -> None:
    _, replay = run_both(lambda: Learner(mlp()), callbacks=monitors(), steps=STEPS, accumulate_grad_batches=2)

    assert replay.trace is not None, replay.error
    assert replay.trace.actions == ["native"] * NATIVE + script(STEPS - NATIVE)


def test_a_fit_can_end_before_they_do_and_the_next_one_has_its_own() -> None:
    strategy = tape()

    fit(strategy, max_steps=2, max_epochs=-1)
    assert strategy.report().reasons == {Reason.TIMED: 2}
    fit(strategy, ReplayMonitor(native_steps=0))
    assert strategy.report().reasons == {Reason.TIMED: 2, Reason.WARM_UP: WARM_UP, Reason.RECORDING: 1}
    fit(strategy)
    assert strategy.report().reasons[Reason.TIMED] == 2 + NATIVE
    assert strategy.report().steps_replayed == 2 * (STEPS - WARM_UP - 1) - NATIVE


def test_a_fit_that_resumes_has_its_own(tmp_path: Path) -> None:
    file = str(tmp_path / "half.ckpt")
    fit(tape()).save_checkpoint(file)
    strategy = tape()

    trainer = fit(strategy, checkpoint=file, max_epochs=2)

    assert trainer.global_step == 2 * STEPS
    assert strategy.report().reasons == {Reason.TIMED: NATIVE, Reason.WARM_UP: WARM_UP, Reason.RECORDING: 1}


def test_memory_is_given_back_after_the_first_of_them_as_after_any_first_step() -> None:
    trims: list[int] = []

    class Trims(TapeBackend):
        def trim(self) -> None:
            trims.append(strategy.report().steps_total)

    class Strategy(ReplayStrategy):
        def _make_backend(self) -> GraphBackend:
            return Trims(self.root_device)

    strategy = Strategy(backend="tape", warmup_steps=WARM_UP)

    fit(strategy)

    recorded = NATIVE + WARM_UP + 1
    assert sorted(set(trims)) == [1, recorded, recorded + 1]


@pytest.mark.parametrize("asked", [(5, 0), (0, 5), (1, 5, 3)])
def test_of_several_monitors_the_one_that_asks_for_most_gets_them(asked: tuple[int, ...]) -> None:
    callbacks = lambda: [ReplayMonitor(native_steps=steps) for steps in asked]  # noqa: E731
    _, replay = run_both(lambda: Learner(mlp()), callbacks=callbacks, steps=STEPS)

    assert replay.trace is not None, replay.error
    assert replay.trace.actions == ["native"] * 5 + script(STEPS - 5)
    assert "native_steps=5" in replay.trace.report.messages[Reason.TIMED]


def test_they_are_no_error() -> None:
    strategy = tape(on_native="error")

    fit(strategy)

    assert strategy.report().steps_replayed == STEPS - NATIVE - WARM_UP - 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device the fit is not native as a whole")
def test_a_native_fit_keeps_its_reason() -> None:
    strategy = ReplayStrategy(on_native="ignore")

    fit(strategy)

    assert strategy.report().reasons == {Reason.NO_CUDA: STEPS}


# -- clipping ---------------------------------------------------------------------------------------------------------


class Norms(Callback):
    """Asks for the norm after each step."""

    def __init__(self) -> None:
        self.known: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        self.known.append(isinstance(strategy, ReplayStrategy) and strategy.last_gradient_norm is not None)


def test_clipping_is_left_alone_as_well_and_then_as_without_the_monitor() -> None:
    runs = []
    for native_steps in (0, NATIVE):
        norms = Norms()
        _, replay = run_both(
            lambda: Learner(mlp(), in_place=True),
            callbacks=lambda native_steps=native_steps, norms=norms: [ReplayMonitor(native_steps=native_steps), norms],
            steps=STEPS + native_steps,
            gradient_clip_val=0.01,
        )
        assert replay.trace is not None, replay.error
        assert norms.known[-STEPS - native_steps :] == [True] * (STEPS + native_steps)
        runs.append(replay.trace.report)

    without, with_monitor = runs
    assert without.norm_replays == with_monitor.norm_replays > 0
    assert with_monitor.norm_native == {Reason.TIMED: NATIVE, **without.norm_native}


# -- what is stated ---------------------------------------------------------------------------------------------------


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> ReplayStrategy:
    """Returns a strategy that can save, under a clock by which each kind of step has its duration."""
    strategy = tape()

    class Clock:
        now = 0.0

        def mark(self) -> float:
            self.now += SECONDS["watched" if strategy.last_watched else strategy.last_action]
            return self.now

        def between(self, start: float, end: float) -> float:
            return end - start

    monkeypatch.setattr(monitor_module, "HostClock", Clock)
    monkeypatch.setattr(ReplayStrategy, "uses_tape", False)
    return strategy


def test_a_default_fit_states_what_was_saved_and_when_that_pays(
    paced: ReplayStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(paced)

    report = paced.report()
    (recording,) = report.recordings
    assert recording.native_ms == pytest.approx(20)
    assert recording.replay_ms == pytest.approx(5)
    assert recording.seconds_saved == pytest.approx(0.015 * recording.replays)
    assert report.estimated_seconds_saved == recording.seconds_saved
    pays = math.ceil(recording.capture_seconds / 0.015)
    assert recording.break_even_step == report.break_even_step == pays
    assert report.as_dict()["recordings"][0]["break_even_step"] == pays
    printed = capsys.readouterr().out
    assert f"repaid by {pays} replayed steps" in printed
    assert f"{pays} replays" in printed
    assert "unknown" not in printed


@pytest.mark.parametrize("native_steps", [0, 1, 2])
def test_too_few_of_them_say_nothing(paced: ReplayStrategy, native_steps: int) -> None:
    fit(paced, ReplayMonitor(native_steps=native_steps))

    (recording,) = paced.report().recordings
    assert recording.replay_ms == pytest.approx(5)
    assert recording.native_ms is recording.seconds_saved is paced.report().break_even_step is None
    assert "what was saved is unknown" in str(paced.report())
