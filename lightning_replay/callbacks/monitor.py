# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Watch what is replayed while training goes on."""

import contextlib
import sys
from collections.abc import Hashable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_replay.arguments import check_count
from lightning_replay.callbacks.clock import DeviceClock
from lightning_replay.errors import warn
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import WIDTH, ReplayReport
from lightning_replay.strategy import ReplayStrategy
from lightning_replay.timing import HostClock, StepTimes


class ReplayMonitor(Callback):
    """Prints when a fit ends what was replayed, with step times, and sends counts to the loggers on the way.

    Use it as `Trainer(strategy=ReplayStrategy(), callbacks=[ReplayMonitor()])`. The loggers get
    `replay/steps_replayed`, `replay/steps_native` and `replay/recordings`; they get them directly, so that what the
    LightningModule logs stays what it was. While a recording is made, the progress bar says so.

    Times are from one step's start to the next one's, on the device if it is a GPU; nothing waits for it. They go into
    `strategy.report()` when the fit ends, which an exception may do too. What was saved, and after how many steps that
    pays for a recording, is stated where native steps with batches of the same shapes ran unobserved. So the first
    steps of a fit are left to Lightning, and the others begin later by as many. With the tape nothing is saved.

    Args:
        log_every_n_steps: Optimizer steps between two entries in the loggers; None takes the Trainer's.
        native_steps: Training steps (batches) at the beginning of each fit that run natively, unobserved, to be timed.
            The first pays for first uses and does not count, and fewer than two others are too few. 0 leaves them out.

    Raises:
        ValueError: If an argument has a value that is not accepted.
        TypeError: If an argument has a type that is not accepted.
    """

    def __init__(self, log_every_n_steps: int | None = None, native_steps: int = 3) -> None:
        if log_every_n_steps is not None:
            check_count("log_every_n_steps", log_every_n_steps, owner="ReplayMonitor")
        check_count("native_steps", native_steps, owner="ReplayMonitor", least=0)
        self._log_every_n_steps = log_every_n_steps
        self._native_steps = native_steps
        self._times = StepTimes(())
        self._logged_step = 0
        self._has_to_show = False
        self._said_nothing_to_monitor = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (strategy := _watched(trainer)) is not None:
            device = strategy.root_device
            clock = DeviceClock(device) if device.type == "cuda" else HostClock()
            self._times = StepTimes(strategy.recordings, can_save=not strategy.uses_tape, clock=clock)
            self._has_to_show = True
            where, expected = f"ReplayMonitor(native_steps={self._native_steps})", "native steps to compare others with"
            strategy.stand_aside(self._native_steps, Finding(Reason.TIMED, where, expected, "the fit has just begun"))
        elif not self._said_nothing_to_monitor:
            self._said_nothing_to_monitor = True
            name = type(trainer.strategy).__name__
            warn(f"ReplayMonitor has nothing to monitor: the strategy is {name}, not ReplayStrategy.")

    # -- time ----------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (strategy := _watched(trainer)) is not None:
            action = "watched" if strategy.last_watched else strategy.last_action
            self._times.begin_step(_shape(batch), action, strategy.recordings)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._times.interrupt()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._times.interrupt()

    # -- on the way ----------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step  # a checkpoint has set it by now

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        strategy, bar = _watched(trainer), trainer.progress_bar_callback
        if strategy is not None and strategy.last_action == "record" and bar is not None:
            # Someone else's progress bar may do anything here, and must not end a training.
            with contextlib.suppress(Exception):
                bar.print(f"ReplayMonitor: step {trainer.global_step} is being recorded, which takes a moment.")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self._log_every_n_steps
        if every is None:
            every = trainer.log_every_n_steps  # type: ignore[attr-defined] # set by Lightning in another file
        if every and trainer.global_step >= self._logged_step + every:
            self._log_counts(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._logged_step:
            self._log_counts(trainer)

    def _log_counts(self, trainer: Trainer) -> None:
        self._logged_step = trainer.global_step
        if (strategy := _watched(trainer)) is None:
            return
        report = strategy.report()
        counts: dict[str, float] = {
            "replay/steps_replayed": report.steps_replayed,
            "replay/steps_native": report.steps_native,
            "replay/recordings": len(report.recordings),
        }
        for logger in trainer.loggers:
            logger.log_metrics(counts, step=trainer.global_step)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The exception that ended the fit is what has to be seen, whatever goes wrong here.
        with contextlib.suppress(Exception):
            self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        """Prints the report of a fit once: where something raises after its end, both hooks run."""
        if self._has_to_show and (strategy := _watched(trainer)) is not None:
            self._has_to_show = False
            self._times.write(strategy.recordings)
            self._times = StepTimes(())  # marks of a device cannot be copied, and callbacks are
            _show(strategy.report())


def _watched(trainer: Trainer) -> ReplayStrategy | None:
    return trainer.strategy if isinstance(trainer.strategy, ReplayStrategy) else None


def _shape(batch: Any) -> Hashable:
    """Returns what the steps of two batches have to share to be compared: the shapes of the tensors in them."""
    return tuple(leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def _show(report: ReplayReport) -> None:
    """Prints a report, in tables of rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(report)
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)  # rich takes files for narrow terminals
    for line in report.summary():
        console.print(Text(line))
    for plain in report.tables():
        table = Table()
        for name in plain.header:
            table.add_column(name, overflow="fold")
        for row in plain.rows:
            table.add_row(*map(Text, row))
        console.print(table)
