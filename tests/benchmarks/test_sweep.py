# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a sweep of batch sizes makes of its measurements."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import render, sweep
from tests.benchmarks.receipt import ROOT, receipt, write
from tests.benchmarks.workloads import SIZES, SWEPT, WORKLOADS, sized


def _run(arm: str, ms: float, capture: float = 0.0, batch: int = 8) -> dict[str, Any]:
    report = {"recordings": [{"capture_seconds": capture}]} if capture else None
    return {"network": "tiny", "batch": batch, "arm": arm, "windows_ms": [ms, ms + 5.0, ms - 1.0], "report": report}


def test_gain_and_break_even() -> None:
    (row,) = sweep.summarise([_run("native", 10.0), _run("replay", 4.0, capture=1.2)])

    assert row == {
        "network": "tiny",
        "batch": 8,
        "native": 10.0,
        "replay": 4.0,
        "replay: gain": 2.5,
        "replay: break-even": 200,
    }
    assert sweep.problems([row]) == []


def test_slower_than_the_bar_is_a_problem_that_never_breaks_even() -> None:
    (row,) = sweep.summarise([_run("native", 98.0), _run("replay", 98.9, capture=1.0), _run("replay_step", 100.0, 1.0)])

    assert row["replay: gain"] == 0.9909
    assert row["replay_step: break-even"] == "never"
    assert sweep.problems([row]) == ["tiny, batch 8, replay_step: 0.98 of native's speed"]


def test_what_failed_has_no_figure(tmp_path: Path) -> None:
    failed = {"network": "tiny", "batch": 16, "arm": "replay", "error": "RuntimeError: no"}
    rows = sweep.summarise([_run("native", 10.0), _run("native", 20.0, batch=16), _run("replay", 5.0, 1.0), failed])
    write(tmp_path / "a.json", receipt("sweep", {"what": "What.", "workloads": {}}, {"runs": [], "summary": rows}))

    page = render.render(tmp_path)

    assert "| network | batch | native | replay | replay: gain | replay: break-even |" in page
    assert "| tiny | 8 | 10.0 | 5.0 | 2.0 | 200 |" in page
    assert "| tiny | 16 | 20.0 |  |  |  |" in page


@pytest.mark.parametrize("model", SWEPT)
def test_batches_have_the_size_that_they_are_named_for(model: str) -> None:
    for size in SIZES[:3]:
        assert {len(inputs) for inputs, _ in WORKLOADS[sized(model, size)].make_batches()} == {size}


@pytest.mark.slow
def test_sweep_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    words = "--device cpu --backend tape --models tiny --sizes 1 2 --arms native replay"
    command = [sys.executable, "-m", "tests.benchmarks.sweep", *words.split(), "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    # The tape is slower than native: the bar is missed, and nothing else is wrong.
    written = json.loads(out.read_text())
    assert [(run["batch"], run["arm"], run["timed_actions"]) for run in written["runs"]] == [
        (1, "native", {"None": 25}),
        (2, "native", {"None": 25}),
        (1, "replay", {"replay": 25}),
        (2, "replay", {"replay": 25}),
    ]
    assert written["runs"][0]["losses_sha256"] == written["runs"][2]["losses_sha256"]
    assert [line for line in done.stderr.splitlines() if line.startswith("tiny")] == sweep.problems(written["summary"])
    assert written["settings"]["workloads"]["tiny/2"] == "MLP, 6 hidden layers of 16, batch 2"
