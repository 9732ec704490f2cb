# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Logs the gradient norm of every step without making the host wait for the device.

    python docs/examples/log_gradient_norm.py

Clipping computes the norm anyway; `last_gradient_norm` is that very number, as a scalar on the training device. Handing
it to `self.log` reads nothing back: the values are fetched together when the logger writes. `float(norm)` or
`norm.item()` in each step would wait for the device, and undo much of what a replay saves.

Without ReplayStrategy, a `ReplayPrecision` has the same property: `self.trainer.precision_plugin.last_gradient_norm`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayReport, ReplayStrategy


class Regression(LightningModule):
    """A small network on made-up numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Of the last clipping, before scaling. None before the first, with capture_gradient_norm=False, and without
        # the strategy.
        norm = getattr(self.trainer.strategy, "last_gradient_norm", None)
        if norm is not None:
            self.log("gradient_norm", norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: str | Path = "logs", steps: int = 60, backend: str | None = None) -> tuple[Path, ReplayReport]:
    """Trains, and returns the file with the norms and the report.

    Args:
        folder: Where the logger writes.
        steps: Optimizer steps.
        backend: As ReplayStrategy takes it. None takes CUDA graphs on a GPU and the slow stand-in elsewhere.
    """
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    strategy = ReplayStrategy(backend=backend or ("auto" if torch.cuda.is_available() else "tape"))
    logger = CSVLogger(folder, name="gradient_norm")
    trainer = Trainer(
        strategy=strategy,
        gradient_clip_val=1.0,
        max_steps=steps,
        devices=1,
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=32))
    return Path(logger.log_dir) / "metrics.csv", strategy.report()


if __name__ == "__main__":
    torch.manual_seed(0)
    file, report = train()
    print(file.read_text())
    print(report)
