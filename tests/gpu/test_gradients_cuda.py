# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Accumulated gradients from CUDA graphs: native's bits in every precision, however they are zeroed and clipped."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_replay import ReplayStrategy
from tests.gradients.counting import check_counts, expected_counts
from tests.gradients.test_matrix import CLIPPING
from tests.helpers.bits import same_bits
from tests.helpers.trace import TraceResult
from tests.parity.harness import WARM_UP, Learner, batches, check_replayed, classify, mlp, script

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


def check(make: Any, data: Any = None, **options: Any) -> TraceResult:
    """As on the tape, with CUDA graphs."""
    strategy = ReplayStrategy(warmup_steps=WARM_UP, on_native="ignore")
    return check_replayed(make, data, strategy=strategy, accelerator="gpu", **options)


@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_matrix(window: int, in_place: bool, precision: str, clip: str) -> None:
    steps = 2 * window + 3  # the last window is a partial one

    trace = check(
        lambda: Learner(mlp(), in_place=in_place),
        steps=steps,
        precision=precision,
        accumulate_grad_batches=window,
        **CLIPPING[clip],
    )

    check_counts(trace, expected_counts(steps, window, in_place))


@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
@pytest.mark.parametrize("position", range(4))
def test_overflow_within_a_window(position: int, in_place: bool, clip: str) -> None:
    """One of four micro-batches overflows: the scaler skips the update, scales less, and goes on."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = classify(module, batch, batch_idx)
        return loss * float("inf") if batch_idx == 4 + position else loss

    trace = check(
        lambda: Learner(mlp(), step, in_place=in_place),
        steps=16,
        precision="16-mixed",
        accumulate_grad_batches=4,
        **CLIPPING[clip],
    )

    assert trace.scaler is not None
    assert trace.scaler["scale"] < 2.0**16
    check_counts(trace, expected_counts(16, 4, in_place))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_loss_on_a_micro_batch(precision: str) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = classify(module, batch, batch_idx)
        return None if batch_idx == 5 else loss

    trace = check(lambda: Learner(mlp(), step), steps=12, precision=precision, accumulate_grad_batches=4)

    published, added, copied = expected_counts(12, 4)
    check_counts(trace, (published, added - 1, copied))


class KeepGradients(Callback):
    """Keeps gradients without copying them, and remembers what they were."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step % 3 == 0:
            self.kept += [(p.grad, p.grad.clone()) for p in pl_module.parameters()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert all(same_bits(kept, then) for kept, then in self.kept)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kept_gradients(precision: str) -> None:
    trace = check(
        lambda: Learner(mlp()),
        actions=script(10),
        callbacks=lambda: [KeepGradients()],
        steps=10,
        precision=precision,
        gradient_clip_val=None,
    )

    assert trace.report.gradients_copied > 0


class MovesWeights(Callback):
    """Gives all weights new memory before a batch, which retires what was recorded."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            for parameter in pl_module.parameters():
                parameter.data = parameter.data.clone()


@pytest.mark.parametrize("moved_at", [8, 9, 10])
def test_recording_again_leaves_live_and_kept_gradients(moved_at: int) -> None:
    """The buffers of the first recording are in use while the second one is made, in the same pool."""
    check(
        lambda: Learner(mlp()),
        actions=script(moved_at) + script(20 - moved_at),
        callbacks=lambda: [KeepGradients(), MovesWeights(moved_at)],
        steps=20,
        accumulate_grad_batches=4,
        gradient_clip_val=None,
    )


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam, capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer: Any, window: int) -> None:
    trace = check(lambda: Learner(mlp(), optimizer=optimizer), steps=11, accumulate_grad_batches=window)

    check_counts(trace, expected_counts(11, window))


def test_channels_last_weights_and_a_fused_update() -> None:
    """Convolutions may return gradients of other strides than a channels-last weight has; fused updates refuse them."""

    def make() -> Learner:
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Flatten(),
            nn.LazyLinear(3),
        )
        net(torch.zeros(2, 3, 8, 8))
        return Learner(net.to(memory_format=torch.channels_last), optimizer=OPTIMIZERS["AdamW, fused"])

    trace = check(
        make, batches(3, 8, 8), steps=11, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=None
    )

    check_counts(trace, expected_counts(11, 2))
