# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a replayed step logs is what native logs: values, reductions, batch sizes, names, order, rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_replay import Reason, ReplayReport
from tests.helpers.bits import assert_same
from tests.parity.harness import batches, loader, mlp, tape
from tests.whole_step.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Logs(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.scale = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self.shared_step(batch, batch_idx, "train")

    def shared_step(self, batch: Any, index: int, stage: str) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("sized", loss.detach(), batch_size=3, on_epoch=True, on_step=False)
        self.log_dict({"accuracy": (logits.argmax(1) == labels).float().mean(), "scale": self.scale})
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Keep(Callback):
    """Keeps what callbacks see, for as long as the fit takes."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.early: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({**trainer.callback_metrics, **trainer.progress_bar_metrics})
        self.outputs.append(outputs)
        self.early.append({name: value.clone() for name, value in outputs.items()})


def _fit(strategy: Any, folder: Path, steps: int = 9) -> tuple[list[Any], str, Keep, ReplayReport | None]:
    seed_everything(3, verbose=False)
    keep = Keep()
    trainer = quiet_trainer(
        strategy, max_epochs=2, logger=CSVLogger(folder, name=""), log_every_n_steps=1, callbacks=[keep]
    )
    trainer.fit(Logs(), loader([*batches(), *batches(size=3)], steps)[0])
    rows = next(folder.rglob("metrics.csv")).read_text()
    report = strategy.report() if strategy != "auto" else None
    return keep.seen, rows, keep, report


@pytest.mark.parametrize("scope", ["step", "auto"])
def test_logged_values_and_rows_are_native(scope: Any, tmp_path: Path) -> None:
    native, native_rows, _, _ = _fit("auto", tmp_path / "native")
    replay, replay_rows, keep, report = _fit(tape(scope=scope, warmup_steps=1), tmp_path / "replay")

    assert_same(native, replay)
    assert replay_rows == native_rows
    assert_same(keep.early, keep.outputs, "what a callback kept")
    assert report is not None
    assert {recording.region for recording in report.recordings} == {"training_step"}
    assert len(report.recordings) == 2
    assert report.steps_replayed >= 10


class LogsAGraph(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, enable_graph=True)
        return loss


def test_a_logged_graph_is_refused(tmp_path: Path) -> None:
    strategy = tape(scope="step")
    seed_everything(3, verbose=False)
    trainer = quiet_trainer(strategy, max_epochs=1)
    trainer.fit(LogsAGraph(), loader(batches(), 6)[0])

    assert Reason.LOGGED_VALUE in strategy.report().reasons
    assert {recording.region for recording in strategy.report().recordings} == {"net"}
