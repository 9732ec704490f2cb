# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The pace of a CUDA device, told without waiting for it."""

import torch


class DeviceClock:
    """Times by a CUDA device: a moment is when the device comes to where the host has marked it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Returns the present moment."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Returns the seconds between two moments; None before the device has come to both."""
        return start.elapsed_time(end) / 1000 if start.query() and end.query() else None
