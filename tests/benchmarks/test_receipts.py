# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The harness runs, says what it ran, and its pages are rendered from receipts. No time is asserted."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import accumulation, memory, omission, render
from tests.benchmarks.receipt import ROOT, receipt, source_hashes, write
from tests.benchmarks.step_time import summarise, table


def _runs(**times: list[float]) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "repeat": repeat, "model": "tiny", "windows_ms": [ms - 0.5, ms, ms + 7.0], "timed_actions": {}}
        for arm, runs in times.items()
        for repeat, ms in enumerate(runs)
    ]


def test_summary_is_the_median_of_medians_with_ratios() -> None:
    cell = summarise(_runs(native=[10.0, 12.0, 11.0], replay=[2.0, 2.2, 2.1]))["tiny"]["replay"]

    assert (cell["median_ms"], cell["min_ms"], cell["max_ms"]) == (2.1, 2.0, 2.2)
    assert cell["ratio_to_native"] == 2.1 / 11.0
    assert "ratio_to_graphed_callables" not in cell


def test_a_failed_run_has_no_figure() -> None:
    runs = [*_runs(native=[10.0]), {"arm": "replay", "repeat": 0, "model": "tiny", "error": "RuntimeError: no"}]

    assert list(summarise(runs)["tiny"]) == ["native"]
    assert "replay" not in table(summarise(runs))


def test_page_is_rendered_from_receipts(tmp_path: Path) -> None:
    settings = {"precision": "bf16-mixed", "optimizer": "AdamW", "clip": 1.0, "repeats": 1, "steps": 55}
    settings |= {"window": 20, "skip": 15, "workloads": {"tiny": "a tiny MLP"}}
    runs = _runs(native=[10.0], replay=[2.5])
    results = {"complete": True, "runs": runs, "summary": summarise(runs)}
    write(tmp_path / "a.json", receipt("step_time", settings, results))
    case = {"model": "gpt", "precision": "32-true", "steps": 60, "steps_replayed": 56, "equal": True}
    case |= {"control_equal": False, "nondeterministic": ["some_backward"]}
    write(tmp_path / "b.json", receipt("parity", {}, {"cases": [case]}))

    page = render.render(tmp_path)

    assert "| a tiny MLP | replay | 2.500 (2.500 to 2.500) | 0.250 |" in page
    assert "| gpt | 32-true | 56 of 60 | no | not judged (equal) | `some_backward` |" in page
    assert str(ROOT) not in page


def test_other_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")

    with pytest.raises(ValueError, match=r"x\.json: not a receipt"):
        render.render(tmp_path)


def test_published_page_is_what_the_receipts_say() -> None:
    if not render.receipts():
        pytest.skip("no receipt is published yet")
    assert (render.EVIDENCE / "README.md").read_text() == render.render()


def test_readme_is_what_the_receipts_say() -> None:
    assert render.README.read_text(encoding="utf-8") == render.readme()
    explained = render.with_section(render.HOW_IT_WORKS, render.host_time())
    assert render.HOW_IT_WORKS.read_text(encoding="utf-8") == explained


def _git(*words: str) -> bytes | None:
    """What git answers, None where it refuses."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _sources_at(revision: str) -> dict[str, str] | None:
    """The hashes of the package's sources at a commit, None if this checkout does not have it."""
    if (archive := _git("archive", revision, "lightning_replay")) is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {
            member.name: hashlib.sha256(file.read()).hexdigest()
            for member in files
            if member.name.endswith(".py") and (file := files.extractfile(member)) is not None
        }


def _other_sources(content: dict[str, Any], known: dict[str, str]) -> list[str]:
    """The files that a receipt does not have as the revision that it states."""
    stated = content["sources"]
    return sorted(path for path in stated.keys() | known.keys() if stated.get(path) != known.get(path))


@pytest.mark.parametrize(("path", "content"), [pytest.param(*found, id=found[0].name) for found in render.receipts()])
def test_sources_are_those_of_the_stated_revision(path: Path, content: dict[str, Any]) -> None:
    revision = content["revision"]
    if revision is None:
        pytest.skip("it states none")
    assert not revision.endswith("+"), "measured with changes that no commit has"
    known = _sources_at(revision)
    if known is None and (_git("rev-parse", "--is-shallow-repository") or b"true").strip() == b"true":
        pytest.skip(f"this copy has no history that reaches {revision}")
    assert known is not None, f"{revision} is no commit of this repository"
    assert _other_sources(content, known) == []


def test_other_sources_than_those_of_a_revision_are_seen() -> None:
    known = _sources_at("HEAD")
    if known is None:
        pytest.skip("this copy has no history")
    path = "lightning_replay/strategy.py"

    assert _other_sources({"sources": known}, known) == []
    assert _other_sources({"sources": known | {path: "0"}}, known) == [path]
    assert _other_sources({"sources": {name: known[name] for name in known if name != path}}, known) == [path]


def _publish(folder: Path, name: str, replay: float, **changes: Any) -> None:
    settings = {"precision": "bf16-mixed", "optimizer": "AdamW", "clip": 1.0, "repeats": 1, "steps": 55}
    settings |= {"window": 20, "skip": 15, "workloads": {"tiny": "a tiny MLP"}}
    runs = _runs(native=[10.0], replay=[replay])
    content = receipt("step_time", settings, {"complete": True, "runs": runs, "summary": summarise(runs)})
    content["device"] |= {"gpu": "A GPU", "driver": "1.0"}
    write(folder / name, {**content, **changes})


