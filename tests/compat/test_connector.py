# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What the Trainer's connector makes of a ReplayStrategy on a machine with two GPUs, or what it is made to believe."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_replay import ReplayStrategy

pytestmark = pytest.mark.matrix


@pytest.fixture
def two_gpus(monkeypatch):
    for module in ("lightning.fabric.accelerators.cuda", "lightning.pytorch.accelerators.cuda"):
        monkeypatch.setattr(f"{module}.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def make(strategy, **options):
    return Trainer(strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("strategy", [ReplayStrategy, lambda: "replay"], ids=["object", "name"])
@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"accelerator": "gpu", "devices": 1}, "cuda:0"),
        ({"accelerator": "auto", "devices": 1}, "cuda:0"),
        ({"accelerator": "gpu", "devices": [1]}, "cuda:1"),
        ({"accelerator": "gpu", "devices": "1,"}, "cuda:1"),
        ({"accelerator": "cpu", "devices": 1}, "cpu"),
        ({"accelerator": "cpu"}, "cpu"),
    ],
    ids=str,
)
def test_the_device_is_the_trainers(strategy, options, device):
    trainer = make(strategy(), **options)
    assert trainer.strategy.root_device == torch.device(device)
    kind = CPUAccelerator if device == "cpu" else CUDAAccelerator
    assert isinstance(trainer.strategy.accelerator, kind)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"accelerator": "gpu", "devices": 2}, "devices"),
        ({"accelerator": "gpu", "devices": "auto"}, "devices"),
        ({"accelerator": "cpu", "devices": 2}, "devices"),
        ({"accelerator": "gpu", "devices": 1, "num_nodes": 2}, "num_nodes"),
        ({"accelerator": "gpu", "devices": 1, "sync_batchnorm": True}, "sync_batchnorm"),
    ],
    ids=str,
)
def test_what_a_single_device_cannot_do_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named) as caught:
        make(ReplayStrategy(), **options)
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_the_precision_is_the_trainers(precision):
    plugin = make(ReplayStrategy(), accelerator="cpu", precision=precision).precision_plugin
    native = make("auto", accelerator="cpu", precision=precision).precision_plugin
    # A checkpoint keeps the plugin's state under this name.
    assert type(plugin).__qualname__ == type(native).__qualname__
    assert plugin.precision == native.precision


def test_a_precision_plugin_of_the_users_own_is_kept():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert make(ReplayStrategy(), accelerator="cpu", plugins=[plugin]).precision_plugin is plugin


def test_a_trainer_keeps_its_plugins_after_a_fit():
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_model_summary": False}
    trainer = make(ReplayStrategy(backend="tape"), precision="bf16-mixed", **options)
    precision, accelerator = trainer.precision_plugin, trainer.accelerator
    module = BoringModel()
    trainer.fit(module)
    assert trainer.precision_plugin is precision
    assert trainer.accelerator is accelerator
    trainer.validate(module, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    assert trainer.global_step == 4


def test_a_strategy_serves_several_trainers():
    strategy = ReplayStrategy(backend="tape")
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_model_summary": False}
    for precision in ("bf16-mixed", "64-true", "32-true"):
        trainer = make(strategy, precision=precision, **options)
        trainer.fit(BoringModel())
        assert trainer.precision_plugin.precision == precision
    assert strategy.report().steps_total == 6
