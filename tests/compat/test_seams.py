# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Each seam gives what its name says, on every release."""

import ast
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.compile import from_compiled

from lightning_replay.compat import seams

pytestmark = pytest.mark.matrix


def test_wrappers_of_the_optimizers_are_found():
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    assert seams.lightning_optimizers(trainer) == []
    trainer.fit(BoringModel())
    (wrapper,) = seams.lightning_optimizers(trainer)
    assert type(wrapper).__name__ == "LightningSGD"


def test_a_compiled_module_is_told_apart():
    module = BoringModel()
    assert not seams.is_compiled(module)
    assert seams.is_compiled(from_compiled(torch.compile(module, backend="eager")))


def test_a_step_that_fetches_its_own_batches_is_told_apart():
    class Fetches(BoringModel):
        def training_step(self, dataloader_iter):
            return None

    assert seams.takes_dataloader_iter(Fetches())
    assert not seams.takes_dataloader_iter(BoringModel())


def test_own_hooks_are_told_apart_from_inherited_ones():
    class Overrides(LightningModule):
        def on_before_zero_grad(self, optimizer):
            pass

    on_object = LightningModule()
    on_object.on_before_zero_grad = print
    assert seams.has_own_hook(Overrides(), "on_before_zero_grad", LightningModule)
    assert seams.has_own_hook(on_object, "on_before_zero_grad", LightningModule)
    assert not seams.has_own_hook(LightningModule(), "on_before_zero_grad", LightningModule)
    # Lightning's is_overridden raises AttributeError here.
    assert seams.has_own_hook(LambdaCallback(on_before_zero_grad=print), "on_before_zero_grad", Callback)
    assert not seams.has_own_hook(Callback(), "on_before_zero_grad", Callback)


def test_the_objects_of_a_step_are_all_named():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module = BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    named = {where: value for where, value, _ in seams.step_objects(trainer)}
    assert named["trainer.lightning_module"] is module
    assert named["trainer.strategy"] is trainer.strategy
    assert named["trainer.precision_plugin"] is trainer.precision_plugin
    assert named["trainer.strategy._lightning_optimizers[0]"].optimizer is trainer.optimizers[0]
    assert len(named) == 9


# Documented places to import from. Everything else of Lightning belongs behind a seam.
ROOMS = r"accelerators|callbacks|loggers|plugins|profilers|strategies|trainer\.states"
PUBLIC = re.compile(rf"lightning(\.(pytorch|fabric)(\.({ROOMS})(\..*)?)?)?")


def reaches(tree):
    """What a module takes from inside Lightning."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            names = [alias.name for alias in node.names]
            if not PUBLIC.fullmatch(node.module) or any(name.startswith("_") for name in names):
                yield f"line {node.lineno}: from {node.module} import {', '.join(names)}"
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if private and re.search(r"\b(trainer|fit_loop|epoch_loop|lightning_module)\b", ast.unparse(node.value)):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "text", ["from lightning.pytorch.loops import _FitLoop", "module.trainer._results", "import lightning"]
)
def test_a_reach_is_told_apart(text):
    assert bool(list(reaches(ast.parse(text)))) is (text != "import lightning")


def test_only_this_room_reaches_into_lightning():
    package = Path(seams.__file__).parents[1]
    paths = [path for path in package.rglob("*.py") if path.parent != Path(seams.__file__).parent]
    found = [f"{path.name} {reach}" for path in paths for reach in reaches(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(paths) > 10
    assert found == []
