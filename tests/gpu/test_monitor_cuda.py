# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""ReplayMonitor beside CUDA graphs: it never waits for the device, and its times are those of the steps."""

import copy
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_replay import Reason, ReplayMonitor, ReplayStrategy
from tests.helpers.models import MLPModule, cycled, feature_batches

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

STEPS = 60
NATIVE = 3
FIRST_REPLAY = NATIVE + 4
CYCLES = 40_000_000
"""Of the device's clock, for which it sleeps after each batch: far longer than the host takes for a step."""


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
    """Notes when the host begins each step, and gives the device something to do after it.

    Args:
        cycles: For how long the device sleeps after each batch.
    """

    def __init__(self, cycles: int = 0) -> None:
        self.starts: list[float] = []
        self._cycles = cycles

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)

    def milliseconds(self) -> list[float]:
        """Returns how long the host took for each step in which something was replayed, but the last."""
        return [1000 * (end - start) for start, end in itertools.pairwise(self.starts[FIRST_REPLAY:])]


def fit(strategy: ReplayStrategy, callbacks: list[Callback], logger: Any = False) -> None:
    """Trains a network for which the host takes far longer than the device."""
    trainer = Trainer(
        strategy=strategy,
        callbacks=callbacks,
        accelerator="gpu",
        devices=1,
        max_steps=STEPS,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(MLPModule(), *cycled(feature_batches(), STEPS, "cuda"))


@pytest.mark.parametrize("scope", ["network", "step"])
def test_a_default_fit_states_what_was_saved_and_never_waits(
    scope: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor, watch, strategy = ReplayMonitor(log_every_n_steps=1), Stopwatch(), ReplayStrategy(scope=scope)
    for name in [name for name in vars(ReplayMonitor) if name.startswith("on_")]:
        setattr(monitor, name, without_waiting(getattr(monitor, name)))

    fit(strategy, [monitor, watch], CSVLogger(tmp_path))

    report = strategy.report()
    (recording,) = report.recordings
    assert report.reasons == {Reason.TIMED: NATIVE, Reason.WARM_UP: 3, Reason.RECORDING: 1}
    assert report.steps_replayed == recording.replays == STEPS - FIRST_REPLAY
    assert recording.replay_ms is not None
    assert recording.native_ms is not None
    assert 0 < recording.replay_ms <= 1.5 * max(watch.milliseconds())
    assert recording.replay_ms < recording.native_ms
    saved = (recording.native_ms - recording.replay_ms) / 1000
    assert recording.seconds_saved == report.estimated_seconds_saved == pytest.approx(saved * recording.replays)
    assert recording.break_even_step == report.break_even_step == math.ceil(recording.capture_seconds / saved)
    printed = capsys.readouterr().out
    assert f"repaid by {report.break_even_step} replayed steps" in printed
    assert "unknown" not in printed


def test_times_are_the_devices_where_the_host_runs_ahead() -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for event in events:
        event.record()
        torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    # An idle device has a slower clock.
    sleep = min(start.elapsed_time(end) for start, end in itertools.pairwise(events))
    watch, strategy = Stopwatch(CYCLES), ReplayStrategy()

    fit(strategy, [ReplayMonitor(), watch])

    (recording,) = strategy.report().recordings
    assert recording.native_ms is not None
    assert recording.replay_ms is not None
    assert statistics.median(watch.milliseconds()[:10]) < sleep / 2  # later the queue of the device may be full
    assert recording.native_ms > 0.8 * sleep
    assert recording.replay_ms > 0.8 * sleep


def test_a_monitor_is_copied_after_a_fit() -> None:
    monitor = ReplayMonitor()
    fit(ReplayStrategy(), [monitor])
    strategy = ReplayStrategy()

    fit(strategy, [copy.deepcopy(monitor)])

    assert strategy.report().recordings[0].replay_ms is not None
