# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Host costs are those of replayed steps. No time is asserted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import host_cost, render


def test_cost_is_that_of_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "host_cost.json"
    words = ["--modules", "10", "20", "--rounds", "2", "--repeats", "6", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["host_cost", "--out", str(out), *words])
    monkeypatch.setattr(host_cost, "SHARE_BAR", 1e9)
    monkeypatch.setattr(host_cost, "TENSOR_BAR", 1e9)

    assert host_cost.main() == 0

    written = json.loads(out.read_text())
    assert [(run["modules"], run["parameters"], run["buffers"]) for run in written["runs"]] == [
        (11, 20, 4),
        (21, 40, 8),
    ]
    assert all(len(run["guards_us"]) == len(run["step_us"]) == 12 for run in written["runs"])
    assert "| modules | parameters | buffers | native step, us | guards, us |" in render.render(tmp_path)


def test_a_tree_is_engaged_before_it_is_measured() -> None:
    tree = host_cost.Tree(10, host_cost.IdleBackend(torch.device("cpu")))
    tree.engage()
    tree.decide()
    (region,) = tree.runner.regions
    assert [engaged.stats.replays for engaged in region.engaged()] == [2]

    tree.net[0].register_buffer("new", torch.zeros(1))
    with pytest.raises(RuntimeError, match="decided Decision"):
        tree.decide()


def _row(**changes: Any) -> dict[str, Any]:
    return {"modules": 500, "guards to native step": 0.05, "guards, us a tensor": 0.4, **changes}


def test_bars() -> None:
    assert host_cost.problems([_row()]) == []
    assert host_cost.problems([_row(**{"guards to native step": 0.06})]) == [
        "500 modules: guards take 6.0% of the native step"
    ]
    assert host_cost.problems([_row(**{"guards, us a tensor": 0.5})]) == ["500 modules: guards take 0.5 us a tensor"]
