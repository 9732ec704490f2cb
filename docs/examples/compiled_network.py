# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A network that is compiled first, and whose compiled kernels are then recorded and replayed.

Runs on a CUDA device if there is one. Otherwise the tape backend stands in for CUDA graphs; it holds what runs eagerly,
so the compiler is one that leaves the operations as they are.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayReport, ReplayStrategy


class Regression(LightningModule):
    def __init__(self, compiler: str) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1))
        # The network, not the LightningModule, and no mode that makes CUDA graphs of its own.
        self.net = torch.compile(net, backend=compiler)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(compiler: str | None = None) -> ReplayReport:
    inputs = torch.randn(640, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    # A smaller last batch would make torch.compile compile once more.
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, drop_last=True)
    cuda = torch.cuda.is_available()
    compiler = compiler or ("inductor" if cuda else "aot_eager")
    strategy = ReplayStrategy(backend="cuda" if cuda else "tape")
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if cuda else "cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(compiler), loader)
    print(strategy.report())
    return strategy.report()


if __name__ == "__main__":
    main()
