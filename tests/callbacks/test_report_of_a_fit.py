# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The report of a fit: which steps were replayed in part, and whose messages are whose."""

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_replay import Reason
from tests.parity.harness import STEPS, Learner, mlp, run_both, tape

pytestmark = pytest.mark.filterwarnings("ignore::lightning_replay.ReplayWarning")


class AsksBetween(nn.Module):
    """Two networks, and a number that the host asks for between them."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.second = mlp(dropout=0.0), nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.second(hidden * (hidden.abs().mean().item() if self.asks else 2.0))


class FrozenFirst(AsksBetween):
    """The first network in evaluation mode, called from the step."""

    def __init__(self) -> None:
        super().__init__(asks=False)
        self.first.requires_grad_(False).eval()


def call_both(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return nn.functional.cross_entropy(module.net.second(module.net.first(batch[0])), batch[1])


@pytest.mark.parametrize("case", ["whole", "split", "one native"])
def test_steps_replayed_in_part_are_told(case: str) -> None:
    def make() -> Learner:
        return Learner(FrozenFirst(), call_both) if case == "one native" else Learner(AsksBetween(case == "split"))

    _, replay = run_both(make, steps=STEPS + 8)

    assert replay.trace is not None, replay.error
    report = replay.trace.report
    assert report.steps_replayed > 5
    assert (
        report.steps_partial == report.as_dict()["steps_partial"] == (0 if case == "whole" else report.steps_replayed)
    )
    assert (f", {report.steps_partial} of them in part," in str(report)) is (case != "whole")
    if case == "split":
        assert report.reasons[Reason.HOST_SYNC] > report.steps_native  # once more for each step in part


def test_messages_of_clipping_are_apart() -> None:
    _, replay = run_both(lambda: Learner(mlp()), strategy=tape(), gradient_clip_val=1.0)

    assert replay.trace is not None, replay.error
    report = replay.trace.report
    assert report.norm_replays
    assert set(report.messages) == set(report.reasons) == set(report.norm_messages) == set(report.norm_native)
    assert set(report.messages) == {Reason.WARM_UP, Reason.RECORDING}
    assert all("where:    net\n" in message for message in report.messages.values())
    assert all("where:    Precision.clip_grad_by_norm\n" in message for message in report.norm_messages.values())
    assert set(report.as_dict()["norm_messages"]) == {"warm_up", "recording"}
