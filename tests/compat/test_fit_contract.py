# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""With a Lightning that is not as inspected a whole fit is native, equal to native, and says which function is why."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ContractError, Reason, ReplayStrategy
from tests.compat.patches import PINNED, add_statement, hide, owner_of, rebuilt, shadowable
from tests.helpers.trace import compare, run_fit

pytestmark = pytest.mark.matrix

STEPS = 6
SCRIPT = ["native", "native", "record", "replay", "replay", "replay"]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0].to(self.net[0].weight.dtype)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hide(Callback):
    """Hides a method of an object of the fit once all of them exist."""

    def __init__(self, place, method):
        self.place, self.method = place, method

    def on_train_start(self, trainer, pl_module):
        hide(self.place(trainer, pl_module), self.method)


def make_data():
    return DataLoader(TensorDataset(torch.randn(4 * STEPS, 4)), batch_size=4), None


def fit(strategy, precision="32-true", **options):
    return run_fit(Net, make_data, strategy, precision, max_steps=STEPS, **options)


def make_strategy(**options):
    return ReplayStrategy(backend="tape", warmup_steps=2, **options)


@cache
def native(precision="32-true"):
    return fit("auto", precision)


def assert_native(trace, precision="32-true"):
    assert trace.actions == ["native"] * STEPS
    assert trace.report.steps_replayed == 0
    assert trace.report.reasons == {Reason.UNKNOWN_CONTRACT: STEPS}
    compare(native(precision), trace)


def fit_with_messages(precision="32-true", **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trace = fit(make_strategy, precision, **options)
    return trace, [str(warning.message) for warning in caught if "unknown_contract" in str(warning.message)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_with_an_inspected_lightning_the_fit_is_replayed(precision):
    trace = fit(make_strategy, precision)
    # Without this, every other test here would also pass with replay broken altogether.
    assert trace.actions[-1] == "replay"
    assert Reason.UNKNOWN_CONTRACT not in trace.report.reasons
    compare(native(precision), trace)


def test_the_steps_of_a_known_fit_are_as_scripted():
    assert fit(make_strategy).actions[: STEPS - 1] == SCRIPT[: STEPS - 1]


@pytest.mark.parametrize("name", PINNED)
def test_a_changed_function_makes_the_fit_native_and_is_named(name, monkeypatch, tmp_path):
    native()
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, rebuilt(name, tmp_path, add_statement))
    trace, messages = fit_with_messages()
    assert_native(trace)
    (message,) = messages
    assert name in message
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize(("name", "place", "precision"), [pytest.param(*case, id=case[0]) for case in shadowable()])
def test_a_hidden_method_makes_the_fit_native_and_is_named(name, place, precision):
    trace, messages = fit_with_messages(precision, callbacks=[Hide(place, name.split(".")[-1])])
    assert_native(trace, precision)
    (message,) = messages
    assert f".{name.split('.')[-1]}\n" in message


def test_a_release_that_was_not_inspected_makes_the_fit_native(monkeypatch):
    native()
    monkeypatch.setattr(lightning, "__version__", "2.7.0")
    trace, messages = fit_with_messages()
    assert_native(trace)
    (message,) = messages
    assert "2.7.0" in message


def test_an_error_is_raised_where_native_is_not_wanted(monkeypatch, tmp_path):
    name = "lightning.pytorch.loops.optimization.automatic.Closure.closure"
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, rebuilt(name, tmp_path, add_statement))
    with pytest.raises(ContractError, match=r"automatic\.Closure\.closure"):
        fit(lambda: make_strategy(on_native="error"))


def test_the_next_fit_is_replayed_once_the_change_is_gone(monkeypatch, tmp_path):
    name = "lightning.pytorch.core.optimizer.LightningOptimizer.step"
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, rebuilt(name, tmp_path, add_statement))
    strategy = make_strategy(on_native="ignore")
    assert fit(strategy).actions == ["native"] * STEPS
    monkeypatch.undo()
    assert "replay" in fit(strategy).actions


def test_a_callback_of_builtins_does_not_disturb_the_check():
    from lightning.pytorch.callbacks import LambdaCallback

    trace = fit(make_strategy, callbacks=[LambdaCallback(on_before_zero_grad=print)])
    assert "replay" in trace.actions
    compare(native(), trace)


FIT_WITHOUT_SOURCES = """
import json, warnings
warnings.simplefilter("ignore")
import lightning
from lightning_replay.compat import check
from tests.compat.test_fit_contract import fit, make_strategy
from tests.helpers.trace import unequal
native, ours = fit("auto"), fit(make_strategy)
facts = {"where": lightning.__file__, "actions": ours.actions, "unequal": unequal(native, ours)}
facts["reasons"] = [reason.name for reason in ours.report.reasons]
print(json.dumps({**facts, "message": check().message()}))
"""


@pytest.mark.slow
def test_an_install_without_sources_makes_the_fit_native(tmp_path):
    copy = tmp_path / "lightning"
    shutil.copytree(Path(lightning.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # A release compiled for distribution: byte code beside where the source was, and no source.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", str(copy)], check=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    command = [sys.executable, "-c", FIT_WITHOUT_SOURCES]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["where"].startswith(str(copy))
    assert facts["actions"] == ["native"] * STEPS
    assert facts["reasons"] == ["UNKNOWN_CONTRACT"]
    assert facts["unequal"] == []
    assert "its source cannot be read" in facts["message"]
