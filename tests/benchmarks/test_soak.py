# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The soak replays what it is there for, and tells growth and differences."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import render, soak


@pytest.mark.slow
def test_soak_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "soak.json"
    words = ["--device", "cpu", "--backend", "tape", "--steps", "150", "--epoch", "30"]
    monkeypatch.setattr(sys, "argv", ["soak", "--out", str(out), *words])
    # Of so few steps, warming six recordings up is a large part.
    monkeypatch.setattr(soak, "LEAST_REPLAYED", 0.8)

    assert soak.main() == 0

    written = json.loads(out.read_text())
    native, replay = written["summary"]
    assert (native["replayed"], replay["replayed"], replay["recordings"]) == (0, 150 - 6 * 4, 6)
    assert native["equal to native"] == replay["equal to native"] == "yes"
    assert native["validations"] == replay["validations"] > 10
    assert native["checkpoints"] == replay["checkpoints"] == 10
    assert "| replay | 150 | 126 | 6 |" in render.render(tmp_path)


def _run(arm: str, allocated: list[int], weights: str = "a", reserved: tuple[int, ...] = ()) -> dict[str, Any]:
    memory = [
        {
            "step": step,
            "recordings": min(step, 2),
            "kind": f"{step % 2}",
            "allocated_bytes": value,
            "reserved_bytes": reserved[step] if reserved else 100,
        }
        for step, value in enumerate(allocated)
    ]
    return {
        "arm": arm,
        "steps": 100,
        "actions": {"replay": 96} if arm == "replay" else {"None": 100},
        "validations": 3,
        "checkpoints": 2,
        "seconds": 1.0,
        "memory": memory,
        "weights_sha256": weights,
        "report": {"recordings": [{}]} if arm == "replay" else None,
    }


def _problems(*runs: dict[str, Any]) -> list[str]:
    return soak.problems(list(runs), soak.summarise(list(runs)))


def test_kinds_of_steps_may_differ_in_memory_but_not_grow() -> None:
    native = _run("native", [5, 5])

    assert soak.growth(native, 2) is None
    assert soak.settled(_run("replay", [1, 9, 50, 60])) == 2
    assert _problems(native, _run("replay", [1, 9, 50, 60, 50, 60])) == []
    assert _problems(native, _run("replay", [1, 9, 50, 60, 50, 61])) == ["replay: allocated grew by, bytes 1"]


def test_what_is_reserved_may_fall_and_rise_again_but_not_grow() -> None:
    native = _run("native", [5, 5])
    again, more = (100, 100, 140, 136, 138, 140), (100, 100, 140, 136, 138, 142)

    assert _problems(native, _run("replay", [5] * 6, reserved=again)) == []
    assert _problems(native, _run("replay", [5] * 6, reserved=more)) == ["replay: reserved grew by, bytes 2"]


def test_differences_and_failures_are_problems() -> None:
    native = _run("native", [5, 5])

    assert _problems(native, _run("replay", [], weights="b")) == ["replay: not equal to native"]
    few = {**_run("replay", []), "actions": {"replay": 94}}
    assert _problems(native, few) == ["replay: 94 of 100 steps were replayed"]
    assert _problems(native, {"arm": "replay", "error": "no"}) == ["replay: no", "native: not equal to native"]
