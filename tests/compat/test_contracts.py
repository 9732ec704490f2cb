# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The data room agrees with itself, with pyproject.toml and with the inspection tool."""

import importlib.util
import itertools
import re
import sys
import zipfile
from pathlib import Path

import lightning
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_replay.compat import known_versions, load_contract
from lightning_replay.compat.contract import data_room

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "compat"
MATRIX = tomllib.loads((ROOM / "matrix.toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = tomllib.loads((ROOM / "pins.toml").read_text(encoding="utf-8"))["pins"]
RELEASES = MATRIX["lightning"]["releases"]
CLOSURE = "lightning.pytorch.loops.optimization.automatic.Closure.closure"


def test_the_checkout_is_the_data_room():
    assert data_room() == ROOM


def test_every_release_of_the_matrix_has_a_contract_and_no_other():
    assert list(known_versions()) == RELEASES == sorted(RELEASES, key=Version)
    assert len(RELEASES) == 15


@pytest.mark.parametrize("version", RELEASES)
def test_a_contract_pins_what_we_lean_on(version):
    contract = load_contract(version)
    pinned = {f"{group['module']}.{name}" for group in PINS for name in group["functions"]}
    assert set(contract.functions) == pinned
    assert contract.version == version
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", contract.inspected)
    assert all(re.fullmatch("[0-9a-f]{12}", value) for value in contract.functions.values())
    assert contract.facts == {
        "autocast_weight_cache": Version(version) < Version("2.5.5"),
        "load_checkpoint_weights_only": Version(version) >= Version("2.6.0"),
    }


@pytest.mark.parametrize("version", RELEASES)
def test_the_constraints_name_the_tested_combination(version):
    lines = (ROOM / "constraints" / f"lightning-{version}.txt").read_text(encoding="utf-8").split()
    torch = MATRIX["torch"]["tested"]
    assert lines == [f"lightning=={version}", f"pytorch-lightning=={version}", f"torch=={torch}"]


def test_the_dependency_admits_exactly_the_inspected_releases():
    requirements = {Requirement(text).name: Requirement(text) for text in PROJECT["project"]["dependencies"]}
    specifier = requirements["lightning"].specifier
    assert all(specifier.contains(version) for version in RELEASES)
    assert not any(specifier.contains(version) for version in ("2.3.3", "2.6.2", "2.6.3", "2.7.0"))
    assert str(requirements["torch"].specifier) == f">={MATRIX['torch']['oldest']}"
    assert PROJECT["project"]["requires-python"] == f">={MATRIX['python']['oldest']}"


def test_the_representatives_stand_on_both_sides_of_every_change():
    representatives = MATRIX["lightning"]["representatives"]
    assert set(representatives) <= set(RELEASES)
    assert {RELEASES[0], RELEASES[-1]} <= set(representatives)
    for before, after in itertools.pairwise(RELEASES):
        if load_contract(before).facts != load_contract(after).facts:
            assert after in representatives
    minors = {Version(version).release[:2] for version in RELEASES}
    assert {Version(version).release[:2] for version in representatives} == minors


def test_an_unknown_release_has_no_contract():
    assert load_contract("2.7.0") is None
    assert load_contract("not a version") is None
    assert load_contract("../contracts/lightning-2.6.6") is None


def test_the_workflow_is_pinned_and_takes_its_rows_from_the_matrix():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used)
    assert "\npermissions: {}\n" in text
    assert "python compat/ci_rows.py" in text
    assert not set(RELEASES) & set(re.findall(r"[\d.]+", text))

    tool = load("ci_rows")
    assert tool.rows()[0] == {"lightning": RELEASES[0], "python": MATRIX["python"]["developed"]}
    combinations = {(row["lightning"], row["python"]) for row in tool.rows()}
    assert {release for release, _ in combinations} == set(MATRIX["lightning"]["representatives"])
    assert (RELEASES[0], MATRIX["python"]["oldest"]) in combinations
    assert (RELEASES[-1], MATRIX["python"]["newest"]) in combinations


def test_the_documentation_lists_every_release():
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (on|off) \|", page, flags=re.MULTILINE)
    facts = [load_contract(version) for version in RELEASES]
    caches = ["on" if contract.facts["autocast_weight_cache"] else "off" for contract in facts]
    assert rows == [(c.version, c.inspected, cache) for c, cache in zip(facts, caches, strict=True)]


# -- the tools


def load(name):
    """Load a tool of the data room, which has no import name."""
    if sys.version_info < (3, 11):
        pytest.skip("the tools need Python 3.11")
    spec = importlib.util.spec_from_file_location(name, ROOM / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The tool over a data room of its own."""
    module = load("inspect_release")
    (tmp_path / "contracts").mkdir()
    (tmp_path / "pins.toml").write_bytes((ROOM / "pins.toml").read_bytes())
    monkeypatch.setattr(module, "ROOM", tmp_path)
    return module


def make_wheel(folder, version, edit=lambda name, text: text):
    """A wheel of the installed Lightning under another version, with its text edited."""
    root = Path(lightning.__file__).parent
    modules = {group["module"].replace(".", "/") + ".py" for group in PINS}
    with zipfile.ZipFile(folder / f"lightning-{version}-py3-none-any.whl", "w") as wheel:
        for name in modules:
            wheel.writestr(name, edit(name, (root.parent / name).read_text(encoding="utf-8")))


def test_the_tool_repeats_the_committed_contract(tool, tmp_path):
    version = lightning.__version__
    make_wheel(tmp_path, version)
    assert tool.main([version, "--wheels", str(tmp_path)]) == 0
    written = tool.json.loads((tmp_path / "contracts" / f"lightning-{version}.json").read_text(encoding="utf-8"))
    assert written["functions"] == dict(load_contract(version).functions)
    assert written["facts"] == dict(load_contract(version).facts)


def test_the_tool_names_a_change_with_its_reason_and_its_lines(tool, tmp_path, capsys):
    def edit(name, text):
        if not name.endswith("automatic.py"):
            return text
        assert "step_output = self._step_fn()" in text
        return text.replace("step_output = self._step_fn()", "step_output = self._step_fn() or None")

    make_wheel(tmp_path, "9.0.0")
    make_wheel(tmp_path, "9.0.1", edit)
    assert tool.main(["9.0.0", "9.0.1", "--wheels", str(tmp_path)]) == 0
    assert tool.main(["9.0.1", "--strict", "--wheels", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "Against 9.0.0: 1 changed." in printed
    assert f"{CLOSURE} changed. We lean on it for the closure of a step" in printed
    assert "-    step_output = self._step_fn()\n" in printed
    assert "+    step_output = self._step_fn() or None\n" in printed


def test_the_tool_fails_on_a_release_that_lost_a_function(tool, tmp_path, capsys):
    make_wheel(tmp_path, "9.0.0", lambda name, text: text.replace("def consume_result", "def other_name"))
    assert tool.main(["9.0.0", "--wheels", str(tmp_path)]) == 1
    assert "AbstractClosure.consume_result does not exist" in capsys.readouterr().out


def test_an_inspection_that_finds_nothing_new_keeps_its_date(tool, tmp_path):
    make_wheel(tmp_path, "9.0.0")
    assert tool.main(["9.0.0", "--wheels", str(tmp_path)]) == 0
    path = tmp_path / "contracts" / "lightning-9.0.0.json"
    dated = re.sub(r'"inspected": "[^"]*"', '"inspected": "2001-02-03"', path.read_text(encoding="utf-8"))
    path.write_text(dated, encoding="utf-8")
    assert tool.main(["9.0.0", "--wheels", str(tmp_path)]) == 0
    assert path.read_text(encoding="utf-8") == dated
