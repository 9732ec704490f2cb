# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Networks wrapped in or built from torch's own transformations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tests.parity.harness import CLASSES, FEATURES, Learner, check_replayed, mlp, run_both

pytestmark = pytest.mark.filterwarnings("ignore")


class Around(nn.Module):
    """Owns an MLP and lets a function run it."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.inner, self.run = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)), run

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self.inner, inputs)


def by_function(net: nn.Module, inputs: Tensor) -> Tensor:
    return functional_call(net, dict(net.named_parameters()), (inputs,))


def by_vmap(net: nn.Module, inputs: Tensor) -> Tensor:
    return vmap(net)(inputs)


def by_scan(net: nn.Module, inputs: Tensor) -> Tensor:
    return torch.stack([net(row) for row in inputs.unbind(0)])


def by_double(net: nn.Module, inputs: Tensor) -> Tensor:
    return F.linear(F.linear(inputs.double(), net[0].weight.double()), net[2].weight.double()).float()


@pytest.mark.parametrize("run", [by_function, by_vmap, by_scan, by_double])
def test_inside(run: Any) -> None:
    check_replayed(lambda: Learner(Around(run)))


def test_data_parallel_without_devices() -> None:
    check_replayed(lambda: Learner(nn.DataParallel(mlp())))


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool) -> None:
    def make() -> Learner:
        torch._dynamo.reset()
        net = mlp(0.0)
        if whole:
            return Learner(torch.compile(net, backend="eager"))
        net[0] = torch.compile(net[0], backend="eager")
        return Learner(net)

    run_both(make)
