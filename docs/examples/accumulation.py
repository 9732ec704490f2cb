# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Accumulates the gradients of four batches before each update, clipped by norm, and prints the report.

Runs on a CUDA device if there is one, and with the tape backend otherwise.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayReport, ReplayStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> ReplayReport:
    inputs = torch.randn(640, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    cuda = torch.cuda.is_available()
    strategy = ReplayStrategy(backend="cuda" if cuda else "tape")
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if cuda else "cpu",
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    print(strategy.report())
    return strategy.report()


if __name__ == "__main__":
    main()
