# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The smallest training with ReplayStrategy: one argument to the Trainer, and a report at the end.

Without a CUDA device, all steps run natively and the report says so; ReplayStrategy(backend="tape") shows there what
would be replayed, slowly.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayStrategy


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main(strategy: ReplayStrategy) -> None:
    inputs = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=32)
    trainer = Trainer(strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Net(), loader)
    print(strategy.report())


if __name__ == "__main__":
    main(ReplayStrategy())
