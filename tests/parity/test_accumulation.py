# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Accumulated gradients, however they are zeroed and clipped."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.parity.harness import Learner, batches, check_replayed, classify, mlp, script

pytestmark = pytest.mark.filterwarnings("ignore")

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {"gradient_clip_val": None},
    "norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_matrix(window: int, in_place: bool, clip: str) -> None:
    steps = 2 * window + 3  # the last window is a partial one

    trace = check_replayed(
        lambda: Learner(mlp(), in_place=in_place),
        steps=steps,
        accumulate_grad_batches=window,
        **CLIPPING[clip],
    )

    replays = steps - 3
    report = trace.report
    assert report.gradients_published + report.gradients_added == replays
    opened = sum(1 for step in range(3, steps) if step % window == 0)
    assert report.gradients_published == (0 if in_place else opened)


def test_window_under_autocast() -> None:
    check_replayed(lambda: Learner(mlp()), steps=9, accumulate_grad_batches=4, precision="bf16-mixed")


def test_ragged_batch_inside_a_window() -> None:
    data = [*batches(), *batches(size=3)]  # five, five, five, three, three, three

    check_replayed(
        lambda: Learner(mlp()),
        data,
        actions=["native", "native", "record", "native", "native", "record", *["replay"] * 6, "replay"],
        steps=13,
        accumulate_grad_batches=4,
    )


def test_window_that_changes() -> None:
    check_replayed(
        lambda: Learner(mlp()),
        actions=[*script(5), *["replay"] * 10],
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
        max_epochs=3,
        steps=5,
    )


def test_validation_inside_a_window() -> None:
    class Validated(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", classify(self, batch, batch_idx))

    from tests.parity.harness import loader

    trace = check_replayed(
        lambda: Validated(mlp()),
        lambda: (loader(batches(), 9)[0], loader(batches(seed=1), 2)[0]),
        accumulate_grad_batches=4,
        val_check_interval=3,
    )

    assert "val_loss" in trace.metrics


@pytest.mark.parametrize("window", [1, 3])
def test_no_loss_on_some_steps(window: int) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = classify(module, batch, batch_idx)
        return None if batch_idx % 4 == 3 else loss

    check_replayed(lambda: Learner(mlp(), step), steps=11, accumulate_grad_batches=window)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_optimizers(optimizer: Any) -> None:
    check_replayed(lambda: Learner(mlp(), optimizer=lambda p: optimizer(p, lr=0.01)), accumulate_grad_batches=2)
