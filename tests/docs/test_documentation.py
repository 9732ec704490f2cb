# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What README and docs name exists, their examples run, and generated pages are up to date."""

import ast
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from packaging.specifiers import SpecifierSet

from lightning_replay import Reason, ReplayMonitor, ReplayReport, ReplayStrategy
from lightning_replay.dispatch import MAX_NEW_SIGNATURES
from lightning_replay.report import RecordingStats
from tests.demo.examples import EXAMPLES, load_example

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def spellings() -> list[str]:
    """Returns the short pieces of Python on all pages: all but the README's first example."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES[1:])
    return list(dict.fromkeys([*blocks("python")[1:], *blocks("python", pages)]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what the example says without a CUDA device")
def test_the_first_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning's logs and checkpoints
    exec(compile(blocks("python")[0], "README.md", "exec"), {"__name__": "readme"})

    assert "steps: 32 in all, 0 replayed (0%), 32 native" in capsys.readouterr().out


@pytest.mark.parametrize("block", spellings())
def test_spellings_in_python(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Trainer] = []

    def make(*args: Any, **kwargs: Any) -> Trainer:
        made.append(Trainer(*args, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **kwargs))
        return made[-1]

    monkeypatch.setattr("lightning.pytorch.Trainer", make)  # which each of them imports
    exec(compile(block, "README.md", "exec"), {})

    assert [type(trainer.strategy) for trainer in made] == [ReplayStrategy]


def test_spelling_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    monkeypatch.chdir(tmp_path)
    (block,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = LightningCLI(BoringModel, run=False, args=["--config=config.yaml", "--trainer.accelerator=cpu"])

    assert type(cli.trainer.strategy) is ReplayStrategy


def assert_configured(trainer: Trainer) -> None:
    assert type(trainer.strategy) is ReplayStrategy
    assert (trainer.strategy._warmup_steps, trainer.strategy._on_native) == (5, "warn")
    assert (trainer.gradient_clip_val, trainer.precision) == (1.0, "bf16-mixed")
    assert ReplayMonitor in map(type, trainer.callbacks)


@pytest.mark.filterwarnings("ignore")
def test_the_configuration_of_lightning_cli() -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    words = [f"--config={EXAMPLES / 'lightning_cli.yaml'}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    assert_configured(LightningCLI(BoringModel, run=False, args=words).trainer)


@pytest.mark.filterwarnings("ignore")
def test_the_configuration_of_hydra() -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(EXAMPLES / "hydra.yaml")
    config.trainer.update(accelerator="cpu", logger=False)
    assert_configured(instantiate(config.trainer))


def test_commands_exist() -> None:
    sessions = set(re.findall(r"nox -s (\w+)", README))
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert {"demo", "tests", "docs"} <= sessions
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"nox -s (\w+)", text)) <= defined, page
        for module in re.findall(r"python -m ((?:tests|lightning_replay)[\w.]*)", text):
            assert importlib.util.find_spec(module), f"{page}: {module}"


def test_versions_are_those_of_the_matrix() -> None:
    matrix = tomllib.loads((ROOT / "compat" / "matrix.toml").read_text())
    releases = matrix["lightning"]["releases"]

    rows = re.findall(r"^\| (Lightning|torch|Python)[^|]*\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", README, re.MULTILINE)
    receipts = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "evidence").glob("parity*.json")}
    newest = receipts.pop("parity")["versions"]
    older = sorted(receipt["versions"]["lightning"] for receipt in receipts.values())
    all_of_them = f"{releases[0]} to {releases[-1]}"
    assert rows == [
        ("Lightning", all_of_them, all_of_them, f"{newest['lightning']}; {' and '.join(older)} for a part"),
        ("torch", f"{matrix['torch']['oldest']} or newer", matrix["torch"]["tested"], newest["torch"].split("+")[0]),
        (
            "Python",
            f"{matrix['python']['oldest']} or newer",
            matrix["python"]["developed"],
            newest["python"].rpartition(".")[0],
        ),
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert matrix["python"]["oldest"] in SpecifierSet(project["requires-python"])


def test_named_reasons_exist() -> None:
    table = README.split("| When | Reason |")[1].split("\n\n")[0]
    named = [key for row in table.splitlines()[2:] for key in re.findall(r"`([a-z_]+)`", row.split("|")[2])]

    assert len(named) > 15
    assert set(named) <= {reason.value for reason in Reason}


def test_why_native_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)

    assert generate.main(["--check"]) == 0, "run python docs/generate.py"


def test_every_limit_has_a_section() -> None:
    listed = re.findall(r"^\d+\. \*\*(.+?)\.\*\*", README, flags=re.MULTILINE)

    assert len(listed) == 10
    assert listed == re.findall(r"^## (.+)$", LIMITS, flags=re.MULTILINE)


def names_of_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def blocks_of_limits() -> list[str]:
    """Returns the paragraphs and list items below the first section's heading, without those that open a list."""
    _, _, body = LIMITS.partition("\n## ")
    found = re.split(r"\n\n|\n(?=- )", f"## {body}")
    return [block for block in found if not block.startswith("## ") and not block.rstrip().endswith(":")]


def test_every_sentence_on_limits_names_its_tests() -> None:
    items = blocks_of_limits()
    assert len(items) > 25
    named: set[str] = set()
    for item in items:
        references = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", item)
        assert references, f"no test is named by: {item}"
        for path, name in references:
            assert name in names_of_tests(path or "tests/limits/test_limits.py"), f"there is no {name}"
            named |= {name} if not path else set()

    assert named == names_of_tests("tests/limits/test_limits.py"), "tests of limits that the page does not name"


def test_times_and_waiting_are_explained() -> None:
    columns = (ROOT / "docs" / "guide" / "callbacks.md").read_text(encoding="utf-8")
    timed = ReplayReport(recordings=(RecordingStats("net", "(2, 3)", 0.1, 0, "bitwise", replay_ms=1.0),))

    for name in timed.tables()[1].header[2:]:
        assert f"\n- **{name}**: " in columns, name
    assert f"after {MAX_NEW_SIGNATURES} calls, which are `warm_up` | `never_repeats`" in README


def shown_in(page: str, start: str) -> str:
    """Returns the block of a page that begins with some words."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"```text\n({re.escape(start)}.*?)```", text, flags=re.DOTALL)
    return block


def assert_shown(block: str, printed: str) -> None:
    """Asserts that a block, in which "..." stands for anything, is a part of what was printed."""
    pattern = re.escape(re.sub(r"[ \t]+", " ", block)).replace(re.escape("..."), ".*?")
    plain = re.sub(r"[ \t]+", " ", re.sub(r"-{2,}", "--", printed))
    assert re.search(re.sub(r"(\\-){2,}", "--", pattern), plain), printed


@pytest.mark.filterwarnings("ignore")
def test_the_report_of_the_quick_start_is_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_example("first_steps").main(ReplayStrategy(backend="tape"))

    assert_shown(shown_in("quick-start.md", "steps:"), capsys.readouterr().out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the operation has another name there")
def test_the_message_of_the_guide_is_what_is_printed() -> None:
    before, _ = load_example("finding_out_why").main()

    assert_shown(shown_in("guide/debugging.md", "The region waits"), before.messages[Reason.HOST_SYNC] + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
