# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Hydra makes objects from `_target_`; it checks nothing, so the strategy has to."""

import copy
import pickle
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_replay import ReplayMonitor, ReplayStrategy
from tests.parity.harness import Learner, batches, loader, mlp

pytest.importorskip("hydra")
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import ListConfig, OmegaConf

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

CONFIG = """
trainer:
  _target_: lightning.pytorch.Trainer
  _convert_: all  # Lightning 2.4 takes plugins from a list, not from a ListConfig
  accelerator: cpu
  devices: 1
  max_epochs: 1
  gradient_clip_val: 1.0
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  strategy:
    _target_: lightning_replay.ReplayStrategy
    backend: tape
    warmup_steps: ${warmup}
    modules: [net]
  callbacks:
    - _target_: lightning_replay.ReplayMonitor
      log_every_n_steps: 5
      native_steps: 1
  plugins:
    - _target_: lightning_replay.ReplayPrecision
      precision: bf16-mixed
      backend: tape
warmup: 2
"""


def config() -> Any:
    return OmegaConf.create(CONFIG)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("through", [copy.deepcopy, pickled])
def test_a_configured_trainer_replays(through: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = instantiate(through(config())).trainer
    assert isinstance(trainer, Trainer)

    trainer.fit(Learner(mlp()), *loader(batches(), 8))

    assert type(trainer.strategy) is ReplayStrategy
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert any(type(callback) is ReplayMonitor for callback in trainer.callbacks)
    report = trainer.strategy.report()
    assert (report.steps_replayed, report.steps_native) == (4, 4)
    assert [recording.region for recording in report.recordings] == ["net"]
    assert "steps: 8 in all, 4 replayed" in capsys.readouterr().out


def test_lists_of_hydra_are_lists() -> None:
    names = OmegaConf.create(["net", "head"])
    assert isinstance(names, ListConfig)

    strategy = instantiate({"_target_": "lightning_replay.ReplayStrategy", "modules": names})

    assert strategy._modules == ("net", "head")
    assert all(type(name) is str for name in strategy._modules)


def test_a_partial_makes_a_strategy_for_each_trainer() -> None:
    make = instantiate({"_target_": "lightning_replay.ReplayStrategy", "_partial_": True, "backend": "tape"})

    assert type(make()) is ReplayStrategy
    assert make() is not make()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("warmup_steps", "many", "an int of at least 1"),
        ("max_recordings", 0, "an int of at least 1"),
        ("certify", "sometimes", "'auto' or 'bitwise' or 'off'"),
        ("on_native", "raise", "'warn' or 'error' or 'ignore'"),
        ("backend", "gpu", "'auto' or 'cuda' or 'tape'"),
        ("scope", None, "'network'"),
        ("capture_gradient_norm", "perhaps", "True or False"),
        ("modules", "net", "a list of dotted names"),
        ("modules", [3], "a list of dotted names"),
        ("device", "nowhere", "cuda:0"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(InstantiationException, match=f"ReplayStrategy cannot be used with {name}=") as caught:
        instantiate(OmegaConf.create({"_target_": "lightning_replay.ReplayStrategy", name: value}))

    assert accepted in str(caught.value)


def test_wrong_values_of_precision_and_monitor_are_named() -> None:
    with pytest.raises(InstantiationException, match="bf16-mixed"):
        instantiate({"_target_": "lightning_replay.ReplayPrecision", "precision": "bf16"})
    with pytest.raises(InstantiationException, match="log_every_n_steps"):
        instantiate({"_target_": "lightning_replay.ReplayMonitor", "log_every_n_steps": "5"})
