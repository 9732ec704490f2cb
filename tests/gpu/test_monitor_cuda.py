# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""ReplayMonitor beside CUDA graphs: it never waits for the device, and its times are those of the steps."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_replay import ReplayMonitor, ReplayStrategy
from tests.helpers.models import MLPModule, cycled, feature_batches

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

STEPS = 60
NATIVE = range(20, 25)


def without_waiting(hook: Any) -> Any:
    """Returns a hook in which a synchronization is an error."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return hook(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return guarded


class Stopwatch(Callback):
    """Notes when each step begins, and makes some native, by which replayed ones are judged."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.train(batch_idx not in NATIVE)
        self.starts.append(time.perf_counter())


def test_the_monitor_never_waits_and_its_times_are_those_of_the_steps(tmp_path: Path) -> None:
    monitor, watch, strategy = ReplayMonitor(log_every_n_steps=1), Stopwatch(), ReplayStrategy()
    for name in [name for name in vars(ReplayMonitor) if name.startswith("on_")]:
        setattr(monitor, name, without_waiting(getattr(monitor, name)))
    trainer = Trainer(
        strategy=strategy,
        callbacks=[monitor, watch],
        accelerator="gpu",
        devices=1,
        max_steps=STEPS,
        logger=CSVLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )

    trainer.fit(MLPModule(), *cycled(feature_batches(), STEPS))

    report = strategy.report()
    (recording,) = report.recordings
    assert report.steps_replayed == STEPS - 4 - len(NATIVE)
    assert recording.replay_ms is not None
    assert recording.native_ms is not None
    assert report.estimated_seconds_saved is not None
    replayed = watch.starts[4:]
    longest = max(after - before for before, after in itertools.pairwise(replayed))
    assert 0 < recording.replay_ms <= 1000 * longest * 1.5
