# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""CUDA-graph replay for Lightning training, bit for bit the same training."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_replay.__about__ import __version__
from lightning_replay.callbacks import ReplayMonitor
from lightning_replay.errors import CaptureError, ContractError, NotReplayedError, ReplayWarning
from lightning_replay.precision import ReplayPrecision
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import ReplayReport
from lightning_replay.strategy import ReplayStrategy

__all__ = [
    "CaptureError",
    "ContractError",
    "Finding",
    "NotReplayedError",
    "Reason",
    "ReplayMonitor",
    "ReplayPrecision",
    "ReplayReport",
    "ReplayStrategy",
    "ReplayWarning",
    "__version__",
]

# A class path without arguments reaches the Trainer from LightningCLI as a string, which it lower-cases and looks up.
for _name in (ReplayStrategy.strategy_name, "replaystrategy", "lightning_replay.replaystrategy"):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name, ReplayStrategy, description="Replays training steps as CUDA graphs on a single device"
        )
