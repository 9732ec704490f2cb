# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""L. Hooks and other observers of the network."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.parity.harness import STEPS, Learner, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


class Distilled(Learner):
    """Reads an inner activation through a hook, and trains on it."""

    def __init__(self, late: bool = False) -> None:
        super().__init__(mlp())
        self.acts: dict[str, Tensor] = {}
        self.late = late
        if not late:
            self.observe()

    def observe(self) -> None:
        self.net[2].register_forward_hook(lambda module, inputs, output: self.acts.__setitem__("hidden", output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.late and batch_idx == 5:
            self.observe()
        self.acts.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + self.acts["hidden"].square().mean() if self.acts else loss


def test_f40_an_inner_activation_read_by_a_hook(field: Field) -> None:
    trace = field.native(Distilled, Reason.HOOKS)

    assert trace.report.reasons[Reason.HOOKS] == STEPS
    assert trace.report.steps_replayed == 0


def test_f40_a_hook_that_comes_later(field: Field) -> None:
    trace = field.both(lambda: Distilled(late=True), steps=8)

    assert trace.actions == ["native", "native", "record", "replay", "replay", "native", "native", "native"]
    assert trace.report.reasons[Reason.HOOKS] == 3
