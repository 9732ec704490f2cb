# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The two smaller examples."""

import pytest
import torch

from lightning_replay import Reason, ReplayStrategy
from tests.demo.examples import load_example


def test_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ReplayStrategy(backend="tape")
    load_example("first_steps").main(strategy)

    assert strategy.report().steps_replayed == 28
    assert "steps: 32 in all, 28 replayed (88%), 4 native" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device the steps are replayed")
def test_first_steps_without_cuda_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="no_cuda"):
        load_example("first_steps").main(ReplayStrategy())

    assert "steps: 32 in all, 0 replayed (0%), 32 native" in capsys.readouterr().out


def test_finding_out_why(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = load_example("finding_out_why").main()

    assert before.steps_replayed == 0
    assert Reason.HOST_SYNC in before.reasons
    assert set(after.reasons) == {Reason.WARM_UP, Reason.RECORDING}
    assert after.steps_replayed == after.steps_total - 4
    printed = capsys.readouterr().out
    assert "[host_sync]" in printed
    assert "finding_out_why.py:" in printed
