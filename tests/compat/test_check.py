# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The contract check sees every way in which the Lightning of this process can differ from the inspected one."""

import functools
import os
import sys

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization import automatic

from lightning_replay.compat import check
from lightning_replay.compat import live as live_module
from lightning_replay.compat.live import find, functions_of, split_name
from tests.compat.patches import CONTRACT, PINNED, add_statement, hide, owner_of, rebuilt, reword, shadowable

pytestmark = pytest.mark.matrix


@pytest.fixture
def trainer():
    return make_trainer()


def make_trainer(precision="32-true", kind=pl.Trainer):
    trainer = kind(accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False, barebones=False)
    module = BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    return trainer


def test_this_is_the_release_that_the_matrix_asked_for():
    assert lightning.__version__ == os.environ.get("EXPECTED_LIGHTNING", lightning.__version__)


def test_an_inspected_release_is_known(trainer):
    assert check().known
    assert check(trainer).known
    assert check().message() == f"Lightning {lightning.__version__} is as inspected."


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_is_known(precision):
    assert check(make_trainer(precision)).known


@pytest.mark.parametrize("name", PINNED)
def test_a_changed_body_is_seen_and_named(name, monkeypatch, tmp_path):
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, rebuilt(name, tmp_path, add_statement))
    verdict = check()
    assert not verdict.known
    assert verdict.function == name
    assert "it behaves otherwise" in verdict.actual
    assert CONTRACT.functions[name] in verdict.expected
    monkeypatch.undo()
    assert check().known


@pytest.mark.parametrize("name", PINNED)
def test_a_body_that_is_only_reworded_is_known(name, monkeypatch, tmp_path):
    owner, attribute = owner_of(name)
    genuine, new = vars(owner)[attribute], rebuilt(name, tmp_path, reword)
    for module in [owner, *(sys.modules[split_name(pinned)[0]] for pinned in PINNED)]:
        # A function of a module is bound again wherever it was imported.
        if vars(module).get(attribute) is genuine:
            monkeypatch.setattr(module, attribute, new)
    assert check().known


@pytest.mark.parametrize(("name", "place", "precision"), [pytest.param(*case, id=case[0]) for case in shadowable()])
def test_an_attribute_that_hides_a_method_is_seen_and_named(name, place, precision):
    trainer = make_trainer(precision)
    value, method = place(trainer, trainer.lightning_module), name.split(".")[-1]
    hide(value, method)
    verdict = check(trainer)
    assert not verdict.known
    # A method that is overridden on the way has two pinned names; both are right.
    assert verdict.function.endswith(f".{method}")
    assert "hides it" in verdict.actual
    assert check().known
    del vars(value)[method]
    assert check(trainer).known


@pytest.mark.parametrize("name", [name for name in PINNED if not isinstance(find(name)[1], property)])
def test_a_wrapper_is_seen_though_it_carries_wrapped(name, monkeypatch):
    owner, attribute = owner_of(name)
    value = vars(owner)[attribute]

    @functools.wraps(functions_of(value)[0])
    def around(*args, **kwargs):
        return around.__wrapped__(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, type(value)(around) if isinstance(value, classmethod) else around)
    verdict = check()
    assert (verdict.known, verdict.function) == (False, name)
    assert "wrapped by" in verdict.actual


def test_a_second_layer_of_a_decorator_that_lightning_uses_is_seen(monkeypatch):
    monkeypatch.setattr(automatic.Closure, "__call__", torch.no_grad()(automatic.Closure.__call__))
    assert check().function.endswith("automatic.Closure.__call__")


def test_a_swapped_code_object_is_seen(monkeypatch):
    def consume_result(self):
        return self._result

    monkeypatch.setattr(automatic.Closure.consume_result, "__code__", consume_result.__code__)
    assert check().function.endswith("AbstractClosure.consume_result")


def test_a_replaced_closure_class_is_seen(monkeypatch):
    monkeypatch.setattr(automatic, "Closure", type("Closure", (automatic.Closure,), {}))
    verdict = check()
    assert not verdict.known
    assert ".Closure." in verdict.function


