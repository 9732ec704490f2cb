# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clocks inside a fit."""

import time
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class StepClock(Callback):
    """Times windows of whole steps, from the end of one step to the end of a later one, each end fenced.

    A step is everything the Trainer does for it: fetching the batch, hooks, forward, backward, clipping, update.

    Args:
        skip: steps before the first window (warm-up, recording, autotuning).
        window: steps a window; one fence a window is what the measurement costs.
    """

    def __init__(self, skip: int = 15, window: int = 20) -> None:
        self.skip, self.window = skip, window
        self.windows_ms: list[float] = []
        self.actions: list[str | None] = []
        self.losses: list[torch.Tensor] = []
        self.peaks: dict[str, int] = {}
        self._started = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        action = getattr(trainer.strategy, "last_action", None)
        self.actions.append(None if action is None else str(getattr(action, "value", action)))
        self.losses.append(outputs["loss"])
        steps = len(self.actions) - self.skip
        if steps < 0 or steps % self.window:
            return
        fence(pl_module.device)
        now = time.perf_counter()
        if steps:
            self.windows_ms.append((now - self._started) * 1e3 / self.window)
        # Read again: what this hook does between two windows belongs to neither.
        self._started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            self.peaks = {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "reserved_at_end_bytes": torch.cuda.memory_reserved(),
            }

    @property
    def timed_actions(self) -> dict[str, int]:
        """How often each action ran inside the windows."""
        timed = self.actions[self.skip : self.skip + self.window * len(self.windows_ms)]
        return dict(Counter(str(action) for action in timed))


def time_clipping(module: LightningModule) -> list[float]:
    """Times the clipping of a module on the host, call by call.

    Returns:
        The list that milliseconds are added to.
    """
    times: list[float] = []

    class Timed(type(module)):  # type: ignore[misc]
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            super().configure_gradient_clipping(*args, **kwargs)
            times.append((time.perf_counter() - started) * 1e3)

    module.__class__ = Timed
    return times


def fence(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
