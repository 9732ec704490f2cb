# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Callbacks, one a file."""

from lightning_replay.callbacks.monitor import ReplayMonitor

__all__ = ["ReplayMonitor"]