def test_a_class_replaced_only_where_it_was_imported_is_seen(monkeypatch):
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import strategy

    monkeypatch.setattr(strategy, "LightningOptimizer", type("LightningOptimizer", (LightningOptimizer,), {}))
    verdict = check()
    assert not verdict.known
    assert "strategies.strategy.LightningOptimizer is" in verdict.actual


def test_a_function_wrapped_only_where_it_was_imported_is_seen(monkeypatch):
    from lightning.pytorch.strategies import strategy

    genuine = strategy._init_optimizers_and_lr_schedulers
    monkeypatch.setattr(strategy, genuine.__name__, functools.wraps(genuine)(lambda model: genuine(model)))
    verdict = check()
    assert verdict.function.endswith("core.optimizer._init_optimizers_and_lr_schedulers")
    assert "strategies.strategy._init_optimizers_and_lr_schedulers is" in verdict.actual


def test_a_removed_function_is_seen(monkeypatch):
    monkeypatch.delattr(automatic.Closure, "__call__")
    verdict = check()
    assert verdict.function.endswith("automatic.Closure.__call__")
    assert "does not exist" in verdict.actual


def test_a_builtin_is_seen(monkeypatch):
    monkeypatch.setattr(automatic.Closure, "closure", print)
    assert check().function.endswith("automatic.Closure.closure")


def test_a_subclassed_loop_is_seen(trainer):
    genuine = trainer.fit_loop
    trainer.fit_loop = type("MyFitLoop", (type(genuine),), {})(trainer)
    verdict = check(trainer)
    assert not verdict.known
    assert verdict.function.endswith("_FitLoop.run")
    assert "MyFitLoop" in verdict.actual

    trainer.fit_loop = genuine
    epoch_loop = genuine.epoch_loop
    automatic_loop = epoch_loop.automatic_optimization
    epoch_loop.automatic_optimization = type("MyAutomatic", (type(automatic_loop),), {})(trainer)
    assert check(trainer).function.endswith("_AutomaticOptimization.run")

    epoch_loop.automatic_optimization = automatic_loop
    epoch_loop.__class__ = type("MyEpochLoop", (type(epoch_loop),), {})
    assert check(trainer).function.endswith("_TrainingEpochLoop.run")


def test_a_trainer_that_overrides_a_pinned_method_is_seen():
    class MyTrainer(pl.Trainer):
        def _run_stage(self):
            return super()._run_stage()

    class Plain(pl.Trainer):
        pass

    assert check(make_trainer(kind=Plain)).known
    verdict = check(make_trainer(kind=MyTrainer))
    assert verdict.function == "lightning.pytorch.trainer.trainer.Trainer._run_stage"
    assert "MyTrainer" in verdict.actual


def test_an_optimizer_wrapper_of_the_users_own_is_seen(trainer):
    from lightning.pytorch.core.optimizer import LightningOptimizer

    class Mine(LightningOptimizer):
        def step(self, closure=None, **kwargs):
            return super().step(closure, **kwargs)

    trainer.strategy.optimizers = [Mine(torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.1))]
    assert check(trainer).function == "lightning.pytorch.core.optimizer.LightningOptimizer.step"


@pytest.mark.parametrize("version", ["2.7.0", "2.3.3", "2.6.6+mine", "unreadable"])
def test_a_release_that_was_not_inspected_is_unknown(version, monkeypatch):
    monkeypatch.setattr(lightning, "__version__", version)
    verdict = check()
    assert (verdict.known, verdict.function, verdict.version) == (False, None, version)
    assert "2.4.0 to 2.6.6" in verdict.expected


def test_the_message_has_five_parts(monkeypatch):
    monkeypatch.setattr(automatic.Closure, "closure", print)
    verdict = check()
    lines = verdict.message().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(f"Lightning {lightning.__version__} is not as inspected")
    assert verdict.function in lines[1]
    assert verdict.expected in lines[2]
    assert verdict.actual in lines[3]
    assert "install an inspected release" in lines[4]


def test_the_second_check_reads_no_source(monkeypatch):
    assert check().known
    monkeypatch.setattr(live_module, "parse_code", lambda *args: pytest.fail("source was read again"))
    assert check().known
