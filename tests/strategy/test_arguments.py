# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Wrong arguments: an error that names the parameter, what was given, what is accepted, and the cure."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_replay import ReplayPrecision, ReplayStrategy
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
        ("scope", np.array(["step", "auto"]), "'network'"),
        ("device", "gpu:0", "cuda:0"),
        ("device", True, "cuda:0"),
        ("device", 300, "cuda:0"),
        ("device", "cuda:300", "cuda:0"),
        ("device", b"cpu", "cuda:0"),
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
        ("accelerator", "cpu", "Accelerator"),
        ("accelerator", CPUAccelerator, "Accelerator"),
        ("checkpoint_io", "here", "CheckpointIO"),
        ("precision_plugin", "16-mixed", "Precision"),
        ("precision_plugin", ReplayPrecision, "Precision"),
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


def test_what_is_accepted_of_lightning() -> None:
    plugin, accelerator, io = ReplayPrecision("bf16-mixed"), CPUAccelerator(), TorchCheckpointIO()

    strategy = ReplayStrategy(precision_plugin=plugin, accelerator=accelerator, checkpoint_io=io)

    assert strategy.precision_plugin is plugin
    assert strategy.accelerator is accelerator
    assert strategy.checkpoint_io is io


def test_invalidate_takes_words() -> None:
    strategy = ReplayStrategy()

    with pytest.raises(TypeError, match=r"ReplayStrategy\.invalidate cannot be used with") as caught:
        strategy.invalidate(3)  # type: ignore[arg-type]

    check_message(caught.value, "reason", 3, "a string")
    assert strategy.report().reasons == {}


@pytest.mark.parametrize(
    ("given", "name", "accepted"),
    [
        ({"precision": "16"}, "precision", "'16-mixed'"),
        ({"precision": ["32-true"]}, "precision", "'32-true'"),
        ({"precision": "bf16-mixed", "device": "banana"}, "device", "cuda"),
        ({"precision": "bf16-mixed", "device": "cuda:0"}, "device", "cuda"),
        ({"precision": "bf16-mixed", "device": 3}, "device", "cuda"),
        ({"precision": "32-true", "device": "cpu"}, "device", "None with precision='32-true'"),
        ({"precision": "bf16-mixed", "scaler": "none"}, "scaler", "GradScaler"),
        (
            {"precision": "bf16-true", "scaler": torch.amp.GradScaler("cpu")},
            "scaler",
            "None with precision='bf16-true'",
        ),
        ({"backend": "gpu"}, "backend", "'tape'"),
    ],
)
def test_wrong_arguments_of_the_precision(given: dict[str, Any], name: str, accepted: str) -> None:
    with pytest.raises((ValueError, TypeError), match="ReplayPrecision cannot be used with") as caught:
        ReplayPrecision(**given)

    check_message(caught.value, name, given[name], accepted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_backend_of_the_precision_without_cuda() -> None:
    with pytest.raises(ValueError, match="ReplayPrecision cannot be used with") as caught:
        ReplayPrecision(backend="cuda")

    check_message(caught.value, "backend", "cuda", "CUDA device")


def test_cuda_backend_of_the_precision_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        plugin = ReplayPrecision(backend="cuda")

    with pytest.raises(ValueError, match="ReplayPrecision cannot be used with") as caught:
        Trainer(plugins=[plugin], devices=1, **QUIET).fit(Learner(mlp()), *loader(batches()))

    check_message(caught.value, "backend", "cuda", "a CUDA device, not cpu")


def test_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        ReplayStrategy(None, "network")  # type: ignore[misc]


def test_every_argument_may_be_left_out() -> None:
    strategy = ReplayStrategy()

    assert strategy.recordings == ()
    assert strategy.report().steps_total == 0
    assert "0 in all" in str(strategy.report())
