# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Watch the backward pass of one run of a region for what Python does there: a replay would not do it."""

import torch

from lightning_replay.effects import EffectWatch
from lightning_replay.engine.snapshot import HostRandom
from lightning_replay.reasons import Finding, Reason


class BackwardWatch:
    """Watches from `begin` to the end of a block: functions with a backward of their own may do anything in it.

    Args:
        name: Dotted path of the region.
        device: The device of the recordings.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._effects = EffectWatch(device)
        self._before: HostRandom | None = None
        self.finding: Finding | None = None

    def begin(self) -> None:
        """Begins to watch: the forward pass is over."""
        self._before = HostRandom(self._device)
        self._effects.__enter__()

    def __enter__(self) -> "BackwardWatch":
        return self

    def __exit__(self, *error: object) -> None:
        self._effects.__exit__(*error)
        found = self._effects.finding
        # Activation checkpointing sets generators there, which is no harm where nothing is drawn: see the inspection.
        self.finding = None if found is not None and found.reason is Reason.HOST_RANDOM else found
        if self._before is None or (drawn := HostRandom(self._device).moved_since(self._before)) is None:
            return
        where = self._effects.random_line or f"the backward pass of {self._name}"
        self.finding = Finding(Reason.HOST_RANDOM, where, f"random numbers drawn on {self._device}", drawn)
