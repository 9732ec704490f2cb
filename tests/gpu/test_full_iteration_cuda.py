# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The limit that step times are held against is a training of its own, not only a fast one."""

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from tests.benchmarks.clock import StepClock
from tests.benchmarks.full_iteration import WARMUP, Iteration, train
from tests.helpers.bits import same_bits
from tests.helpers.models import Classifier, feature_batches

STEPS = 12


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_replayed_iterations_train_as_eager_ones(fused: bool, clip: float) -> None:
    batches = [tuple(tensor.cuda() for tensor in batch) for batch in feature_batches(8, 16)]
    feed = [batches[step % len(batches)] for step in range(STEPS)]

    def made() -> Classifier:
        seed_everything(3, verbose=False)
        net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 10))
        return Classifier(net, fused=fused)

    eager = made().cuda()
    iteration = Iteration(eager, "bf16-mixed", clip)
    expected = [iteration(batch).detach().clone() for batch in feed]
    replayed, clock = made(), StepClock(skip=WARMUP, window=3)
    train(replayed, feed, "bf16-mixed", clip, clock)

    assert len(clock.windows_ms) == (STEPS - WARMUP) // 3
    assert same_bits(torch.stack(clock.losses), torch.stack(expected))
    for name, tensor in eager.state_dict().items():
        assert same_bits(replayed.state_dict()[name], tensor), name
