# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A network that cannot be replayed, how to find out why, and the cure.

Runs on a CUDA device if there is one, and with the tape backend otherwise.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import Reason, ReplayReport, ReplayStrategy


class Scaled(nn.Module):
    """Divides by the largest value of the batch, which `.item()` brings to the host: the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        largest = inputs.abs().max().item()
        return self.linear(inputs / largest)


class Cured(Scaled):
    """Leaves the largest value on the device: a tensor of one element divides as well as a number."""

    def forward(self, inputs: Tensor) -> Tensor:
        largest = inputs.abs().max()
        return self.linear(inputs / largest)


class Regression(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(net: nn.Module) -> ReplayReport:
    inputs = torch.randn(320, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=32)
    # on_native="ignore" keeps warnings away, as this script prints the message itself; "error" would stop at it.
    strategy = ReplayStrategy(backend="cuda" if torch.cuda.is_available() else "tape", on_native="ignore")
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(net), loader)
    return strategy.report()


def main() -> tuple[ReplayReport, ReplayReport]:
    before = train(Scaled())
    print("With .item() in the network:\n")
    print(before)
    print("\nThe message of the reason names the line:\n")
    print(before.messages.get(Reason.HOST_SYNC, "no such reason was met"))

    after = train(Cured())
    print("\nWith the value left on the device:\n")
    print(after)
    return before, after


if __name__ == "__main__":
    main()
