# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Effects on the host are noticed, and nobody else's are."""

import gc
import time
from typing import Any

import torch

from lightning_replay import Reason
from lightning_replay.effects import EffectWatch

CPU = torch.device("cpu")


def test_a_look_at_the_clock() -> None:
    with EffectWatch(CPU) as watch:
        time.perf_counter()

    assert watch.finding is not None
    assert watch.finding.reason is Reason.HOST_EFFECT
    assert "test_effects.py" in watch.finding.where


def test_a_collection_in_the_middle_is_not_the_regions() -> None:
    seen = []

    def callback(phase: str, info: dict[str, Any]) -> None:
        seen.append(time.perf_counter())

    gc.callbacks.append(callback)
    try:
        with EffectWatch(CPU) as watch:
            gc.collect()
    finally:
        gc.callbacks.remove(callback)

    assert seen
    assert watch.finding is None
