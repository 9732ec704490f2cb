# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""K. Shapes: last batches, padding, many sizes, graphs."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, Learner, batches, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


def test_f37_a_new_length_each_batch(field: Field) -> None:
    data = [batch for size in range(2, 32) for batch in batches(size=size, count=1)]
    trace = field.both(lambda: Learner(mlp()), data, steps=30, max_epochs=4, strategy={"max_recordings": 3})

    assert len(trace.report.recordings) == 3
    assert trace.report.reasons[Reason.BUDGET] > 0
    assert list(trace.report.messages).count(Reason.BUDGET) == 1


def sizes(*counts: int, steps: int) -> Any:
    return lambda: loader([batch for n in counts for batch in batches(size=n, count=1)], steps)


def test_f38_eight_sizes_in_turn(field: Field) -> None:
    trace = field.both(lambda: Learner(mlp()), sizes(*range(2, 10), steps=40))

    assert len(trace.report.recordings) == 8
    assert trace.actions[-8:-1] == ["replay"] * 7


def test_f38_two_sizes_inside_one_window(field: Field) -> None:
    trace = field.both(lambda: Learner(mlp()), sizes(4, 6, steps=16), accumulate_grad_batches=2)

    assert len(trace.report.recordings) == 2
    assert trace.actions[-9:-1] == ["replay"] * 8


def test_f38_a_size_recorded_while_gradients_of_another_live(field: Field) -> None:
    """The recording of the second size must not write the gradients that the first has left."""
    order = [4] * 8 + [4, 6] * 8
    trace = field.both(lambda: Learner(mlp()), sizes(*order, steps=len(order)), accumulate_grad_batches=4)

    assert trace.actions.count("record") == 2


def test_f38_memory_of_eight_sizes(gpu_field: Field) -> None:
    class Wide(Learner):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)))

    def data() -> Any:
        return loader([b for n in range(8) for b in batches(256, size=512 + 64 * n, count=1)], 40)

    reserved = []
    for strategy in ("auto", gpu_field.strategy()):
        from tests.parity.harness import Arm

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        arm = Arm(Wide, data, strategy, accelerator="gpu")
        assert arm.error is None
        reserved.append(torch.cuda.max_memory_reserved())
    assert reserved[1] <= 4 * reserved[0]


class MessagePassing(nn.Module):
    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.selects = selects
        self.embed, self.message, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.embed(nodes)
        if self.selects:
            edges = edges[:, (edges[0] != edges[1]).nonzero().squeeze(1)]
        messages = self.message(hidden)[edges[0]]
        return self.head(hidden + torch.zeros_like(hidden).index_add_(0, edges[1], messages))


def graphs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in range(5, 13):
        edges = torch.randint(size, (2, 2 * size), generator=generator)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        made.append((torch.randn(size, FEATURES, generator=generator), edges, labels))
    return made


@pytest.mark.parametrize("selects", [False, True])
def test_f39_graphs_of_changing_size(field: Field, selects: bool) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        nodes, edges, labels = batch
        return F.cross_entropy(module.net(nodes, edges), labels)

    trace = field.both(
        lambda: Learner(MessagePassing(selects), step), graphs(), steps=16, max_epochs=2, strategy={"max_recordings": 2}
    )

    assert len(trace.report.recordings) <= 2
    if selects:
        assert Reason.HOST_SYNC in trace.report.reasons
        assert "net" not in {recording.region for recording in trace.report.recordings}
    else:
        assert Reason.BUDGET in trace.report.reasons
