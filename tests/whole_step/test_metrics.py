# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Metrics that a replayed step updates end as native leaves them; those that cannot be replayed are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_replay import Reason, ReplayReport
from tests.helpers.bits import assert_same
from tests.parity.harness import CLASSES, batches, loader, mlp, tape
from tests.whole_step.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(LightningModule):
    def __init__(self, metric: Metric | MetricCollection) -> None:
        super().__init__()
        self.net = mlp()
        self.metric = metric
        self.unused = MaxMetric()
        self.history: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        self.measure(loss, logits, labels)
        return loss

    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.metric.update(loss)

    def on_train_batch_end(self, *args: Any) -> None:
        states = {name: getattr(self.metric, name) for name in getattr(self.metric, "_defaults", {})}
        kept = {name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in states.items()}
        counts = (getattr(self.metric, "_update_count", None), getattr(self.metric, "_forward_cache", None))
        self.history.append((kept, counts, dict(self.trainer.callback_metrics)))

    def on_train_epoch_end(self) -> None:
        self.history.append(self.metric.compute())
        self.metric.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Forward(Base):
    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.log("accuracy of the batch", self.metric(logits, labels))


class LogsTheMetric(Base):
    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.metric(logits, labels)
        self.log("accuracy", self.metric, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.history.append(dict(self.trainer.callback_metrics))


class LogsBetweenTwoBatches(Base):
    """Lightning keeps what the metric made of its last batch when it is logged, not at the end of the step."""

    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.log("before", self.metric, on_step=True, on_epoch=True)
        self.metric(loss)
        self.log("between", self.metric, on_step=True, on_epoch=True)
        self.metric(loss * 2)
        self.log("after", self.metric, on_step=True, on_epoch=True)

    def on_train_start(self) -> None:
        self.metric(torch.tensor(1.0))

    def on_train_epoch_end(self) -> None:
        self.history.append(dict(self.trainer.callback_metrics))


class ReadsWhatAHookUpdates(Base):
    """The step weighs its loss by a metric that a hook updates: each update makes new tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.metric.tp.sum())

    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None:
        self.metric.update(torch.tensor([0, 1]), torch.tensor([0, 1]))
        super().on_train_batch_end(*args)


class ReadsItsLastResult(Base):
    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        earlier = self.metric._forward_cache
        self.log("earlier", 0.0 if earlier is None else earlier)
        self.metric(loss)


class Resets(Base):
    def measure(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.metric.reset()
        self.metric.update(loss)


def _fit(make: Any, strategy: Any) -> tuple[list[Any], dict[str, Any], ReplayReport | None]:
    seed_everything(3, verbose=False)
    module = make()
    trainer = quiet_trainer(strategy, max_epochs=2)
    trainer.fit(module, loader(batches(), 9)[0])
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return module.history, {"metrics": metrics, "weights": weights}, None if strategy == "auto" else strategy.report()


def _both(make: Any) -> ReplayReport:
    history, result, _ = _fit(make, "auto")
    replayed_history, replayed_result, report = _fit(make, tape(scope="step"))
    assert_same(history, replayed_history)
    assert_same(result, replayed_result)
    assert report is not None
    return report


@pytest.mark.parametrize(
    "make",
    [
        lambda: Base(MeanMetric(nan_strategy="disable")),
        lambda: Base(SumMetric(nan_strategy="disable")),
        lambda: Forward(MulticlassAccuracy(CLASSES, average="micro", validate_args=False)),
        lambda: LogsTheMetric(MulticlassAccuracy(CLASSES, average="micro", validate_args=False)),
        lambda: LogsBetweenTwoBatches(SumMetric(nan_strategy="disable")),
    ],
    ids=["mean", "sum", "forward", "logged", "logged between"],
)
def test_metric_is_updated_by_replays(make: Any) -> None:
    report = _both(make)

    assert {recording.region for recording in report.recordings} == {"training_step"}
    assert report.steps_replayed >= 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: Base(CatMetric(nan_strategy="disable")),
        lambda: Base(MetricCollection([MeanMetric(nan_strategy="disable"), SumMetric(nan_strategy="disable")])),
        lambda: Resets(MeanMetric(nan_strategy="disable")),
        lambda: ReadsWhatAHookUpdates(MulticlassAccuracy(CLASSES, average="micro", validate_args=False)),
        lambda: ReadsItsLastResult(SumMetric(nan_strategy="disable")),
    ],
    ids=["list", "collection", "reset", "read", "result"],
)
def test_metric_that_cannot_be_replayed_is_a_reason(make: Any) -> None:
    report = _both(make)

    assert Reason.METRIC in report.reasons
    assert "metric" in report.messages[Reason.METRIC]
    assert {recording.region for recording in report.recordings} == {"net"}
