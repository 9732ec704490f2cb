# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Wrong arguments: an error that names the parameter, what was given, what is accepted, and the cure."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_replay import ReplayStrategy
from tests.parity.harness import Learner, batches, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


def check_message(error: Exception, name: str, given: object, accepted: str) -> None:
    lines = str(error).splitlines()
    assert len(lines) == 5, lines
    assert f"{name}={given!r}" in lines[0]
    assert lines[1].split() == ["where:", name]
    assert accepted in lines[2]
    assert lines[2].strip().startswith("expected:")
    assert lines[3].strip() == f"actual:   {given!r}"
    assert lines[4].strip().startswith("to do:")
    assert len(lines[4].strip()) > len("to do: ")


@pytest.mark.parametrize(
    ("name", "given", "accepted"),
    [
        ("scope", "steps", "'network'"),
        ("scope", None, "'network'"),
        ("certify", "sometimes", "'auto' or 'bitwise' or 'off'"),
        ("certify", True, "'auto' or 'bitwise' or 'off'"),
        ("on_native", "raise", "'warn' or 'error' or 'ignore'"),
        ("backend", "gpu", "'auto' or 'cuda' or 'tape'"),
        ("max_recordings", 0, "at least 1"),
        ("max_recordings", -3, "at least 1"),
        ("warmup_steps", 0, "at least 1"),
        ("modules", [], "at least one name"),
        ("device", "gpu:0", "cuda:0"),
        ("device", True, "cuda:0"),
    ],
)
def test_wrong_value(name: str, given: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match="ReplayStrategy cannot be used with") as caught:
        ReplayStrategy(**{name: given})

    check_message(caught.value, name, given, accepted)


@pytest.mark.parametrize(
    ("name", "given", "accepted"),
    [
        ("max_recordings", 2.0, "an int"),
        ("max_recordings", True, "an int"),
        ("warmup_steps", "3", "an int"),
        ("warmup_steps", None, "an int"),
        ("modules", "net", "a list of dotted names"),
        ("modules", [1], "a list of dotted names"),
        ("modules", 3, "a list of dotted names"),
    ],
)
def test_wrong_type(name: str, given: Any, accepted: str) -> None:
    with pytest.raises(TypeError, match="ReplayStrategy cannot be used with") as caught:
        ReplayStrategy(**{name: given})

    check_message(caught.value, name, given, accepted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_backend_without_cuda() -> None:
    with pytest.raises(ValueError, match="ReplayStrategy cannot be used with") as caught:
        ReplayStrategy(backend="cuda")

    check_message(caught.value, "backend", "cuda", "CUDA device")
    assert "tape" in str(caught.value)


def test_cuda_backend_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        strategy = ReplayStrategy(backend="cuda")

    with pytest.raises(ValueError, match="ReplayStrategy cannot be used with") as caught:
        Trainer(strategy=strategy, devices=1, **QUIET).fit(Learner(mlp()), *loader(batches()))

    check_message(caught.value, "backend", "cuda", "a CUDA device, not cpu")


def test_device_of_another_kind_than_the_accelerator() -> None:
    with pytest.raises(ValueError, match="ReplayStrategy cannot be used with") as caught:
        Trainer(strategy=ReplayStrategy("cuda:1"), devices=1, **QUIET)

    check_message(caught.value, "device", "cuda:1", "a cpu device")


@pytest.mark.parametrize(
    ("name", "given", "options", "accepted"),
    [
        ("devices", 2, {"devices": 2}, "devices=1"),
        ("num_nodes", 2, {"devices": 1, "num_nodes": 2}, "1"),
        ("sync_batchnorm", True, {"devices": 1, "sync_batchnorm": True}, "False"),
    ],
)
def test_more_than_a_device(name: str, given: Any, options: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ValueError, match="ReplayStrategy cannot be used with") as caught:
        Trainer(strategy=ReplayStrategy(), **QUIET, **options)

    check_message(caught.value, name, given, accepted)


@pytest.mark.parametrize("given", ["nett", "net.7", "", "net."])
def test_unknown_module(given: str) -> None:
    trainer = Trainer(strategy=ReplayStrategy(modules=["net", given], backend="tape"), devices=1, **QUIET)

    with pytest.raises(ValueError, match="modules") as caught:
        trainer.fit(Learner(mlp()), *loader(batches()))

    assert repr(given) in str(caught.value)
    assert "'net'" in str(caught.value)
    assert "to do:" in str(caught.value)


class Tied(Learner):
    """Has one of its modules under a second name too."""

    def __init__(self, net: torch.nn.Sequential) -> None:
        super().__init__(net)
        self.head = net[2]


@pytest.mark.parametrize(
    ("given", "inner", "outer"),
    [
        (["net", "net.0"], "net.0", "net"),
        (["net.0", "net"], "net.0", "net"),
        (["self", "net"], "net", "self"),
        (["net", "head"], "head", "net"),
        (["net.2", "head"], "net.2", "head"),
    ],
)
def test_a_module_inside_another_one(given: list[str], inner: str, outer: str) -> None:
    trainer = Trainer(strategy=ReplayStrategy(modules=given, backend="tape"), devices=1, **QUIET)

    with pytest.raises(ValueError, match="modules") as caught:
        trainer.fit(Tied(mlp()), *loader(batches()))

    check_message(caught.value, "modules", given, f"{inner!r} lies inside {outer!r}")


def test_modules_apart_from_each_other_are_accepted() -> None:
    strategy = ReplayStrategy(modules=["net.0", "net.2"], warmup_steps=1, backend="tape")
    Trainer(strategy=strategy, devices=1, **QUIET).fit(Learner(mlp()), *loader(batches()))

    assert {recording.region for recording in strategy.recordings} == {"net.0", "net.2"}


def test_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        ReplayStrategy(None, "network")  # type: ignore[misc]


def test_every_argument_may_be_left_out() -> None:
    strategy = ReplayStrategy()

    assert strategy.recordings == ()
    assert strategy.report().steps_total == 0
    assert "0 in all" in str(strategy.report())
