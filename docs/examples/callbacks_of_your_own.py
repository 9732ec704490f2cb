# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Three callbacks that look into the training, and see what they would see natively.

Runs on a CUDA device if there is one, and with the tape backend otherwise.
"""

from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayStrategy


class KeepGradients(Callback):
    """Keeps a gradient of every step. No copy is needed: what you keep does not change."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.kept.append(module.net[0].weight.grad)


class Average(Callback):
    """Keeps an exponential moving average of the weights, in a copy of the network."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.average = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.average.update_parameters(module.net)


class CountActions(Callback):
    """Counts what the steps were: "native", "record" or "replay"."""

    def __init__(self) -> None:
        self.actions: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.actions[getattr(trainer.strategy, "last_action", "native")] += 1


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(strategy: Any, accelerator: str) -> tuple[KeepGradients, Average, CountActions]:
    torch.manual_seed(0)
    inputs = torch.randn(640, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32)
    callbacks = KeepGradients(), Average(), CountActions()
    trainer = Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    return callbacks


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    strategy = ReplayStrategy(backend="cuda" if cuda else "tape")
    _, _, count = train(strategy, "gpu" if cuda else "cpu")
    print(dict(count.actions))
    print(strategy.report())
