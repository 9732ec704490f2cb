# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Effects on the host are noticed, and nobody else's are."""

import gc
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
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


@pytest.mark.parametrize("kind", [queue.SimpleQueue, type("Own", (queue.SimpleQueue,), {})])
def test_a_call_of_what_is_shared_with_others(kind: Callable[[], Any]) -> None:
    with EffectWatch(CPU) as watch:
        kind().qsize()

    assert watch.finding is not None
    assert (watch.finding.reason, watch.finding.actual) == (Reason.HOST_EFFECT, "qsize()")


def test_a_datagram() -> None:
    ends = socket.socketpair()
    with EffectWatch(CPU) as watch:
        ends[0].send(b"x")

    assert watch.finding is not None
    assert watch.finding.actual == "send()"
    for end in ends:
        end.close()


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
