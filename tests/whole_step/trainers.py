# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The Trainer of these tests."""

from typing import Any

from lightning.pytorch import Trainer


def quiet_trainer(strategy: Any, **options: Any) -> Trainer:
    """Makes a Trainer on the CPU that shows and saves nothing."""
    fixed = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    fixed |= {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(strategy=strategy, **{**fixed, **options})
