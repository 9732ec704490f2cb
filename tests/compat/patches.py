# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Ways to change Lightning in this process that leave it working: what the contract check must see."""

import ast
import inspect
import sys
import textwrap
from types import CellType, CodeType, FunctionType

import lightning

from lightning_replay.compat import load_contract
from lightning_replay.compat.live import find, functions_of, parse_code, split_name

CONTRACT = load_contract(lightning.__version__)
PINNED = sorted(CONTRACT.functions) if CONTRACT else []


def owner_of(name):
    """The class or module that holds a pinned function, and the attribute."""
    module, path = split_name(name)
    owner = sys.modules[module]
    for part in path[:-1]:
        owner = getattr(owner, part)
    return owner, path[-1]


def add_statement(node):
    """Change a body without changing what it computes."""
    node.body.insert(0, ast.parse("changed = True").body[0])


def reword(node):
    """Change only what no fingerprint may see."""
    node.body.insert(0, ast.parse("'A docstring.'").body[0])
    node.returns = ast.parse("'int'", mode="eval").body


def rebuilt(name, folder, edit):
    """The pinned function with its syntax tree edited: same module, name and decorators, readable source, it works."""
    module, value = find(name)

    def rebuild(function):
        if function is None:
            return None
        inner = inspect.unwrap(function)
        node = parse_code(inner.__code__, inner.__globals__)
        edit(node)
        # The file is compiled, not run. A function around it holds the cells that the original has, such as super()'s.
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        lines = ["def around():", *(f"    {cell} = None" for cell in cells), textwrap.indent(ast.unparse(node), "    ")]
        path = folder / f"{node.name}_{len(list(folder.iterdir()))}.py"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        code = code_named(node.name, compile(path.read_text(encoding="utf-8"), str(path), "exec"))
        closure = tuple(cells[cell] for cell in code.co_freevars)
        new = FunctionType(code, vars(module), node.name, inner.__defaults__, closure)
        new.__qualname__, new.__kwdefaults__ = inner.__qualname__, inner.__kwdefaults__
        return around(function, inner, new)

    if isinstance(value, property):
        return property(rebuild(value.fget), rebuild(value.fset), rebuild(value.fdel))
    new = rebuild(functions_of(value)[0])
    return type(value)(new) if isinstance(value, classmethod | staticmethod) else new


def code_named(name, code):
    """The code of a function, somewhere inside a module's code."""
    if code.co_name == name:
        return code
    inner = (code_named(name, const) for const in code.co_consts if isinstance(const, CodeType))
    return next((found for found in inner if found is not None), None)


def around(function, inner, new):
    """Put the decorator around a function that Lightning has around the old one."""
    if function is inner:
        return new
    cells = (cell if cell.cell_contents is not inner else CellType(new) for cell in function.__closure__)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    copy.__kwdefaults__, copy.__wrapped__ = function.__kwdefaults__, new
    return copy


def shadowable():
    """Every pinned method with the object of a fit on which an attribute could hide it, and the precision it needs."""
    precisions = {"MixedPrecision": "bf16-mixed", "HalfPrecision": "bf16-true", "DoublePrecision": "64-true"}
    places = {
        "Trainer": lambda trainer, module: trainer,
        "_FitLoop": lambda trainer, module: trainer.fit_loop,
        "_TrainingEpochLoop": lambda trainer, module: trainer.fit_loop.epoch_loop,
        "_AutomaticOptimization": lambda trainer, module: trainer.fit_loop.epoch_loop.automatic_optimization,
        "LightningOptimizer": lambda trainer, module: trainer.strategy._lightning_optimizers[0],
        "Strategy": lambda trainer, module: trainer.strategy,
        "SingleDeviceStrategy": lambda trainer, module: trainer.strategy,
        "LightningModule": lambda trainer, module: module,
        "ModelHooks": lambda trainer, module: module,
        "Profiler": lambda trainer, module: trainer.profiler,
        "PassThroughProfiler": lambda trainer, module: trainer.profiler,
        "Precision": lambda trainer, module: trainer.precision_plugin,
        **dict.fromkeys(precisions, lambda trainer, module: trainer.precision_plugin),
    }
    for name in PINNED:
        kind, method = name.split(".")[-2:]
        is_property = isinstance(find(name)[1], property)  # which no attribute of an object can hide
        if kind in places and not is_property and not method.startswith("__"):
            yield name, places[kind], precisions.get(kind, "32-true")


def hide(value, method):
    """Put an attribute on an object that hides its method and calls it."""
    genuine = getattr(value, method)
    vars(value)[method] = lambda *args, **kwargs: genuine(*args, **kwargs)
