# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The demo as a newcomer runs it: in a process of its own."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.demo.examples import EXAMPLES, load_example

# 1,437 training images give 22 batches of 64 and a smaller one an epoch.
STEPS = 23


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, str(EXAMPLES / "digits_demo.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def rows(output: str) -> dict[str, str]:
    """Reads the demo's table: the first column and what stands beside it."""
    lines = [line.strip("│ \n") for line in output.splitlines()]
    cells = [re.split(r"\s*│\s*|\s{2,}", line, maxsplit=1) for line in lines]
    return {cell[0]: cell[1].strip() for cell in cells if len(cell) == 2}


def test_replayed_and_equal_as_bits() -> None:
    done = run_demo("--epochs", "1", "--backend", "tape")

    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(done.stdout)
    assert table["losses"] == f"all {STEPS} equal as bits"
    assert table["weights"] == "all 10 equal as bits"
    assert table["buffers"] == "all 6 equal as bits"
    assert re.fullmatch(r"all \d+ equal as bits", table["optimizer state"])
    assert table["steps replayed"] == f"{STEPS - 5} of {STEPS}"
    assert table["steps native"] == "5"
    assert "3 x warm_up: " in done.stdout
    assert "1 x recording: " in done.stdout
    assert "1 x last_batch: " in done.stdout
    for arm in ("native", "replay"):
        assert re.fullmatch(rf"\d+\.\d\d \(median of {STEPS - 8} steps\)", table[f"ms a step, {arm}"])
    assert "slower than native" in done.stdout
    assert "Epoch 0" in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    assert len(done.stdout.splitlines()) < 60


def test_it_fails_with_replay_off() -> None:
    done = run_demo("--epochs", "1", "--backend", "native")

    assert done.returncode == 1, done.stdout + done.stderr
    table = rows(done.stdout)
    assert table["losses"] == f"all {STEPS} equal as bits"
    assert table["steps replayed"] == f"0 of {STEPS}"
    assert f"{STEPS} x no_cuda: " in done.stdout
    assert "FAILED: nothing was replayed." in done.stdout


def test_the_table_needs_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    load_example("digits_demo").show("Title", [("losses", "all equal"), ("steps native", "1\nwarm_up")])

    assert capsys.readouterr().out == "\nTitle\n\nlosses        all equal\nsteps native  1\n              warm_up\n"


def test_it_compares_bits() -> None:
    same_bits = load_example("digits_demo").same_bits
    nan, zeros = torch.tensor([float("nan")]), torch.zeros(2)

    assert same_bits(zeros, zeros.clone())
    assert same_bits(nan, nan.clone())
    assert not same_bits(zeros, -zeros)
    assert not same_bits(zeros, zeros.double())
    assert not same_bits(zeros, zeros[:1])
    assert not same_bits(zeros, None)


def test_it_counts_what_differs() -> None:
    demo = load_example("digits_demo")
    native: dict[str, Any] = {"a": torch.zeros(2), "b": 1, "c": None}

    assert demo.count_unequal(native, dict(native)) == 0
    assert demo.count_unequal(native, {"a": -torch.zeros(2), "b": 2}) == 3
