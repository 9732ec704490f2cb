# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a forward pass may read, found in its code: attribute names, globals and closure variables.

A change of an attribute whose name appears nowhere cannot matter to it. A global or closure variable that does appear
is watched like an attribute.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.nn import Module

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "eval", "exec", "hasattr", "attrgetter", "__getattribute__"})
_LIBRARIES = frozenset(
    {"torch", "torchmetrics", "numpy", "math", "builtins"}
    | {"lightning", "lightning_fabric", "lightning_replay", "lightning_utilities", "pytorch_lightning"}
)


def package_of(item: Any) -> str:
    """Returns the top-level package that a class or function was defined in."""
    return (item.__module__ or "").split(".")[0]


@dataclass(frozen=True)
class Reads:
    """What code may read.

    Attributes:
        names: Attribute names; None if code looks attributes up dynamically and may read any.
        variables: Name and getter of each global and closure variable.
    """

    names: frozenset[str] | None
    variables: tuple[tuple[str, Callable[[], Any]], ...]


_Variables = dict[Any, tuple[str, Callable[[], Any]]]


def find_reads(
    classes: Iterable[type],
    types: Iterable[type] = (),
    functions: Iterable[FunctionType] = (),
    entry: tuple[type, FunctionType | None] = (Module, None),
) -> Reads:
    """Returns what the forward passes of these module classes may read.

    Methods and properties reachable by name from a forward pass, and Python functions it refers to by a global name,
    are followed; the code of torch and Lightning is trusted to read nothing that changes. The names are an upper bound:
    a name counts wherever it appears.

    Args:
        classes: The classes of the modules.
        types: Classes of objects that the modules hold; their methods may be called.
        functions: Functions that the modules hold.
        entry: A class, and a function of it that runs too.
    """
    names: set[str] | None = set()
    variables: _Variables = {}
    others = tuple(sorted(set(types), key=id))
    starts: list[tuple[type, FunctionType | None]] = [(cls, None) for cls in classes] + [
        (Module, function) for function in functions
    ]
    starts += [entry] if entry[1] is not None else []
    for cls, function in starts:
        found, more = _reads_of(cls, function, others)
        names = None if names is None or found is None else names | found
        variables |= more
    return Reads(None if names is None else frozenset(names), tuple(variables.values()))


@functools.lru_cache(maxsize=4096)
def _reads_of(
    cls: type, start: FunctionType | None, others: tuple[type, ...]
) -> tuple[frozenset[str] | None, _Variables]:
    names: set[str] = set()
    dynamic = any(_looks_attributes_up(owner) for owner in (cls, *others))
    variables: _Variables = {}
    pending: list[Any] = [start] if start is not None else _definitions(cls, "forward")
    if start is None and cls.__call__ is not Module.__call__:
        pending += _definitions(cls, "__call__")
    for other in others:
        for name in _implicit_methods(other):
            pending += _definitions(other, name)
    done: set[FunctionType] = set()
    while pending:
        item = pending.pop()
        if not isinstance(item, FunctionType):
            pending += _inner(item)
            continue
        if item in done:
            continue
        done.add(item)
        pending += _inner(item)
        library = package_of(item) in _LIBRARIES
        if library and not _is_method(cls, item):
            continue
        for code in _codes(item.__code__):
            dynamic |= not library and not _DYNAMIC.isdisjoint(code.co_names)
            names.update(code.co_names)
            for name in code.co_names:
                for owner in (cls, *others):
                    # A run makes new objects, but not its module anew.
                    pending += _definitions(owner, name) if owner is not cls or name != "__init__" else ()
                if not library and name in item.__globals__:
                    pending.append(item.__globals__[name])
            if not library:
                variables.update(_variables(item, code))
    for owner in (cls, *others):
        variables.update(_class_members(owner, names))
    return None if dynamic else frozenset(names), variables