def test_readme_has_complete_figures_of_a_gpu(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{render.BEGIN}\n99.9 typed by hand\n{render.END}\nafter\n")
    evidence = tmp_path / "evidence"
    assert render.readme(page, evidence) == (
        f"before\n{render.BEGIN}\nNo figures are published yet.\n{render.END}\nafter\n"
    )

    _publish(evidence, "b.json", 5.0, written="2020-01-02T00:00:00+00:00")
    _publish(evidence, "a.json", 2.5, written="2020-01-03T00:00:00+00:00")
    _publish(evidence, "c.json", 1.0, written="2020-01-04T00:00:00+00:00", complete=False)
    cpu = receipt("step_time", {}, {})["device"] | {"gpu": None}
    _publish(evidence, "d.json", 1.5, written="2020-01-05T00:00:00+00:00", device=cpu)
    section = render.readme(page, evidence)

    assert "| workload | native, ms | `ReplayStrategy()`, ms |" in section
    assert "| a tiny MLP | 10.000 | 2.500 (4.0) |" in section
    assert "2020-01-03; A GPU, driver 1.0;" in section
    assert "docs/evidence/a.json" in section
    assert "99.9" not in section
    assert section.endswith(f"{render.END}\nafter\n")

    content = json.loads((evidence / "a.json").read_text())
    for name, written, arms in (("e.json", "2020-01-07", ["replay"]), ("f.json", "2020-01-06", ["native", "replay"])):
        write(evidence / name, {**content, "written": written, "settings": {**content["settings"], "arms": arms}})
    assert "docs/evidence/f.json" in render.readme(page, evidence)


def test_check_fails_where_a_page_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{render.BEGIN}{render.END}")
    explanation = tmp_path / "explanation.md"
    explanation.write_text(f"{render.BEGIN}{render.END}", encoding="utf-8")
    words = ["render", "--folder", str(tmp_path / "evidence"), "--readme", str(page), "--explanation", str(explanation)]

    monkeypatch.setattr(sys, "argv", words)
    assert render.main() == 0
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    assert render.main() == 0
    page.write_text(page.read_text().replace("No figures", "Great figures"))
    assert render.main() == 1


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(render.BEGIN)

    with pytest.raises(ValueError, match=r"page\.md: expected <!-- figures:begin -->"):
        render.readme(tmp_path / "page.md", tmp_path)


@pytest.mark.slow
def test_harness_on_a_cpu(tmp_path: Path) -> None:
    """Both arms on the tape backend: enough to know that the harness runs and that the replay arm replays."""
    out = tmp_path / "step_time.json"
    words = "--device cpu --backend tape --models tiny --arms native replay --repeats 1 --steps 12 --skip 6 --window 3"
    command = [sys.executable, "-m", "tests.benchmarks.step_time", *words.split(), "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert written["complete"]
    assert [(run["arm"], run["timed_actions"]) for run in written["runs"]] == [
        ("native", {"None": 6}),
        ("replay", {"replay": 6}),
    ]
    assert written["runs"][0]["last_loss"] == written["runs"][1]["last_loss"]
    assert written["sources"] == source_hashes()
    assert written["command"] == f"python -m tests.benchmarks.step_time {words} --out step_time.json"


def _run(model: str, arm: str, **results: Any) -> dict[str, Any]:
    return {"model": model, "arm": arm, "timed_actions": {"replay": 20}, **results}


def test_memory_is_held_against_native_and_parameters() -> None:
    native = _run("tiny", "native", peak_reserved_bytes=100 << 20, parameter_bytes=10 << 20)
    replay = _run("tiny", "replay", peak_reserved_bytes=150 << 20, reserved_at_end_bytes=125 << 20)

    (row,) = memory.summarise([native, replay])

    assert row["ratio"] == 1.0
    assert memory.problems([row]) == []
    assert memory.problems([{**row, "ratio": 1.01}]) == ["tiny: 1.01 of what is allowed"]
    assert memory.summarise([native]) == []


def test_accumulation_takes_the_update_out_of_three_batches_in_four() -> None:
    times = {"each": [10.0] * 3, "accumulated": [7.0] * 3, "fenced": [8.0, 8.0, 8.0, 12.0] * 10}
    runs = [{**_run("tiny", "replay", windows_ms=windows), "way": way} for way, windows in times.items()]

    (row,) = accumulation.summarise(runs)

    assert (row["update"], row["expected"], row["ratio to expected"]) == (4.0, 7.0, 1.0)
    assert accumulation.summarise(runs[:2]) == []


def test_omission_compares_bits() -> None:
    figures = {"windows_ms": [2.0], "fit_seconds": 1.5, "parameters": 370, "losses_sha256": "a", "weights_sha256": "b"}
    runs = [_run("tiny", arm, **figures) for arm in omission.ARMS for _ in range(2)]

    assert [row["equal"] for row in omission.summarise(runs)] == [True, True]
    runs[-1]["weights_sha256"] = "c"
    assert [row["equal"] for row in omission.summarise(runs)] == [True, False]


def test_receipts_of_few_figures_are_rendered(tmp_path: Path) -> None:
    settings = {"what": "What it is.", "workloads": {"tiny": "a tiny MLP"}}
    write(
        tmp_path / "a.json", receipt("memory", settings, {"runs": [], "summary": [{"workload": "tiny", "ratio": 0.9}]})
    )

    page = render.render(tmp_path)

    assert "What it is.\n\n| workload | ratio |\n| --- | --- |\n| a tiny MLP | 0.9 |" in page
