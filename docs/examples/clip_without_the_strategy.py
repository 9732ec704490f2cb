# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Records clipping by norm alone: the steps themselves stay native.

Runs on a CUDA device if there is one, and with the tape backend otherwise.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayPrecision


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> ReplayPrecision:
    inputs = torch.randn(640, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32)
    cuda = torch.cuda.is_available()
    # Instead of Trainer(precision="bf16-mixed"): Lightning refuses both at once.
    precision = ReplayPrecision("bf16-mixed", backend="cuda" if cuda else "tape")
    trainer = Trainer(
        plugins=[precision],
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        gradient_clip_val=1.0,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    print(f"clipping: {precision.norm_replays} replayed, native: {precision.norm_native}")
    return precision


if __name__ == "__main__":
    main()