def _variables(function: FunctionType, code: CodeType) -> Iterator[tuple[Any, tuple[str, Callable[[], Any]]]]:
    """Yields the global variables a code object names, those of modules and classes it names, and closure variables."""
    where = function.__module__
    for name in code.co_names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield (id(function.__globals__), name), (f"{where}.{name}", functools.partial(function.__globals__.get, name))
        yield from _inside(where, name, value, code.co_names)
    for name in code.co_names:  # imported by the function itself
        if name not in function.__globals__ and name in sys.modules:
            yield from _inside(where, name, sys.modules[name], code.co_names)
    yield id(function), (f"{function.__qualname__}'s defaults", functools.partial(getattr, function, "__defaults__"))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield id(cell), (f"{function.__qualname__}.<{name}>", functools.partial(_contents, cell))


def _inside(
    where: str, name: str, value: Any, names: Iterable[str], depth: int = 3
) -> Iterator[tuple[Any, tuple[str, Callable[[], Any]]]]:
    """Yields what a module or class holds under names that code uses, and what modules and classes in it do."""
    if not isinstance(value, (ModuleType, type)) or not depth:
        return
    package = value.__name__.split(".")[0] if isinstance(value, ModuleType) else package_of(value)
    if package in _LIBRARIES or package in sys.stdlib_module_names:
        return
    for inner in names:
        if inner in vars(value):
            path = f"{where}.{name}.{inner}"
            yield (id(value), inner), (path, functools.partial(vars(value).get, inner))
            yield from _inside(f"{where}.{name}", inner, vars(value)[inner], names, depth - 1)


def _class_members(cls: type, names: Iterable[str]) -> Iterator[tuple[Any, tuple[str, Callable[[], Any]]]]:
    """Yields what classes of a user's own hold under names that are read: class attributes and methods."""
    bases = _own_bases(cls)
    for name in names:
        if any(name in base.__dict__ for base in bases):
            for base in bases:
                path = f"{base.__module__}.{base.__qualname__}.{name}"
                yield (id(base), name), (path, functools.partial(vars(base).get, name))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _definitions(cls: type, name: str) -> list[Any]:
    """Returns every definition of a name along the method resolution order: super() may reach any of them."""
    bases = (base for base in cls.__mro__ if base is not Module and base is not object)
    return [base.__dict__[name] for base in bases if name in base.__dict__]


def _inner(item: Any) -> list[Any]:
    """Returns what is called when something is called: what a method, a property, a partial or a decorator wraps."""
    if isinstance(item, property):
        return [item.fget]
    if isinstance(item, (staticmethod, classmethod, MethodType)):
        return [item.__func__]
    if isinstance(item, (functools.partial, functools.partialmethod, functools.cached_property)):
        return [item.func]
    if isinstance(item, functools.singledispatchmethod):
        return [item.func, *item.dispatcher.registry.values()]
    wrapped = getattr(item, "__wrapped__", None) if callable(item) and not isinstance(item, type) else None
    if not isinstance(item, FunctionType):
        return [] if wrapped is None else [wrapped]
    kept = [wrapped, *map(_contents, item.__closure__ or ())]
    return [inner for inner in kept if isinstance(inner, (FunctionType, MethodType, functools.partial))]


def _is_method(cls: type, function: FunctionType) -> bool:
    """Tells whether a function is a method, or the getter of a property, of a class."""
    members = (member for base in cls.__mro__ for member in vars(base).values())
    return any(function is member or any(function is inner for inner in _inner(member)) for member in members)


def _own_bases(cls: type) -> list[type]:
    """Returns a class and its bases as far as no library defines them."""
    return [base for base in cls.__mro__ if package_of(base) not in _LIBRARIES]


def _looks_attributes_up(cls: type) -> bool:
    """Tells whether a class of a user's own decides in code what an attribute is."""
    return any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in _own_bases(cls))


def _implicit_methods(cls: type) -> list[str]:
    """Returns the methods of an object's class that run without being named: calls, operators, a module's forward."""
    names = {name for base in _own_bases(cls) for name in vars(base) if name.startswith("__") and name.endswith("__")}
    return sorted((names | {"__call__", "forward"}) - {"__init__", "__new__", "__repr__", "__eq__", "__hash__"})


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
