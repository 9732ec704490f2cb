# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One command measures, renders and draws; it reaches every benchmark, and the documentation names them."""

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import plots, render
from tests.benchmarks.receipt import ROOT, receipt, write
from tests.benchmarks.step_time import summarise

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Receipts that tests write.
OTHERS = {"parity", "statemachine", "mutation"}


class Published:
    """A folder of evidence and a README of their own, and what was run in place of processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evidence, self.readme = folder / "evidence", folder / "page.md"
        self.evidence.mkdir()
        self.explained = folder / "explained.md"
        for page in (self.readme, self.explained):
            page.write_text(f"{render.BEGIN}{render.END}", encoding="utf-8")
        self.commands: list[list[str]] = []
        self.fails = ""
        rendered, drawings, publish = render.rendered, plots.drawings, plots.publish
        monkeypatch.setattr(render, "EVIDENCE", self.evidence)
        monkeypatch.setattr(render, "rendered", lambda: rendered(self.evidence, self.readme, self.explained))
        monkeypatch.setattr(plots, "drawings", lambda: drawings(self.evidence))
        monkeypatch.setattr(plots, "publish", lambda _, due: publish(self.evidence, due))
        monkeypatch.setattr(benchmarks, "subprocess", SimpleNamespace(run=self._run))

    def _run(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command[2:])
        if "--out" in command and "step_time" in command[2]:
            windows = {"native": [10.0], "replay": [2.5]}
            runs = [
                {"arm": arm, "repeat": 0, "model": "tiny", "windows_ms": ms, "timed_actions": {}}
                for arm, ms in windows.items()
            ]
            settings: dict[str, Any] = {"precision": "bf16-mixed", "optimizer": "AdamW", "clip": 1.0, "repeats": 1}
            settings |= {"steps": 55, "window": 20, "skip": 15, "workloads": {"tiny": "a tiny MLP"}}
            content = receipt("step_time", settings, {"complete": True, "runs": runs, "summary": summarise(runs)})
            content["device"] |= {"gpu": "A GPU", "driver": "1.0"}
            write(command[command.index("--out") + 1], content)
        return SimpleNamespace(returncode=int(command[2].endswith(f".{self.fails}")))

    def files(self) -> set[str]:
        return {path.name for path in self.evidence.iterdir()}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(tmp_path, monkeypatch)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(benchmarks, "torch", SimpleNamespace(cuda=there))  # torch itself would look for the device


@pytest.mark.usefixtures("with_gpu")
def test_the_command_measures_renders_and_draws(published: Published) -> None:
    assert benchmarks.main([]) == 0

    out = str(published.evidence / "step_time.json")
    assert published.commands == [["tests.benchmarks.step_time", "--out", out]]
    assert published.files() == {"step_time.json", "README.md", "waterfall.svg", plots.PAGE}
    assert "| a tiny MLP | 10.000 | 2.500 (4.0) |" in published.readme.read_text(encoding="utf-8")
    assert plots.out_of_date(published.evidence, plots.drawings()) == []


@pytest.mark.usefixtures("with_gpu")
def test_all_of_them_run_and_a_failure_is_told(published: Published) -> None:
    published.fails = "sweep"

    assert benchmarks.main(["all"]) == 1

    assert [command[0] for command in published.commands] == [f"tests.benchmarks.{n}" for n in benchmarks.BENCHMARKS]
    assert "waterfall.svg" in published.files()


@pytest.mark.parametrize("options", [["--device", "cpu", "--out", "trial.json"], ["--help"]])
def test_a_trial_is_not_published(published: Published, options: list[str]) -> None:
    assert benchmarks.main(["memory", *options]) == 0

    assert published.commands == [["tests.benchmarks.memory", *options]]
    assert published.files() == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_what_the_receipts_say_is_published(published: Published) -> None:
    for path, _ in render.receipts(ROOT / "docs" / "evidence"):
        shutil.copy(path, published.evidence)

    assert benchmarks.main([]) == 0

    assert published.commands == []
    page = (published.evidence / "README.md").read_text(encoding="utf-8")
    assert page == (ROOT / "docs" / "evidence" / "README.md").read_text(encoding="utf-8")
    assert "waterfall.svg" in published.files()


def test_every_benchmark_is_reached_and_named() -> None:
    assert set(benchmarks.BENCHMARKS) == render._RENDERERS.keys() - OTHERS
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    for name in benchmarks.BENCHMARKS:
        assert callable(importlib.import_module(f"tests.benchmarks.{name}").main)
        assert f"| `{name}` |" in page, name
    for name in OTHERS:
        assert f"**{name}**" in page, name


def test_the_group_of_the_benchmarks_has_what_they_import() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["bench"]
    needed = {"sklearn": "scikit-learn", "PIL": "pillow", "torch_geometric": "torch-geometric"}
    given = {"__future__", "torch", "lightning", "lightning_replay", "tests", "pytest", "tomllib", "tomli"}
    imported = set()
    for path in (ROOT / "tests" / "benchmarks").glob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        imported |= set(found) - sys.stdlib_module_names - given

    assert {"matplotlib", "sklearn", "timm"} <= imported
    assert {needed.get(name, name) for name in imported} <= set(group)
