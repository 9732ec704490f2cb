# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Run training steps with recorded regions."""

from lightning_replay.runner.steps import Runner, StepAction

__all__ = ["Runner", "StepAction"]
