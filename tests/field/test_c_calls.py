# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""C. One network called several times a step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.field.conftest import Field
from tests.parity.harness import Learner, batches, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


def contrast(first: Tensor, second: Tensor) -> Tensor:
    rows = min(len(first), len(second))
    similarity = F.normalize(first[:rows]) @ F.normalize(second[:rows]).T
    return F.cross_entropy(similarity / 0.1, torch.arange(rows, device=first.device))


@pytest.mark.parametrize("rows", [5, 3], ids=["equal", "unequal"])
def test_f07_siamese(field: Field, rows: int) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        first = module.net(batch[0])
        return contrast(first, module.net(batch[0][:rows] * 0.9))

    field.replayed(lambda: Learner(mlp(), step))


def test_f08_four_calls_before_one_backward(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for inputs, labels in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            losses.append(F.cross_entropy(module.net(inputs), labels))
        return torch.stack(losses).sum()

    trace = field.replayed(lambda: Learner(mlp(), step), batches(size=8))

    assert len(trace.report.recordings) == 4


def test_f09_a_call_without_gradients_before_the_one_that_trains(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = module.net(batch[0] * 0.9)
        assert target.grad_fn is None
        assert not target.requires_grad
        return F.kl_div(module.net(batch[0]).log_softmax(1), target.softmax(1), reduction="batchmean")

    trace = field.replayed(lambda: Learner(mlp(), step))

    assert len(trace.report.recordings) == 1
