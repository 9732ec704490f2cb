# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Accumulated gradients, however they are zeroed, cast and clipped: native's bits, and how each was handed over.

Everything that a forward replay may write is filled with NaN before each one. Nothing is copied away first.
"""

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.gradients.counting import FIRST_REPLAY, check_counts, expected_counts
from tests.parity.harness import Learner, batches, check_replayed, classify, loader, mlp, script, tape

pytestmark = pytest.mark.filterwarnings("ignore")

CLIPPING: dict[str, dict[str, Any]] = {
    "not clipped": {"gradient_clip_val": None},
    "norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_matrix(window: int, in_place: bool, precision: str, clip: str) -> None:
    steps = 2 * window + 3  # the last window is a partial one

    trace = check_replayed(
        lambda: Learner(mlp(), in_place=in_place),
        steps=steps,
        precision=precision,
        accumulate_grad_batches=window,
        **CLIPPING[clip],
    )

    check_counts(trace, expected_counts(steps, window, in_place))


@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
def test_each_whole_window_is_published_once_and_added_to(in_place: bool) -> None:
    """Three windows of four that are replayed from their first batch on."""
    trace = check_replayed(
        lambda: Learner(mlp(), in_place=in_place),
        steps=16,
        strategy=tape(warmup_steps=3),
        actions=script(16, 3),
        accumulate_grad_batches=4,
    )

    check_counts(trace, (0, 12, 0) if in_place else (3, 3 * 3, 0))


@pytest.mark.parametrize("window", [2, 4])
def test_partial_batch_inside_a_window(window: int) -> None:
    data = [*batches(), *batches(size=3)]  # five, five, five, three, three, three

    trace = check_replayed(
        lambda: Learner(mlp()),
        data,
        actions=["native", "native", "record", "native", "native", "record", *["replay"] * 7],
        steps=13,
        accumulate_grad_batches=window,
    )

    check_counts(trace, expected_counts(13, window, first=6))


def test_one_partial_batch_in_the_middle_of_a_window_is_native() -> None:
    data = [*batches(count=6), *batches(size=2, count=1), *batches(seed=1, count=6)]

    trace = check_replayed(
        lambda: Learner(mlp()),
        data,
        actions=[*script(6), "native", *["replay"] * 6],
        steps=13,
        accumulate_grad_batches=4,
    )

    opened = sum(step % 4 == 0 for step in range(FIRST_REPLAY, 13))
    check_counts(trace, (opened, 9 - opened, 0))


def test_schedule_that_changes_the_window() -> None:
    trace = check_replayed(
        lambda: Learner(mlp()),
        actions=[*script(6), *["replay"] * 12],
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 2: 3})],
        max_epochs=3,
        steps=6,
    )

    first, second, third = (expected_counts(6, window, first=first) for window, first in ((1, 3), (4, 0), (3, 0)))
    check_counts(trace, tuple(map(sum, zip(first, second, third, strict=True))))


def test_window_set_when_the_fit_starts() -> None:
    class SetWindow(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 4

    trace = check_replayed(lambda: Learner(mlp()), callbacks=lambda: [SetWindow()], steps=11)

    check_counts(trace, expected_counts(11, 4))
    assert len(trace.gradients) == 3


def test_validation_inside_a_window() -> None:
    class Validated(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", classify(self, batch, batch_idx))

    trace = check_replayed(
        lambda: Validated(mlp()),
        lambda: (loader(batches(), 12)[0], loader(batches(seed=1), 2)[0]),
        accumulate_grad_batches=4,
        val_check_interval=3,
    )

    assert "val_loss" in trace.metrics
    check_counts(trace, expected_counts(12, 4))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
def test_a_micro_batch_without_loss(position: int, in_place: bool) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = classify(module, batch, batch_idx)
        return None if batch_idx == 4 + position else loss

    trace = check_replayed(lambda: Learner(mlp(), step, in_place=in_place), steps=12, accumulate_grad_batches=4)

    published, added, copied = expected_counts(12, 4, in_place)
    # Without a loss nothing is handed over; without the first of a window the second one opens it.
    check_counts(trace, (published, added - 1, copied))
