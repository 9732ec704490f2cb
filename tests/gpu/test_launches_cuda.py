# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Kernels that are launched without torch, with and without a question whether a capture is under way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_replay.engine.cuda import CudaGraphBackend
from tests.parity import harness
from tests.parity.harness import FEATURES, WARM_UP, Learner, check_replayed, mlp, script

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of triton need a CUDA device"),
]


@triton.jit
def _triple(source, target, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside) * 3.0, mask=inside)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        result = torch.empty_like(inputs)
        _triple[(1,)](inputs, result, inputs.numel(), BLOCK=64)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3.0


class Launches(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(FEATURES, FEATURES), mlp()
        self.asks = asks

    def forward(self, inputs: Tensor) -> Tensor:
        if self.asks:
            torch.cuda.is_current_stream_capturing()
        return self.net(Triple.apply(self.first(inputs)))


@pytest.mark.parametrize("asks", [False, True])
def test_kernels_launched_without_torch_are_replayed(asks: bool) -> None:
    strategy = harness.ReplayStrategy(backend="cuda", warmup_steps=WARM_UP, on_native="ignore")
    trace = check_replayed(
        lambda: Learner(Launches(asks)), actions=script(8), strategy=strategy, accelerator="gpu", steps=8
    )

    assert len(trace.report.recordings) == 1


def test_what_a_capture_left_does_not_pass_for_a_result() -> None:
    backend = CudaGraphBackend(torch.device("cuda", 0))
    pool = backend.new_pool()
    (kept,) = backend.allocate(pool, lambda: [torch.empty(1 << 20, device="cuda")])
    _, left = backend.capture(pool, lambda: torch.ones(1 << 20, device="cuda"))
    kept.fill_(1.0)
    left.fill_(2.0)

    backend.clear(pool)

    assert kept.eq(1.0).all()
    assert left.eq(0.0).all()
    backend.close()
