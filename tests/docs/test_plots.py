# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Pictures are drawn from receipts, show what was measured and nothing else, and are up to date."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import plots
from tests.benchmarks.receipt import receipt, write
from tests.benchmarks.step_time import summarise

GPU = {"gpu": "A GPU", "driver": "1.0"}


def publish(folder: Path, name: str, settings: dict[str, Any], results: dict[str, Any], **changes: Any) -> None:
    content = receipt(name, settings, results)
    content["device"] |= GPU
    write(folder / f"{name}.json", {**content, **changes})


def publish_times(folder: Path, complete: bool = True, **times: float) -> None:
    runs = [
        {"arm": arm, "repeat": repeat, "model": "tiny", "windows_ms": [ms + 0.1 * repeat], "timed_actions": {}}
        for arm, ms in times.items()
        for repeat in (-1, 0, 1)
    ]
    results = {"complete": complete, "runs": runs, "summary": summarise(runs)}
    publish(folder, "step_time", {"workloads": {"tiny": "a tiny MLP"}}, results)


def publish_sweep(folder: Path, rows: list[dict[str, Any]]) -> None:
    workloads = {"tiny/1": "a tiny MLP, batch 1", "tiny/2": "a tiny MLP, batch 2"}
    publish(folder, "sweep", {"workloads": workloads}, {"runs": [], "summary": rows})


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


def draw(folder: Path, name: str) -> str:
    return plots.drawings(folder)[name].svg()


def test_published_pictures_are_what_the_receipts_say() -> None:
    assert plots.out_of_date(plots.EVIDENCE, plots.drawings()) == [], "run python -m tests.benchmarks.plots"


def test_the_waterfall_shows_every_stage_that_was_measured(tmp_path: Path) -> None:
    publish_times(tmp_path, native=10.0, replay_no_norm=4.0, replay=3.0, replay_step=2.5, full_iteration=2.0)
    shown = words(draw(tmp_path, "waterfall.svg"))

    assert [word for word in shown if word in plots.STAGES.values()] == list(plots.STAGES.values())
    measured = [word for word in shown if " ms" in word]
    assert measured == ["10.0 ms", "4.0 ms (0.40)", "3.0 ms (0.30)", "2.5 ms (0.25)", "2.0 ms (0.20)"]
    assert "a tiny MLP" in shown


def test_the_waterfall_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    publish_times(tmp_path, native=10.0, graphed_callables=5.0, replay=2.5)
    shown = words(draw(tmp_path, "waterfall.svg"))

    assert shown == ["native", "network + norm", "10.0 ms", "2.5 ms (0.25)", "a tiny MLP"]


def test_step_time_by_batch_shows_the_arms_that_were_measured(tmp_path: Path) -> None:
    rows = [{"network": "tiny", "batch": batch, "native": 4.0 + batch, "replay": 1.0 + batch} for batch in (1, 2)]
    publish_sweep(tmp_path, rows)
    shown = words(draw(tmp_path, "step-time-by-batch.svg"))

    assert {"a tiny MLP", "batch size", "ms a step", "native", "replay"} <= set(shown)
    assert "replay, step scope" not in shown

    publish_sweep(tmp_path, [{**row, "replay_step": 1.0} for row in rows])
    assert "replay, step scope" in words(draw(tmp_path, "step-time-by-batch.svg"))


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_picture_has_the_same_bytes_each_time(tmp_path: Path, name: str) -> None:
    publish_times(tmp_path, native=10.0, replay=2.5)
    publish_sweep(tmp_path, [{"network": "tiny", "batch": b, "native": 4.0, "replay": 1.0} for b in (1, 2)])

    first = draw(tmp_path, name)

    assert first == draw(tmp_path, name)
    assert "<dc:date>" not in first


def test_nothing_is_drawn_of_what_proves_nothing(tmp_path: Path) -> None:
    publish_times(tmp_path, native=10.0)
    assert plots.drawings(tmp_path) == {}
    publish_times(tmp_path, complete=False, native=10.0, replay=2.5)
    assert plots.drawings(tmp_path) == {}
    publish(tmp_path, "sweep", {}, {"summary": [{"network": "tiny", "batch": 1, "native": 4.0}]})
    assert plots.drawings(tmp_path) == {}
    publish(tmp_path, "step_time", {}, {"complete": True}, device={"gpu": None})
    assert plots.drawings(tmp_path) == {}


def test_the_receipt_with_most_stages_is_drawn_else_the_newest(tmp_path: Path) -> None:
    def put(name: str, written: str, **times: float) -> None:
        publish_times(tmp_path / "made", **times)
        content = json.loads((tmp_path / "made" / "step_time.json").read_text(encoding="utf-8"))
        write(tmp_path / name, {**content, "written": written})

    put("a.json", "2020-01-02", native=10.0, replay=2.5)
    put("b.json", "2020-01-01", native=10.0, replay=2.4)
    assert "a.json" in plots.drawings(tmp_path)["waterfall.svg"].source
    put("b.json", "2020-01-03", native=10.0, replay=2.4)
    assert "b.json" in plots.drawings(tmp_path)["waterfall.svg"].source
    put("c.json", "2020-01-01", native=10.0, replay=2.5, replay_step=2.0)
    assert "c.json" in plots.drawings(tmp_path)["waterfall.svg"].source


def test_check_fails_where_a_picture_is_of_another_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["plots", "--folder", str(tmp_path), *more])
        return plots.main()

    publish_times(tmp_path, native=10.0, replay=2.5)
    assert run("--check") == 1
    assert "waterfall.svg is not what the receipts say" in capsys.readouterr().err
    assert run() == run("--check") == 0
    publish_times(tmp_path, native=10.0, replay=2.0)
    assert run("--check") == 1
    assert run() == run("--check") == 0
    (tmp_path / "step_time.json").unlink()
    assert run("--check") == 1
    assert run() == run("--check") == 0
    assert [path.name for path in tmp_path.iterdir()] == [plots.PAGE]
    assert "No picture can be drawn yet." in (tmp_path / plots.PAGE).read_text(encoding="utf-8")


def test_the_page_shows_what_was_drawn(tmp_path: Path) -> None:
    publish_times(tmp_path, native=10.0, replay=2.5)
    page = plots.page(plots.drawings(tmp_path))

    assert re.findall(r"\]\(([\w.-]+)\)", page) == ["waterfall.svg"]
    assert "Measured on one A GPU" in page
