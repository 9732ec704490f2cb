# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""cuBLAS workspaces: no recording depends on memory that someone else can free."""

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.gpu.test_gradients_cuda import check
from tests.parity.harness import Learner, mlp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

WORKSPACE = 8 << 20
"""Bytes that every workspace has at least, and no tensor here."""

TAKEN = 4 << 20
"""Bytes of each block that is taken in the place of the workspaces."""


def pools_of_large_blocks() -> set[tuple[int, ...]]:
    """Returns the allocator's names of the pools that hold an allocated block of at least a workspace's size."""
    return {
        tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["size"] >= WORKSPACE
    }


class ClearsWorkspaces(Callback):
    """Clears all cuBLAS workspaces in the middle of a fit, as torch.compile does, and takes the memory for itself."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.kept: list[Tensor] = []
        self.pools: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step != self.step or self.kept:
            return
        if getattr(trainer.strategy, "last_action", None) == "replay":
            self.pools = pools_of_large_blocks()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        self.kept = [torch.full((TAKEN,), 90, dtype=torch.uint8, device="cuda") for _ in range(64)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clearing_them_harms_no_recording(precision: str) -> None:
    clearing: list[ClearsWorkspaces] = []

    def callbacks() -> list[Callback]:
        clearing.append(ClearsWorkspaces(6))
        return [clearing[-1]]

    check(lambda: Learner(mlp()), steps=12, precision=precision, callbacks=callbacks)

    assert [len(callback.kept) for callback in clearing] == [64, 64]
    assert all(bool((block == 90).all()) for callback in clearing for block in callback.kept)
    assert clearing[1].pools - {(0, 0)}, "no workspace lies in a graph pool"


class RunsGraph(Callback):
    """Has a graph of its own, warmed up on its stream, whose workspace therefore lies in ordinary memory."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.pools: set[tuple[int, ...]] = set()
        self.is_right: list[bool] = []

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        stream = torch.cuda.Stream()
        self.given = torch.rand(64, 4096, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.expected = torch.mm(self.given, self.given.t())
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.out = torch.mm(self.given, self.given.t())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step != self.step:
            return
        self.pools = pools_of_large_blocks()
        taken = [torch.full((TAKEN,), 90, dtype=torch.uint8, device="cuda") for _ in range(64)]
        self.out.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        self.is_right = [torch.equal(self.out, self.expected), all(bool((block == 90).all()) for block in taken)]


def test_those_of_another_graph_stay() -> None:
    """Lightning clears all workspaces before and after a fit; within it, nothing is taken from under a graph."""
    running: list[RunsGraph] = []

    def callbacks() -> list[Callback]:
        running.append(RunsGraph(10))
        return [running[-1]]

    check(lambda: Learner(mlp()), steps=12, callbacks=callbacks)

    assert [callback.is_right for callback in running] == [[True, True]] * 2
    assert (0, 0) in running[1].pools


class Looks(Callback):
    """Looks for workspaces while steps are replayed."""

    pools: set[tuple[int, ...]]

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 10:
            self.pools = pools_of_large_blocks()


def test_those_of_native_steps_are_given_back() -> None:
    gc.collect()  # another test's graph may still be there
    torch._C._cuda_clearCublasWorkspaces()
    before = pools_of_large_blocks()
    looking: list[Looks] = []

    def callbacks() -> list[Callback]:
        looking.append(Looks())
        return [looking[-1]]

    check(lambda: Learner(mlp()), steps=12, callbacks=callbacks)

    native, replay = (callback.pools - before for callback in looking)
    assert (0, 0) not in before
    assert native == {(0, 0)}
    assert len(replay) == 1
    assert (0, 0) not in replay
