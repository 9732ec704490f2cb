# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clocks around the parts of a step: what each costs the host, without what lies inside of another part."""

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lightning.pytorch import Callback

from lightning_replay import ReplayStrategy
from lightning_replay.dispatch import Dispatcher
from lightning_replay.engine.recording import Recording
from lightning_replay.norm import NormClipper
from lightning_replay.runner.backward import BackwardPass
from lightning_replay.whole_step import LogCall

ALL = "all"
CLIP = "clipping: guards, launch"
PARTS: dict[str, tuple[Any, str]] = {
    "training_step: guards and arguments": (Dispatcher, "decide"),
    "training_step: copies in, launch, copies out": (Recording, "forward"),
    "training_step: self.log, through Lightning": (LogCall, "again"),
    "training_step: the rest": (ReplayStrategy, "training_step"),
    "backward: copy in, launch": (Recording, "backward"),
    "backward: gradients handed over": (BackwardPass, "_settle"),
    "backward: autograd, and the rest": (ReplayStrategy, "backward"),
    CLIP: (NormClipper, "clip"),
}


class Spans(Callback):
    """Takes the host's time for each part of a step. Lightning's own functions are not touched: they are inspected.

    Attributes:
        steps: For each step that was timed, the seconds of each part, and of all.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._inside = [0.0]
        self._ended: float | None = None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Surrounds a fit."""
        with contextlib.ExitStack() as stack:
            for part, (owner, name) in PARTS.items():
                stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                self._now[part] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        return timed

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        if self._ended is not None:
            self.steps.append({**self._now, ALL: now - self._ended})
        self._now.clear()
        self._ended = now

    def medians_us(self, skip: int) -> dict[str, float]:
        """Returns the median of each part in microseconds, the first steps left out."""
        steps = self.steps[skip:]
        return {part: statistics.median(step.get(part, 0.0) for step in steps) * 1e6 for part in (*PARTS, ALL)}
