# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clocks inside a fit."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class StepClock(Callback):
    """Times windows of whole steps, from the end of one step to the end of a later one, each end fenced.

    A step is everything the Trainer does for it: fetching the batch, hooks, forward, backward, clipping, update. What
    lies between two epochs belongs to no window.

    Args:
        skip: steps before the first window (warm-up, recording, autotuning).
        window: steps a window; one fence a window is what the measurement costs.
    """

    def __init__(self, skip: int = 15, window: int = 20) -> None:
        self.skip, self.window = skip, window
        self.windows_ms: list[float] = []
        self.timed_actions: Counter[str] = Counter()
        self.losses: list[torch.Tensor] = []
        self.peaks: dict[str, int] = {}
        self._pending: list[str] = []
        self._started: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._started is not None:
            self._start(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        action = getattr(trainer.strategy, "last_action", None)
        self.tick(pl_module.device, outputs["loss"], str(getattr(action, "value", action)))

    def tick(self, device: torch.device, loss: torch.Tensor, action: str = "None") -> None:
        """Ends a step."""
        self.losses.append(loss)
        if self._started is None:
            if len(self.losses) >= self.skip:
                self._start(device)
            return
        self._pending.append(action)
        if len(self._pending) == self.window:
            fence(device)
            self.windows_ms.append((time.perf_counter() - self._started) * 1e3 / self.window)
            self.timed_actions.update(self._pending)
            self._start(device)

    def _start(self, device: torch.device) -> None:
        """Begins a window, and forgets one that has not ended."""
        self._pending.clear()
        fence(device)
        # Read last: what is done between two windows belongs to neither.
        self._started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end(pl_module.device)

    def end(self, device: torch.device) -> None:
        """Ends the fit, before what it holds is given back."""
        if device.type == "cuda":
            self.peaks = {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "reserved_at_end_bytes": torch.cuda.memory_reserved(),
            }


@dataclass
class HostTimes:
    """Milliseconds on the host, call by call.

    Attributes:
        clip: of ``configure_gradient_clipping``, the last that the optimizer's closure does.
        update: from there to the end of ``optimizer.step``: the update of the weights alone.
        clipped: when the last clipping ended.
    """

    clip: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    clipped: float = 0.0


def time_host(module: LightningModule) -> HostTimes:
    """Times the clipping and the update of a module on the host, whatever arm it is fitted in."""
    times = HostTimes()

    def updated(*_: Any) -> None:
        times.update.append((time.perf_counter() - times.clipped) * 1e3)

    class Timed(type(module)):  # type: ignore[misc]
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            super().configure_gradient_clipping(*args, **kwargs)
            times.clipped = time.perf_counter()
            times.clip.append((times.clipped - started) * 1e3)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(updated)
            return optimizer

    module.__class__ = Timed
    return times


def fence(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
