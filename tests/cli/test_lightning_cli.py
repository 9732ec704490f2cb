# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""LightningCLI and jsonargparse: every spelling that a configuration or a command line may use."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayMonitor, ReplayStrategy

pytest.importorskip("jsonargparse")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning 2.4 uses what newer releases of jsonargparse deprecate
    from lightning.pytorch.cli import LightningCLI

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Small(LightningModule):
    """Brings its own data, so that a configuration of the Trainer is all that is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(*arguments: str, run: bool = False, **trainer: Any) -> LightningCLI:
    """Makes a CLI from a configuration file of the Trainer and further arguments."""
    Path("given.yaml").write_text(yaml.safe_dump({"trainer": {**QUIET, **trainer}}))
    command = ["fit"] if run else []
    words = [*command, "--config=given.yaml", *arguments]
    return LightningCLI(Small, run=run, args=words, seed_everything_default=False)


def trainer_of(*arguments: str, **trainer: Any) -> Trainer:
    return make(*arguments, **trainer).trainer


def given(**init_args: Any) -> dict[str, Any]:
    return {"class_path": "lightning_replay.ReplayStrategy", "init_args": init_args}


# -- spellings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    ["replay", "ReplayStrategy", "lightning_replay.ReplayStrategy", {"class_path": "lightning_replay.ReplayStrategy"}],
    ids=str,
)
def test_in_a_configuration(strategy: Any) -> None:
    assert type(trainer_of(strategy=strategy).strategy) is ReplayStrategy


@pytest.mark.parametrize("name", ["replay", "ReplayStrategy", "lightning_replay.ReplayStrategy"])
def test_on_the_command_line(name: str) -> None:
    assert type(trainer_of(f"--trainer.strategy={name}").strategy) is ReplayStrategy


@pytest.mark.parametrize("name", ["ReplayStrategy", "lightning_replay.ReplayStrategy"])
def test_with_arguments_on_the_command_line(name: str) -> None:
    cli = make(f"--trainer.strategy={name}", "--trainer.strategy.warmup_steps=5", "--trainer.strategy.modules=[net]")

    assert cli.config.trainer.strategy.init_args.warmup_steps == 5
    assert cli.config.trainer.strategy.init_args.modules == ["net"]
    assert type(cli.trainer.strategy) is ReplayStrategy


def test_every_argument_arrives() -> None:
    arguments = {
        "device": "cpu",
        "scope": "network",
        "modules": ["net.0", "net.2"],
        "warmup_steps": 1,
        "max_recordings": 2,
        "certify": "bitwise",
        "capture_gradient_norm": False,
        "on_native": "ignore",
        "backend": "tape",
    }

    cli = make(strategy=given(**arguments))

    received = cli.config.trainer.strategy.init_args.as_dict()
    assert {name: received[name] for name in arguments} == arguments
    assert cli.trainer.strategy.root_device == torch.device("cpu")


def test_a_device_is_an_index_or_a_name() -> None:
    for device in (1, "cuda:1"):
        with pytest.raises(ValueError, match="device='cuda:1'"):  # not the Trainer's: here that is a CPU
            trainer_of(strategy=given(device=device))


def test_a_fit_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    cli = make(
        run=True,
        strategy=given(backend="tape", warmup_steps=2, modules=["net"]),
        callbacks=[
            {"class_path": "lightning_replay.ReplayMonitor", "init_args": {"log_every_n_steps": 5, "native_steps": 1}}
        ],
        max_epochs=1,
        gradient_clip_val=1.0,
    )

    report = cli.trainer.strategy.report()
    assert (report.steps_replayed, report.steps_native) == (6, 4)
    assert [recording.region for recording in report.recordings] == ["net"]
    assert report.norm_replays > 0
    assert "steps: 10 in all, 6 replayed" in capsys.readouterr().out


def test_precision_and_monitor_by_class_path() -> None:
    trainer = trainer_of(
        plugins=[{"class_path": "lightning_replay.ReplayPrecision", "init_args": {"precision": "bf16-mixed"}}],
        callbacks=[{"class_path": "lightning_replay.ReplayMonitor"}],
    )

    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert trainer.precision_plugin.last_gradient_norm is None
    assert sum(type(callback) is ReplayMonitor for callback in trainer.callbacks) == 1


def test_precision_of_the_strategy() -> None:
    plugin = {"class_path": "lightning_replay.ReplayPrecision", "init_args": {"precision": "bf16-mixed"}}

    trainer = trainer_of(strategy=given(precision_plugin=plugin))

    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert trainer.precision_plugin.last_gradient_norm is None


# -- round trips ------------------------------------------------------------------------------------------------------


def test_a_printed_configuration_gives_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"warmup_steps": 7, "modules": ["net"], "certify": "off"}
    monitor = {"class_path": "lightning_replay.ReplayMonitor", "init_args": {"log_every_n_steps": 9}}
    with pytest.raises(SystemExit) as ended:
        make("--print_config", strategy=given(**arguments), callbacks=[monitor])
    printed = capsys.readouterr().out

    assert ended.value.code == 0
    assert "Unable to serialize" not in printed
    written = yaml.safe_load(printed)["trainer"]
    assert written["strategy"]["class_path"] == "lightning_replay.ReplayStrategy"
    assert arguments.items() <= {k: v for k, v in written["strategy"]["init_args"].items() if k in arguments}.items()
    again = make(**written)
    assert again.config.trainer.strategy.as_dict() == written["strategy"]
    assert again.config.trainer.callbacks[0].init_args.log_every_n_steps == 9


def test_configurations_can_be_copied_and_pickled() -> None:
    cli = make(strategy=given(warmup_steps=7, modules=["net"]))
    config = cli.config

    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.trainer.strategy.as_dict() == config.trainer.strategy.as_dict()
        instances = cli.parser.instantiate_classes(copied)
        assert type(instances.trainer.strategy) is ReplayStrategy


def test_the_configuration_is_saved_with_the_run() -> None:
    cli = make(run=True, strategy=given(backend="tape", on_native="ignore"), max_steps=2, logger=True)

    (saved,) = Path(cli.trainer.log_dir).glob("config.yaml")
    strategy = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_replay.ReplayStrategy"
    assert strategy["init_args"]["backend"] == "tape"


def test_help_describes_each_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make("--trainer.strategy.help=lightning_replay.ReplayStrategy")

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for text in ("--trainer.strategy.warmup_steps", "Native steps with a signature", "{auto,bitwise,off}"):
        assert text in shown


# -- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("certify", "sometimes", ["auto", "bitwise", "off"]),
        ("on_native", "raise", ["warn", "error", "ignore"]),
        ("backend", "gpu", ["auto", "cuda", "tape"]),
        ("scope", "everything", ["network"]),
        ("warmup_steps", "many", ["int"]),
        ("max_recordings", 2.5, ["int"]),
        ("capture_gradient_norm", "perhaps", ["bool"]),
        ("modules", 3, ["Sequence", "null"]),
        ("warm_up_steps", 3, ["ReplayStrategy"]),
    ],
)
def test_the_parser_names_the_parameter_and_what_is_accepted(
    name: str, value: Any, accepted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        make(strategy=given(**{name: value}))

    said = capsys.readouterr().err
    assert ended.value.code == 2
    for text in (name, *accepted):
        assert text in said


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("warmup_steps", 0, "an int of at least 1"),
        ("modules", [], "at least one name"),
        ("device", "nowhere", "cuda:0"),
    ],
)
def test_what_passes_the_parser_is_refused_by_the_strategy(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"ReplayStrategy cannot be used with {name}=") as caught:
        make(strategy=given(**{name: value}))

    assert accepted in str(caught.value)


def test_wrong_values_of_precision_and_monitor() -> None:
    precision = {"class_path": "lightning_replay.ReplayPrecision", "init_args": {"precision": "bf16"}}
    monitor = {"class_path": "lightning_replay.ReplayMonitor", "init_args": {"log_every_n_steps": 0}}

    with pytest.raises((SystemExit, ValueError)) as caught:
        make(plugins=[precision])
    assert isinstance(caught.value, SystemExit) or "bf16-mixed" in str(caught.value)
    with pytest.raises(ValueError, match="ReplayMonitor cannot be used with log_every_n_steps=0"):
        make(callbacks=[monitor])
