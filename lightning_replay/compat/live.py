# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The pinned functions as they are in the running process, monkeypatched ones included."""

import inspect
import linecache
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType, ModuleType

from lightning_replay.compat.fingerprint import FunctionNode, fingerprint, parse_function, wrappers

# Where Lightning's own decorators and imports come from. Anything else was put there by somebody else.
_HOMES = {"contextlib", "lightning", "lightning_utilities", "torch"}


class LookupFailed(Exception):
    """A pinned function is missing, replaced or unreadable. The message says what was found instead."""


@cache
def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Split a dotted name into module and path inside it: private names aside, classes are capitalised.

    Args:
        name: For example ``lightning.pytorch.core.optimizer.LightningOptimizer.step``.
    """
    parts = name.split(".")
    cut = len(parts) - (2 if parts[-2].lstrip("_")[:1].isupper() else 1)
    return ".".join(parts[:cut]), tuple(parts[cut:])


def find(name: str) -> tuple[ModuleType, object]:
    """Return the module of a pinned function and what its name is bound to there right now.

    Args:
        name: The dotted name from the contract.

    Raises:
        LookupFailed: Module, class or function do not exist, or the class is another one.
    """
    module_name, path = split_name(name)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise LookupFailed(f"the module cannot be imported ({error})") from None
    if len(path) == 1:
        value = vars(module).get(path[0])
    else:
        owner = vars(module).get(path[0])
        if not isinstance(owner, type) or (owner.__module__, owner.__qualname__) != (module_name, path[0]):
            raise LookupFailed(f"{module_name}.{path[0]} is {_describe(owner)}")
        value = vars(owner).get(path[1])
    if value is None:
        raise LookupFailed("it does not exist")
    return module, value


def check_imports(name: str, pinned: Collection[str]) -> None:
    """Check that the pinned modules which imported a pinned class or function still hold it and no other.

    ``from module import Class`` makes a second binding, and a patch may replace only that one.

    Args:
        name: The dotted name from the contract.
        pinned: Every name in the contract.

    Raises:
        LookupFailed: A module holds something else under that name.
    """
    home, path = split_name(name)
    genuine = vars(import_module(home))[path[0]]
    for module_name in _modules(frozenset(pinned)):
        held = vars(import_module(module_name)).get(path[0], genuine)
        if held is not genuine and not _is_at_home(held):
            raise LookupFailed(f"{module_name}.{path[0]} is {_describe(held)}")


def _is_at_home(value: object) -> bool:
    """Tell whether Lightning itself defines an object: it has a few names twice, such as Precision."""
    home, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return home.split(".")[0] in _HOMES and vars(import_module(home)).get(name) is value


@cache
def _modules(pinned: frozenset[str]) -> list[str]:
    return sorted({split_name(name)[0] for name in pinned})


def functions_of(value: object) -> list[object]:
    """Return the functions behind an attribute of a class: of a property its getter, setter and deleter."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset, value.fdel) if part is not None]
    return [value.__func__] if isinstance(value, classmethod | staticmethod) else [value]


# The parts of each pinned function at the last look, and its fingerprint then. Objects are kept, not their ids, since
# an id is used again.
_looks: dict[str, tuple[list[object], str]] = {}


def live_fingerprint(name: str) -> str:
    """Return the fingerprint of what a pinned name is bound to right now.

    Args:
        name: The dotted name from the contract.

    Raises:
        LookupFailed: It is not a function of its module, is wrapped by a stranger, or has no readable source.
    """
    module, value = find(name)
    functions = functions_of(value)
    parts = [part for function in functions for part in _parts(function)]
    known = _looks.get(name)
    if known is None or not _same(known[0], parts):
        known = parts, fingerprint([_definition(module, function) for function in functions])
        _looks[name] = known
    return known[1]


def _parts(function: object) -> Iterator[object]:
    """Yield the objects whose identity says that nothing was replaced since the last look."""
    while function is not None:
        yield function
        yield getattr(function, "__code__", None)
        function = getattr(function, "__wrapped__", None)


def _same(before: list[object], now: list[object]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _definition(module: ModuleType, function: object) -> FunctionNode:
    """Return the syntax tree behind a live function."""
    outer, layers = function, 0
    while hasattr(function, "__wrapped__"):
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.split(".")[0] not in _HOMES:
            raise LookupFailed(f"it is wrapped by {_describe(function)}")
        function, layers = function.__wrapped__, layers + 1
    if not isinstance(function, FunctionType):
        raise LookupFailed(f"it is {_describe(function)}")
    if function.__globals__ is not vars(module):
        raise LookupFailed(f"it is {_describe(function)}")
    node = parse_code(function.__code__, function.__globals__)
    if layers != wrappers(node):
        raise LookupFailed(f"it is wrapped by {_describe(outer)}")
    return node


def parse_code(code: CodeType, namespace: dict[str, object]) -> FunctionNode:
    """Return the syntax tree of the function that a code object was compiled from.

    Args:
        code: The code object.
        namespace: Its globals, through which sources inside an archive are found.

    Raises:
        LookupFailed: The source cannot be read.
    """
    where = f"{code.co_filename}:{code.co_firstlineno}"
    lines = linecache.getlines(code.co_filename, namespace)[code.co_firstlineno - 1 :]
    if not lines:
        raise LookupFailed(f"its source cannot be read ({where})")
    try:
        node = parse_function("".join(inspect.getblock(lines)))
    except SyntaxError as error:
        raise LookupFailed(f"its source is no function definition ({where}: {error})") from None
    if node.name != code.co_name:
        raise LookupFailed(f"its source is another function's ({where}: {node.name})")
    return node


def _describe(value: object) -> str:
    """Name an object the way a person would look for it."""
    if value is None:
        return "missing"
    kind = value if isinstance(value, type | FunctionType) else type(value)
    described = f"{kind.__module__}.{kind.__qualname__}"
    code = getattr(value, "__code__", None)
    return f"{described} ({code.co_filename}:{code.co_firstlineno})" if isinstance(code, CodeType) else described
