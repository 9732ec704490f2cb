# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The clock of a device, with a device that is played; tests/gpu has a real one."""

from typing import Any

import pytest
import torch

from lightning_replay.callbacks.clock import DeviceClock


class Played:
    """A device that comes to what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.done = 0

    def event(self, enable_timing: bool) -> "Mark":
        assert enable_timing
        return Mark(self)


class Mark:
    """An event of the device: number n is at n milliseconds."""

    def __init__(self, device: Played) -> None:
        self._device = device

    def record(self, stream: str) -> None:
        assert stream == "the stream of cuda:1"
        self._device.given.append(self)

    def query(self) -> bool:
        return self._device.given.index(self) < self._device.done

    def elapsed_time(self, end: "Mark") -> float:
        assert self.query()
        assert end.query()
        return float(self._device.given.index(end) - self._device.given.index(self))


def test_times_are_told_once_the_device_has_come_to_both_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Played()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = DeviceClock(torch.device("cuda", 1))

    start, _, end = (clock.mark() for _ in range(3))

    told = []
    for device.done in range(4):
        told.append(clock.between(start, end))
    assert told == [None, None, None, 0.002]
