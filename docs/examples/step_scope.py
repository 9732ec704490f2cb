# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Records all of `training_step`, the loss and what it logs included.

Runs on a CUDA device if there is one, and with the tape backend otherwise.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayReport, ReplayStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(dim=1) == labels).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(scope: str = "step") -> tuple[ReplayReport, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(640, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=32)
    cuda = torch.cuda.is_available()
    strategy = ReplayStrategy(scope=scope, backend="cuda" if cuda else "tape")
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if cuda else "cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    print(strategy.report())
    return strategy.report(), trainer.callback_metrics


if __name__ == "__main__":
    main()
