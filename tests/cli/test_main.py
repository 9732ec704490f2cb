# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""``python -m lightning_replay``."""

import json
import subprocess
import sys
from types import SimpleNamespace

import lightning
import pytest
import torch

from lightning_replay import __main__ as command


@pytest.fixture
def gpu(monkeypatch):
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=2**31)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run_json(capsys):
    code = command.main(["--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_and_a_known_lightning_training_can_be_replayed(capsys):
    code, facts = run_json(capsys)
    assert code == 0
    assert facts["replayable"] is True
    assert facts["contract"]["known"] is True
    assert facts["versions"]["lightning"] == lightning.__version__
    assert facts["cuda_devices"] == [{"index": 0, "name": "A GPU", "capability": "9.0", "memory_gib": 2.0}]
    assert "every step" not in [entry["what"] for entry in facts["native"]]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_nothing_can_be_replayed(capsys):
    code, facts = run_json(capsys)
    assert (code, facts["replayable"], facts["cuda_devices"]) == (1, False, [])
    assert facts["native"][0] == {
        "what": "every step",
        "why": "The training device is not a CUDA device.",
        "cure": 'Train on a GPU; backend="tape" runs the engine on a CPU for debugging.',
    }


@pytest.mark.usefixtures("gpu")
def test_an_unknown_lightning_is_named(capsys, monkeypatch):
    monkeypatch.setattr(lightning, "__version__", "2.7.0")
    code, facts = run_json(capsys)
    assert (code, facts["replayable"]) == (1, False)
    assert facts["contract"]["inspected"] is None
    assert "Lightning 2.7.0" in facts["contract"]["message"]
    assert facts["native"][0]["what"] == "every step"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("with_rich", [True, False])
def test_the_text_is_readable_with_and_without_rich(capsys, monkeypatch, with_rich):
    if with_rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "200")  # versions of some releases are long, and lines would be broken
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert ("─" in printed) is with_rich
    for text in (
        lightning.__version__,
        torch.__version__,
        "A GPU",
        "is as inspected",
        "Training can be replayed here.",
    ):
        assert text in printed


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("cuda", "needed"), [(None, "a CUDA device and a torch built for CUDA,"), ("13.0", "a CUDA device,")]
)
def test_without_a_gpu_the_text_says_what_one_would_change(capsys, monkeypatch, cuda, needed):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    assert printed.count("native: ") == 1
    assert "native: every step" in printed
    assert f"With {needed} training could be." in printed


@pytest.mark.usefixtures("no_gpu")
def test_an_unknown_lightning_is_not_cured_by_a_gpu(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(lightning, "__version__", "2.7.0")
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    assert printed.count("native: every step") == 2
    assert "With a CUDA device" not in printed


def test_it_runs_as_a_module():
    command_line = [sys.executable, "-m", "lightning_replay", "--json"]
    result = subprocess.run(command_line, capture_output=True, text=True, check=False)
    facts = json.loads(result.stdout)
    assert result.returncode == (0 if facts["replayable"] else 1)
    assert facts["replayable"] is torch.cuda.is_available()


def test_its_help_is_plain_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert "\nCan anything be replayed here, and if not, why not? The exit code is" in printed
    assert "`" not in printed
