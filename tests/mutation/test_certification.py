# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A recording that gives other numbers is never used: the trial replay finds it."""

from typing import Any

import pytest

from lightning_replay import Reason
from lightning_replay.engine.recording import Recording
from tests.parity.harness import Learner, check_native, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_wrong_recording_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Recording.forward

    def wrong(self: Recording, inputs: Any) -> Any:
        return [output * 2 if output.is_floating_point() else output for output in right(self, inputs)]

    monkeypatch.setattr(Recording, "forward", wrong)

    trace = check_native(lambda: Learner(mlp()), Reason.MISMATCH)

    assert trace.report.steps_replayed == 0
