# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The examples of the guide are replayed, and do what the guide says of them."""

import re
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import Reason, ReplayStrategy, ReplayWarning
from tests.demo.examples import load_example
from tests.helpers.bits import assert_same

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.cuda.is_available()
HEALTHY = {Reason.WARM_UP, Reason.RECORDING}


def test_accumulation_publishes_once_a_window_and_adds_the_rest() -> None:
    report = load_example("accumulation").main()

    assert (report.steps_total, report.steps_replayed) == (80, 76)
    # The windows of the four native steps are the first; every later window publishes one gradient and adds three.
    assert (report.gradients_published, report.gradients_added, report.gradients_copied) == (19, 57, 0)
    assert report.norm_replays > 0
    assert set(report.reasons) == HEALTHY


def test_clipping_is_replayed_without_the_strategy() -> None:
    precision = load_example("clip_without_the_strategy").main()

    assert precision.norm_replays > 20
    assert precision.last_gradient_norm is not None


def test_callbacks_see_what_they_would_see_natively() -> None:
    example = load_example("callbacks_of_your_own")
    strategy = ReplayStrategy(backend="cuda" if CUDA else "tape")
    accelerator = "gpu" if CUDA else "cpu"
    native_kept, native_average, native_count = example.train("auto", accelerator)
    kept, average, count = example.train(strategy, accelerator)

    assert count.actions == {"native": 3, "record": 1, "replay": 36}
    assert native_count.actions == {"native": 40}
    assert_same(native_kept.kept, kept.kept)
    assert_same(native_average.average.state_dict(), average.average.state_dict())
    # Each replayed step whose gradients were kept gave them memory of their own.
    assert strategy.report().gradients_copied > 0


def test_the_whole_step_is_replayed_and_logs_the_same() -> None:
    example = load_example("step_scope")
    networks, logged_by_networks = example.main("network")
    for scope in ("step", "auto"):
        whole, logged = example.main(scope)

        assert (whole.steps_replayed, networks.steps_replayed) == (36, 36)
        assert [recording.region for recording in whole.recordings] == ["training_step"]
        assert set(whole.reasons) == HEALTHY
        assert set(logged) == {"loss", "accuracy"}
        assert_same(logged_by_networks, logged)


def step_that_uses_its_index(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return STEP(module, batch, batch_idx + 1)


def step_that_reads_the_trainer(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return STEP(module, batch, 0) * (module.trainer.max_epochs / 2)


def step_that_looks_at_a_clock(module: Any, batch: Any, batch_idx: int) -> Tensor:
    time.perf_counter()
    return STEP(module, batch, 0)


def step_that_logs_a_graph(module: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = STEP(module, batch, 0)
    module.log("graph", loss, enable_graph=True)
    return loss


STEP = load_example("step_scope").Classifier.training_step
STEP_REASONS = {
    "batch_index": step_that_uses_its_index,
    "trainer_read": step_that_reads_the_trainer,
    "host_effect": step_that_looks_at_a_clock,
    "logged_value": step_that_logs_a_graph,
}


@pytest.mark.parametrize("reason", STEP_REASONS)
def test_a_step_that_cannot_be_recorded_whole_is_recorded_by_its_networks(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    assert f"- `{reason}`: " in (ROOT / "docs" / "guide" / "step-scope.md").read_text(encoding="utf-8")
    example = load_example("step_scope")

    monkeypatch.setattr(example.Classifier, "training_step", STEP_REASONS[reason])
    with pytest.warns(ReplayWarning, match=rf"\[{reason}\]"):
        report, _ = example.main("step")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        quiet, _ = example.main("auto")

    for found in (report, quiet):
        assert Reason(reason) in found.reasons
        assert [recording.region for recording in found.recordings] == ["net"]
        assert found.steps_replayed > 25


def step_that_asks_for_a_number(module: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = STEP(module, batch, 0)
    module.log("number", loss.item())
    return loss


@pytest.mark.skipif(CUDA, reason="asserts the counts of the stand-in")
@pytest.mark.filterwarnings("ignore::lightning_replay.ReplayWarning")
@pytest.mark.parametrize("warmup_steps", [2, 3])
def test_native_steps_before_a_step_is_recorded_by_its_networks(
    monkeypatch: pytest.MonkeyPatch, warmup_steps: int
) -> None:
    page = (ROOT / "docs" / "guide" / "step-scope.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\((`.+`)\) \| `(.+)` \| (\d+) \|$", page, flags=re.MULTILINE)
    example = load_example("step_scope")
    monkeypatch.setattr(example, "ReplayStrategy", partial(ReplayStrategy, warmup_steps=warmup_steps))

    found = {}
    for reason, step in {**STEP_REASONS, "host_sync": step_that_asks_for_a_number}.items():
        monkeypatch.setattr(example.Classifier, "training_step", step)
        report, _ = example.main("auto")
        assert Reason(reason) in report.reasons
        assert report.steps_replayed > 25
        found[reason] = report.steps_native

    told = {
        name: eval(formula, {"warmup_steps": warmup_steps})
        for names, formula, _ in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == found
    assert all(int(default) == eval(formula, {"warmup_steps": 3}) for _, formula, default in rows)


def has_compiler() -> bool:
    return CUDA or shutil.which("g++") is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "compiler",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler")),
    ],
)
def test_a_compiled_network_is_replayed(compiler: str) -> None:
    torch._dynamo.reset()
    report = load_example("compiled_network").main(compiler)

    if compiler == "inductor" and Reason.MISMATCH in report.reasons:  # a tape holds what runs eagerly
        assert report.steps_replayed == 0, report
        return
    assert report.steps_replayed == 36, report
    assert set(report.reasons) == HEALTHY


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_change_inside_a_compiled_network_is_seen() -> None:
    class Change(Callback):
        def __init__(self) -> None:
            self.losses: list[Tensor] = []

        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 8:
                module.net._orig_mod[1].negative_slope = 0.5

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].clone())

    def losses(strategy: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        change = Change()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=16, callbacks=[change], **quiet)
        trainer.fit(load_example("compiled_network").Regression("eager"), DataLoader(batches(), batch_size=8))
        return change.losses

    def batches() -> TensorDataset:
        inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    strategy = ReplayStrategy(backend="tape", on_native="ignore")
    assert_same(losses("auto"), losses(strategy))
    assert strategy.report().reasons[Reason.MODULE_CHANGED] == 1
    assert [recording.replays for recording in strategy.report().recordings] == [4, 4]


@pytest.mark.parametrize("name", ["test_my_model_is_replayed", "test_my_model_trains_the_same"])
def test_the_tests_to_copy_pass(name: str) -> None:
    getattr(load_example("model_test"), name)()


def test_the_tests_to_copy_fail_where_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example("model_test")

    class Native(ReplayStrategy):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "backend": "auto", "on_native": "ignore"})

    monkeypatch.setattr(example, "ReplayStrategy", Native)
    with pytest.raises(AssertionError):
        example.test_my_model_is_replayed()
    with pytest.raises(AssertionError):
        example.test_my_model_trains_the_same()
