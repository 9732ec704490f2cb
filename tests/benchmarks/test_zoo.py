# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The zoo runs, counts what did not run as such, and never calls a difference equal."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.benchmarks import render, zoo, zoo_worker
from tests.benchmarks.receipt import receipt, write
from tests.benchmarks.zoo_models import ZOO, Model, classify, features
from tests.helpers.trace import TraceResult

WRITTEN = [name for name, model in ZOO.items() if model.package is None]


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "zoo.json"
    monkeypatch.setattr(
        sys, "argv", ["zoo", "--out", str(out), "--device", "cpu", "--backend", "tape", "--pixels", "16", *words]
    )
    return zoo.main(), json.loads(out.read_text())


@pytest.mark.slow
def test_a_model_is_replayed_and_equal_in_both_precisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, written = _run(tmp_path, monkeypatch, "--models", "siamese")

    assert code == 0
    assert written["complete"]
    assert [row["precision"] for row in written["rows"]] == ["bf16-mixed", "32-true"]
    for row in written["rows"]:
        assert (row["replayed"], row["regions"]) == ("whole network", ["net"])
        for arm, repeats in (("deterministic", None), ("free", True)):
            assert (row[arm]["verdict"], row[arm]["native_repeats_itself"]) == ("equal", repeats)
            assert row[arm]["steps_replayed"] == 16
    page = render.zoo(written)
    assert "Of 2 that ran, 100% replay some region and 100% their whole network." in page
    assert "| siamese | 32-true | whole network | 16 of 20 |  | equal | equal |" in page


def _judge(monkeypatch: pytest.MonkeyPatch, model: Model) -> dict[str, Any]:
    monkeypatch.setitem(ZOO, "lora", model)
    options = ["zoo_worker", "--model", "lora", "--device", "cpu", "--backend", "tape", "--out", "unused"]
    monkeypatch.setattr(sys, "argv", options)
    return zoo_worker._attempt(zoo_worker._parser().parse_args(), "32-true")


def test_a_missing_package_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _judge(monkeypatch, Model("no_such_package", lambda _: nn.Identity(), features, classify))

    assert row == {"not_run": "no_such_package is not installed"}


def test_an_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _judge(monkeypatch, Model(None, lambda _: nn.Linear(3, 3), features, classify))

    assert row["error"].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_process_that_ends_costs_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.sys, "executable", "/bin/false")
    code, written = _run(tmp_path, monkeypatch, "--models", "siamese", "lora", "--jobs", "2", "--precision", "32-true")

    assert code == 0  # nothing is wrong with what ran
    assert [(row["model"], row["error"]) for row in written["rows"]] == [
        ("siamese", "the process ended with 1"),
        ("lora", "the process ended with 1"),
    ]
    assert written["summary"]["failed"] == ["siamese, 32-true", "lora, 32-true"]
    assert written["summary"]["replay_some_region"] is None


class _Report:
    def __init__(self, certified: str) -> None:
        self._recordings = [{"region": "net", "replays": 3, "certified": certified}]

    def as_dict(self) -> dict[str, Any]:
        return {"recordings": self._recordings}


def _watch(weight: float, certified: str = "bitwise") -> zoo_worker.Watch:
    watch = zoo_worker.Watch(torch.device("cpu"))
    watch.result = TraceResult(parameters={"w": torch.tensor(weight)}, report=_Report(certified))
    return watch


@pytest.mark.parametrize(
    ("replay", "control", "verdict"),
    [
        (_watch(0.0), 0.0, "equal"),
        (_watch(-0.0), 0.0, "different"),
        (_watch(-0.0), 1.0, "native differs from itself"),
        (_watch(-0.0, "nondeterministic"), 0.0, "reported as exact up to native nondeterminism"),
    ],
)
def test_verdicts(replay: zoo_worker.Watch, control: float, verdict: str) -> None:
    judged = zoo_worker._compared(_watch(0.0), replay, _watch(control))

    assert judged["verdict"] == verdict
    assert judged["native_repeats_itself"] == (control == 0.0)


def _row(model: str, replayed: str, verdict: str = "equal") -> dict[str, Any]:
    arm = {"verdict": verdict, "steps": 20, "steps_replayed": 16}
    return {
        "model": model,
        "precision": "32-true",
        "replayed": replayed,
        "regions": [f"net.{index}" for index in range(5)],
        "reasons_needing_cure": {"host_sync": 17},
        "deterministic": {**arm, "mode": "warn"},
        "free": arm,
        "speed_up": 2.0,
    }


def test_shares_are_of_what_ran(tmp_path: Path) -> None:
    rows = [_row("a", "whole network"), _row("b", "some regions", "different"), _row("c", "nothing")]
    rows += [{"model": "d", "precision": "32-true", "not_run": "x is not installed"}]
    rows += [{"model": "e", "precision": "32-true", "error": "RuntimeError: no"}]
    summary = zoo.summarise(rows)

    assert (summary["asked"], summary["ran"]) == (5, 3)
    assert (summary["replay_some_region"], summary["replay_whole_network"]) == (2 / 3, 1 / 3)
    assert (summary["not_run"], summary["failed"], summary["wrong"]) == (
        ["d, 32-true"],
        ["e, 32-true"],
        ["b, 32-true"],
    )
    settings = {"steps": 20, "timed_steps": 10, "jobs": 8}
    write(tmp_path / "a.json", receipt("zoo", settings, {"complete": True, "rows": rows, "summary": summary}))
    page = render.render(tmp_path)
    assert "Of 3 that ran, 67% replay some region and 33% their whole network." in page
    assert "| some regions: `net.0`, `net.1`, `net.2`, 2 more | 16 of 20 | `host_sync` 17 | different (warn) |" in page
    assert "- d, 32-true: x is not installed\n- e, 32-true: RuntimeError: no" in page


@pytest.mark.parametrize("name", WRITTEN)
def test_hand_written_models_train(name: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name]
    module = model.module(16)
    loss = module.training_step(model.batches(16)[0], 0)
    loss.backward()

    assert loss.isfinite()
    assert any(parameter.grad is not None for parameter in module.net.parameters())
