# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The contract check sees every way in which the Lightning of this process can differ from the inspected one."""

import ast
import functools
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import CellType, CodeType, FunctionType

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization import automatic

from lightning_replay.compat import check, load_contract
from lightning_replay.compat import live as live_module
from lightning_replay.compat.live import find, functions_of, parse_code, split_name

pytestmark = pytest.mark.matrix

CONTRACT = load_contract(lightning.__version__)
PINNED = sorted(CONTRACT.functions) if CONTRACT else []


def owner_of(name):
    """The class or module that holds a pinned function, and the attribute."""
    module, path = split_name(name)
    owner = sys.modules[module]
    for part in path[:-1]:
        owner = getattr(owner, part)
    return owner, path[-1]


def rebuilt(name, folder, edit):
    """The pinned function with its syntax tree edited: same module, same name, same decorators, readable source."""
    module, value = find(name)

    def rebuild(function):
        if function is None:
            return None
        inner = inspect.unwrap(function)
        node = parse_code(inner.__code__, inner.__globals__)
        edit(node)
        node.decorator_list, decorators = [], node.decorator_list
        path = folder / f"{node.name}_{len(list(folder.iterdir()))}.py"
        # Decorators stay in the file as text, since a fingerprint counts them, but Python must not run them twice.
        head = "".join(f"@{ast.unparse(decorator)}\n" for decorator in decorators)
        path.write_text(head + ast.unparse(node), encoding="utf-8")
        outer = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        code = next(const for const in outer.co_consts if isinstance(const, CodeType) and const.co_name == node.name)
        # A method that says super() needs a cell for its class; nobody calls this one.
        names = code.co_freevars
        new = FunctionType(code, vars(module), node.name, inner.__defaults__, tuple(CellType() for _ in names))
        new.__qualname__ = inner.__qualname__
        return wrapped_like(function, new)

    if isinstance(value, property):
        return property(rebuild(value.fget), rebuild(value.fset), rebuild(value.fdel))
    new = rebuild(functions_of(value)[0])
    return type(value)(new) if isinstance(value, classmethod | staticmethod) else new


def wrapped_like(function, new):
    """Put a copy of Lightning's own decorator, if any, around a function."""
    if not hasattr(function, "__wrapped__"):
        return new
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    copy.__wrapped__ = new
    return copy


def add_statement(node):
    node.body.insert(0, ast.parse("changed = True").body[0])


def reword(node):
    node.body.insert(0, ast.parse("'A docstring.'").body[0])
    node.returns = ast.parse("'int'", mode="eval").body


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
    monkeypatch.setattr(owner, attribute, rebuilt(name, tmp_path, reword))
    assert check().known


def shadowable():
    """Every pinned method with a live object of a fit on which an attribute could hide it."""
    precisions = {"Mixed": "bf16-mixed", "Half": "bf16-true", "Double": "64-true"}
    places = {
        "Trainer": lambda t: t,
        "_FitLoop": lambda t: t.fit_loop,
        "_TrainingEpochLoop": lambda t: t.fit_loop.epoch_loop,
        "_AutomaticOptimization": lambda t: t.fit_loop.epoch_loop.automatic_optimization,
        "LightningOptimizer": lambda t: t.strategy._lightning_optimizers[0],
        "Strategy": lambda t: t.strategy,
        "SingleDeviceStrategy": lambda t: t.strategy,
        "LightningModule": lambda t: t.lightning_module,
        "ModelHooks": lambda t: t.lightning_module,
        "Profiler": lambda t: t.profiler,
        "PassThroughProfiler": lambda t: t.profiler,
        "Precision": lambda t: t.precision_plugin,
        "MixedPrecision": lambda t: t.precision_plugin,
        "HalfPrecision": lambda t: t.precision_plugin,
        "DoublePrecision": lambda t: t.precision_plugin,
    }
    for name in PINNED:
        kind, method = name.split(".")[-2:]
        is_property = isinstance(find(name)[1], property)  # which no attribute of an object can hide
        if kind in places and not is_property and not method.startswith("__"):
            precision = precisions.get(kind.removesuffix("Precision"), "32-true")
            yield pytest.param(name, method, places[kind], precision, id=name)


@pytest.mark.parametrize(("name", "method", "place", "precision"), list(shadowable()))
def test_an_attribute_that_hides_a_method_is_seen_and_named(name, method, place, precision):
    trainer = make_trainer(precision)
    value = place(trainer)
    genuine = getattr(value, method)
    vars(value)[method] = lambda *args, **kwargs: genuine(*args, **kwargs)
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


@pytest.mark.slow
def test_an_install_without_sources_is_unknown(tmp_path):
    copy = tmp_path / "lightning"
    shutil.copytree(Path(lightning.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # A release compiled for distribution: byte code beside where the source was, and no source.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", str(copy)], check=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    code = "import lightning; from lightning_replay.compat import check; print(lightning.__file__); print(check())"
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    where, verdict = result.stdout.splitlines()[-2:]
    assert where.startswith(str(copy))
    assert "known=False" in verdict
    assert "its source cannot be read" in verdict
