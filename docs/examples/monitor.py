# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Shows what is replayed while training goes on, and step times once it is over.

    python docs/examples/monitor.py

`ReplayMonitor` sends counts to the logger, says in the progress bar when a step is being recorded, and prints tables at
the end: the recordings with their step times, and why the other steps were native. The first three steps are native for
it, so that there is something to compare with; the tables then say what was saved, and after how many replays a
recording is repaid. Without a GPU the slow stand-in runs, which saves nothing.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayMonitor, ReplayReport, ReplayStrategy


class Autoencoder(LightningModule):
    """A small network on made-up numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (inputs,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(inputs)), inputs)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: str | Path = "logs", steps: int = 60, backend: str | None = None) -> tuple[Path, ReplayReport]:
    """Trains, and returns the logger's file and the report.

    Args:
        folder: Where the logger writes.
        steps: Optimizer steps.
        backend: As ReplayStrategy takes it. None takes CUDA graphs on a GPU and the slow stand-in elsewhere.
    """
    strategy = ReplayStrategy(backend=backend or ("auto" if torch.cuda.is_available() else "tape"))
    logger = CSVLogger(folder, name="monitor")
    trainer = Trainer(
        strategy=strategy,
        callbacks=[ReplayMonitor()],
        max_steps=steps,
        devices=1,
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder(), DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=32))
    return Path(logger.log_dir) / "metrics.csv", strategy.report()


if __name__ == "__main__":
    torch.manual_seed(0)
    file, _ = train()
    print(file.read_text())
