# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Steps that a recording cannot hold as a whole: native or by their networks, with the reason and its line."""

import itertools
import linecache
import mmap
import os
import random
import re
import sqlite3
import time
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_replay import NotReplayedError, Reason
from tests.parity.harness import Arm, batches, mlp, run_both, tape

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(LightningModule):
    """A network, a loss, an optimizer; each subclass adds one thing to the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.losses: list[Tensor] = []
        self.cache: dict[float, Tensor] = {}
        self.counter = 0
        self.seconds = 0.0

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class AppendsTheLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())  # here
        return loss


class BranchesOnTheIndex(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * 2 if batch_idx % 2 else loss  # here


class FollowsTheEpoch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * 0.5**self.current_epoch  # here


class LogsAFloat(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", float(loss))  # here
        return loss


class LogsANumberOfItsOwn(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("number", next(self.numbers))  # here
        return loss


class FlipsACoin(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * 2 if random.random() < 0.5 else loss  # here


class ReadsTheLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss / (1 + loss.item())  # here


class PythonMetric:
    def __init__(self) -> None:
        self.total = 0

    def update(self, count: int) -> None:
        self.total += count


class UpdatesAPythonMetric(Base):
    def __init__(self) -> None:
        super().__init__()
        self.metric = PythonMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metric.update(len(batch[1]))
        return self.loss(batch)


class WeighsWithNumpy(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        counts = np.bincount(labels.cpu().numpy(), minlength=3)  # here
        weights = torch.as_tensor(1.0 / (1 + counts), dtype=torch.float32)
        return F.cross_entropy(self.net(inputs), labels, weight=weights)


class Counts(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counter += 1  # here
        return self.loss(batch)


class TakesTheTime(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        started = time.time()  # here
        loss = self.loss(batch)
        return loss if time.time() - started < 1e9 else loss * 2


class RemembersBatches(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        key = float(batch[0].sum())
        if key not in self.cache:  # here
            self.cache[key] = batch[0].mean()
        return self.loss(batch) + self.cache[key]


class LogsWhatNoGuardReaches(Base):
    def __init__(self) -> None:
        super().__init__()
        self.waiting = np.zeros(100_000)  # too large to be compared

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.waiting[0] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("waiting", float(self.waiting[0]))  # here
        return self.loss(batch)


class FillsAQueue(Base):
    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[int] = SimpleQueue()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.queue.put(1)  # here
        return self.loss(batch)


class FillsATable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table steps (step int)")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.database.execute("insert into steps values (1)")  # here
        return self.loss(batch)


class SetsTheEnvironment(Base):
    name = "LIGHTNING_REPLAY_OF_A_TEST"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        os.environ[self.name] = "1"  # here
        return self.loss(batch)


class WritesToMemory(Base):
    def __init__(self) -> None:
        super().__init__()
        self.memory = mmap.mmap(-1, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.memory.seek(0)  # here
        self.memory.write_byte(1)
        return self.loss(batch)


class Prints(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        print("a step")  # here
        return loss


REFUSED = [
    (AppendsTheLoss, Reason.ATTRIBUTE_WRITTEN),
    (BranchesOnTheIndex, Reason.BATCH_INDEX),
    (FollowsTheEpoch, Reason.TRAINER_READ),
    (LogsAFloat, Reason.HOST_SYNC),
    (LogsANumberOfItsOwn, Reason.ATTRIBUTE_WRITTEN),
    (FlipsACoin, Reason.HOST_RANDOM),
    (ReadsTheLoss, Reason.HOST_SYNC),
    (UpdatesAPythonMetric, Reason.ATTRIBUTE_WRITTEN),
    (WeighsWithNumpy, Reason.HOST_SYNC),
    (Counts, Reason.ATTRIBUTE_WRITTEN),
    (TakesTheTime, Reason.HOST_EFFECT),
    (RemembersBatches, Reason.ATTRIBUTE_WRITTEN),
    (Prints, Reason.HOST_EFFECT),
    (LogsWhatNoGuardReaches, Reason.PYTHON_VALUE),
    (FillsAQueue, Reason.HOST_EFFECT),
    (FillsATable, Reason.HOST_EFFECT),
    (SetsTheEnvironment, Reason.HOST_EFFECT),
    (WritesToMemory, Reason.HOST_EFFECT),
]


@pytest.mark.parametrize("scope", ["step", "auto"])
@pytest.mark.parametrize(("made", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_refused_step_trains_as_native(
    made: type[Base], reason: Reason, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SetsTheEnvironment.name, "0")
    _, replay = run_both(made, batches(), strategy=tape(scope=scope), max_epochs=2)

    assert replay.trace is not None
    report = replay.trace.report
    assert reason in report.reasons, "\n".join(report.messages.values())
    assert {recording.region for recording in report.recordings} == {"net"}, "its network is replayed in its place"
    assert "replay" in replay.trace.actions
    if made not in (UpdatesAPythonMetric, LogsANumberOfItsOwn):  # the message names the object that changes
        assert any("# here" in _line_of(m) for m in re.findall(r"\S+\.py:\d+", report.messages[reason])), (
            report.messages[reason]
        )
    else:
        assert re.search("metric|numbers", report.messages[reason])


def _line_of(place: str) -> str:
    file, line = place.rsplit(":", 1)
    return linecache.getline(file, int(line))


def test_scope_step_says_so_and_scope_auto_does_not() -> None:
    for scope, told in (("step", True), ("auto", False)):
        arm = Arm(Counts, batches(), tape(scope=scope, on_native="error"))
        assert isinstance(arm.error, NotReplayedError) == told, arm.error
