# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Guards that the events of the state machine cannot tell from their absence on a CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.harness import FEATURES, Learner, batches, check_replayed, mlp, run_both, script

pytestmark = pytest.mark.filterwarnings("ignore")


def test_another_alignment_is_another_signature() -> None:
    """A kernel may read an aligned argument in wider words: other code, and on a GPU another order of sums."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0]
        if batch_idx >= 6:
            moved = torch.zeros(inputs.numel() + 1)
            moved[1:] = inputs.flatten()
            inputs = moved[1:].view(inputs.shape)
        return F.cross_entropy(module.net(inputs), batch[1])

    check_replayed(lambda: Learner(mlp(), step), actions=[*script(6), *script(6)], steps=12)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.net(first + second * 0.5)


def test_arguments_that_share_memory_are_another_signature() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        other = batch[0] if batch_idx >= 6 else batch[0].clone()
        return F.cross_entropy(module.net(batch[0], other), batch[1])

    check_replayed(lambda: Learner(Pair(), step), actions=[*script(6), *script(6)], steps=12)


def test_a_parameter_of_the_networks_own_as_argument() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(FEATURES))
            self.net = mlp()

        def forward(self, inputs: Tensor, scale: Tensor) -> Tensor:
            return self.net(inputs * scale * self.scale)

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net(batch[0], module.net.scale), batch[1])

    run_both(lambda: Learner(Scaled(), step), steps=8)


def test_a_result_differentiated_one_step_later() -> None:
    """Its recording must not be replayed meanwhile: the activations that its backward needs would be gone."""

    class Delayed(Learner):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.waiting: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if batch_idx >= 4 and batch_idx % 2 == 0:
                self.waiting.append(loss)
                return None
            return loss + self.waiting.pop() if self.waiting else loss

    _, replay = run_both(Delayed, batches(count=5), steps=10)

    assert replay.trace is not None
    assert "replay" in replay.trace.actions
