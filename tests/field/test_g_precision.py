# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""G. Precision, autocast, loss scaling, clipping, and who steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_replay import ReplayPrecision
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, Learner, batches, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


class SharedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(1, 1, 3, padding=1) for _ in range(3))
        for conv in self.convs[1:]:
            conv.weight = self.convs[0].weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.unsqueeze(1)
        for conv in self.convs:
            hidden = conv(hidden).relu()
        return self.head(hidden.squeeze(1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def test_f23_one_weight_used_three_times_under_autocast(field: Field) -> None:
    field.replayed(lambda: Learner(SharedConvolutions(), optimizer=adam), steps=20, precision="bf16-mixed")


def test_f23_autocast_of_the_users_own_with_its_cache(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16, cache_enabled=True):
            logits = module.net(batch[0])
        return F.cross_entropy(logits.float(), batch[1])

    field.replayed(lambda: Learner(SharedConvolutions(), step, optimizer=adam), steps=20)


class Counting(Callback):
    def __init__(self) -> None:
        self.counts: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        self.counts.append((module.optimizer_steps, trainer.global_step, optimizer.param_groups[0]["lr"]))


class Scheduled(Learner):
    optimizer_steps = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self._count)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _count(self, *_: Any) -> None:
        self.optimizer_steps += 1


def test_f24_one_optimizer_step_a_batch(field: Field) -> None:
    counters: list[Counting] = []

    def callbacks() -> list[Callback]:
        counters.append(Counting())
        return [counters[-1]]

    field.replayed(lambda: Scheduled(mlp()), steps=7, max_epochs=2, accumulate_grad_batches=3, callbacks=callbacks)

    assert counters[0].counts == counters[1].counts
    assert counters[1].counts[-1][:2] == (6, 6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_f25_the_clipping_plugin_with_mixed_precision(field: Field, algorithm: str) -> None:
    trace = field.replayed(
        lambda: Learner(mlp()), precision="bf16-mixed", gradient_clip_val=0.1, gradient_clip_algorithm=algorithm
    )

    assert bool(trace.report.norm_replays) == (algorithm == "norm")


def test_f25_precision_and_a_plugin_is_an_error_that_says_so(field: Field) -> None:
    plugin = ReplayPrecision("bf16-mixed")
    with pytest.raises(ValueError, match="precision"):
        Trainer(
            accelerator=field.accelerator,
            devices=1,
            precision="bf16-mixed",
            plugins=[plugin],
            strategy=field.strategy(),
        )


def test_f25_by_name(field: Field) -> None:
    """The registered name does what the object does (on a device that it records on)."""
    trainer = Trainer(
        accelerator=field.accelerator,
        devices=1,
        strategy="replay",
        precision="bf16-mixed",
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
    )
    trainer.fit(Learner(mlp()), loader(batches(), 8)[0])

    assert (trainer.strategy.report().steps_replayed > 0) == field.on_gpu


def test_f26_clipping_two_hundred_small_parameters(field: Field) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(100))
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = inputs + 0.1 * layer(inputs)
            return self.head(inputs)

    trace = field.replayed(lambda: Learner(Many()), steps=10, gradient_clip_val=1.0)

    assert trace.report.norm_replays > 0
