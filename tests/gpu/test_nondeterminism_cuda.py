# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""An operation that torch declares nondeterministic: atomic additions of many points into a few cells."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import Reason, ReplayReport
from lightning_replay.certification import MAX_NATIVE_RUNS
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, STEPS, WARM_UP, Arm, Learner, batches

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

POINTS = 4096


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Linear(FEATURES, 2 * POINTS)
        self.cells = nn.Parameter(torch.linspace(-1, 1, 16 * CLASSES).view(1, CLASSES, 4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        grid = self.points(inputs).tanh().view(-1, POINTS, 1, 2)
        cells = self.cells.expand(grid.shape[0], -1, -1, -1)
        return F.grid_sample(cells, grid, align_corners=False).mean((2, 3))


class Undetermined(Learner):
    def on_fit_start(self) -> None:
        torch.use_deterministic_algorithms(False)


def fit(learner: type[Learner], **options: Any) -> ReplayReport:
    where = Field("cuda")
    arm = Arm(lambda: learner(Sampled()), batches(), where.strategy(**options), accelerator=where.accelerator)
    assert arm.error is None, arm.error
    assert arm.trace is not None
    return arm.trace.report


@pytest.mark.parametrize("learner", [Learner, Undetermined], ids=["warn", "off"])
def test_it_is_replayed_and_named(learner: type[Learner]) -> None:
    report = fit(learner)

    (recording,) = report.recordings
    assert report.steps_replayed == STEPS - WARM_UP - 1
    assert recording.native_runs <= MAX_NATIVE_RUNS
    if recording.certified != "bitwise":  # the additions may have come in the same order, once
        assert recording.certified == "nondeterministic"
        assert any("grid_sampler" in name for name in recording.nondeterministic)


def test_bitwise_says_what_differs() -> None:
    report = fit(Learner, certify="bitwise")

    assert report.steps_replayed == 0 or [recording.certified for recording in report.recordings] == ["bitwise"]
    if report.steps_replayed == 0:
        assert ".grad" in report.messages[Reason.MISMATCH]
        assert "at index" in report.messages[Reason.MISMATCH]
