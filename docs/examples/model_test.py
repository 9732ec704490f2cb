# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Two tests for a project of your own: my model is replayed, and trains as it does natively. They need no GPU.

Put your LightningModule and your batches in place of these.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayStrategy

STEPS = 12


class MyModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1))
        self.net = nn.Sequential(hidden, nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(strategy: Any) -> LightningModule:
    seed_everything(0, verbose=False)
    inputs = torch.randn(8 * STEPS, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    model = MyModel()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return model


def test_my_model_is_replayed() -> None:
    # "error" stops at the first step that is native for a reason that needs a cure.
    strategy = ReplayStrategy(backend="tape", on_native="error")
    fit(strategy)

    assert strategy.report().steps_native == 4  # three of warm-up, and the one that is recorded


def test_my_model_trains_the_same() -> None:
    strategy = ReplayStrategy(backend="tape")
    native, replayed = fit("auto"), fit(strategy)

    assert strategy.report().steps_replayed
    weights = replayed.state_dict()
    for name, expected in native.state_dict().items():
        # Bytes, not values: torch.equal alone takes 0.0 for -0.0.
        assert torch.equal(expected.view(torch.uint8), weights[name].view(torch.uint8)), name
