# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a forward pass may read, found in its code: attribute names, globals and closure variables.

A change of an attribute whose name appears nowhere cannot matter to it. A global or closure variable that does appear
is watched like an attribute.
"""

import functools
import opcode
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_replay.guards.contents import SCALARS, is_container, is_installed, is_library, package_of, parts

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "eval", "exec", "hasattr", "attrgetter", "__getattribute__"})
_CALLED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods that torch calls: of a module, of a function of autograd."""
_NOT_CALLED = frozenset({"__del__", "__dir__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"})
_MATCH_CLASS = opcode.opmap["MATCH_CLASS"]

MAX_DEPTH = 4
"""How deep containers inside containers are looked into."""


@dataclass(frozen=True)
class Reads:
    """What code may read.

    Attributes:
        names: Attribute names; None if code looks attributes up dynamically and may read any.
        variables: Name and getter of each global and closure variable.
        functions: Whose code that is: another body or other defaults would read something else.
    """

    names: frozenset[str] | None
    variables: tuple[tuple[str, Callable[[], Any]], ...]
    functions: tuple[FunctionType, ...] = ()


_Variable = tuple[Any, tuple[str, Callable[[], Any]]]


def find_reads(
    classes: Iterable[type],
    held: Iterable[dict[str, Any]] = (),
    given: Iterable[Any] = (),
    entry: tuple[type, FunctionType | None] = (Module, None),
) -> Reads:
    """Returns what the forward passes of these module classes may read.

    Methods and properties with a name that appears in code that may run, and functions, classes and objects that code
    refers to, are followed; the code of torch, Lightning and the standard library is trusted to read nothing that
    changes. All of it is an upper bound: a name counts wherever it appears.

    Args:
        classes: The classes of the modules.
        held: The attributes of each module; the code of those that are read may run.
        given: More whose code may run.
        entry: A class, and a function of it that runs too.
    """
    objects = (type(v) for attributes in held for v in attributes.values() if is_container(v))
    code = _Code({package_of(cls) for cls in (*classes, *objects)})
    for cls in classes:
        code.add_class(cls)
        code.dynamic |= _looks_attributes_up(cls)
    for attributes in held:
        code.add_attributes(attributes)
    for value in (*given, entry[1]):
        code.add(value)
    code.follow()
    return Reads(None if code.dynamic else frozenset(code.names), tuple(code.variables()), tuple(code.functions))


class _Code:
    """Code that may run: grows until nothing that it names leads to more.

    Of functions of installed packages other than those that the modules and their attributes come from, what they read
    of attributes counts, and nothing else.

    Args:
        packages: Where the modules, and the objects among their attributes, come from.
    """

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self.names: set[str] = set()
        self.dynamic = False
        self.functions: dict[FunctionType, None] = {}
        self._variables: dict[Any, tuple[str, Callable[[], Any]]] = {}
        self._classes: dict[type, None] = {}
        self._modules: list[ModuleType] = []
        self._members: dict[str, list[Any]] = {}
        self._methods: set[FunctionType] = set()  # of torch's modules: they are followed for the names they read
        self._seen: dict[int, Any] = {}
        self._attributes: list[Any] = []
        self._pending: list[tuple[Any, int]] = []

    def add(self, value: Any, depth: int = 0) -> None:
        """Adds what code may call, or find something to call in."""
        self._pending.append((value, depth))

    def follow(self) -> None:
        """Looks at what was added, and at all that this leads to."""
        while self._pending or (self.dynamic and self._attributes):
            if not self._pending:
                self._pending = [(value, 0) for value in self._attributes]
                self._attributes = []
            value, depth = self._pending.pop()
            if depth > MAX_DEPTH or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, FunctionType):
                self._add_function(value)
            elif isinstance(value, type):
                self.add_class(value)
            elif isinstance(value, ModuleType):
                if self._is_followed(value.__name__.split(".")[0]):
                    self._modules.append(value)
                    self._add_members(vars(value))
            elif isinstance(value, (attrgetter, methodcaller)):
                self._add_names(_looked_up(value))
            elif is_container(value):
                self._add_object(value, depth)
            for inner in _inner(value):
                self.add(inner)

    def variables(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields name and getter of what is read in places that have no attributes: globals, closures, classes."""
        for cls in self._classes:
            self._variables.update(_class_members(cls, self.names))
        for module in self._modules:
            self._variables.update(_inside(module.__name__, module, self.names))
        yield from self._variables.values()

    def add_class(self, cls: type) -> None:
        """Adds a class: what torch or Python calls of it, and whatever else code will be found to name."""
        is_module = issubclass(cls, Module)
        if cls in self._classes or not (self._is_followed(package_of(cls)) or is_module):
            return
        self._classes[cls] = None
        for base in cls.__mro__:
            if base in (Module, object) or not (self._is_followed(package_of(base)) or is_module):
                continue
            # A run makes new objects, but not its module anew.
            self._add_members({k: v for k, v in vars(base).items() if not (is_module and k == "__init__")})
            if is_library(package_of(base)):
                members = [f for member in vars(base).values() for f in (member, *_inner(member))]
                self._methods.update(f for f in members if isinstance(f, FunctionType))
        called = {"forward", "__call__"} if is_library(package_of(cls)) else _implicit_methods(cls)
        for name in called:
            for value in _definitions(cls, name):
                self.add(value)
        self.add(type(cls))

    def _is_followed(self, package: str) -> bool:
        return not is_library(package) and (package in self._packages or not is_installed(package))

    def add_attributes(self, attributes: dict[str, Any]) -> None:
        """Adds attributes of an object: each matters once its name is found, all if any name may be looked up."""
        self._add_members(attributes)
        self._attributes += attributes.values()

    def _add_members(self, members: dict[str, Any]) -> None:
        for name, member in members.items():
            self._members.setdefault(name, []).append(member)
            if name in self.names:
                self.add(member)

    def _add_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                for member in self._members.get(name, ()):
                    self.add(member)

    def _add_object(self, value: Any, depth: int) -> None:
        self.dynamic |= _looks_attributes_up(type(value))
        self.add(type(value))
        always, attributes = parts(value)
        self.add_attributes(attributes)
        for item in always:
            if not isinstance(item, (Tensor, *SCALARS)):
                # A module is looked into however deep it is.
                self.add(item, depth + (not isinstance(value, Module)))

    def _add_function(self, function: FunctionType) -> None:
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in _names(code)}
        package = package_of(function)
        if not self._is_followed(package):
            if function in self._methods or not is_library(package):
                self._add_names(names)
            return
        self.functions[function] = None
        self.dynamic |= not _DYNAMIC.isdisjoint(names)
        self._add_names(names)
        for key, (path, get) in _read_by(function, names):
            self._variables[key] = path, get
            value = get()
            if not isinstance(value, ModuleType):  # of which only what this function names is read
                self.add(value)
        for value in (function.__defaults__, function.__kwdefaults__, vars(function)):
            self.add(value)


def _looked_up(getter: Any) -> Iterator[str]:
    """Yields the attributes that an object of the module `operator` gets, as a pickle of it would name them."""
    made, names = getter.__reduce__()
    if isinstance(made, functools.partial):  # with keywords of its own
        names = made.args
    for name in names[:1] if isinstance(getter, methodcaller) else names:  # the rest is what is handed on
        yield from name.split(".")


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names in code, those in patterns (`case Point(x=0)`) included."""
    yield from code.co_names
    if _MATCH_CLASS in code.co_code[::2]:
        for constant in code.co_consts:
            if isinstance(constant, tuple):
                yield from (name for name in constant if isinstance(name, str))


def _read_by(function: FunctionType, names: set[str]) -> Iterator[_Variable]:
    """Yields the global variables that a function names, what it names in Python's modules, and closure variables."""
    where, variables = function.__module__, function.__globals__
    for name in names:
        if name in variables:
            yield (id(variables), name), (f"{where}.{name}", functools.partial(variables.get, name))
            yield from _inside(f"{where}.{name}", variables[name], names)
        else:  # imported by the function itself
            for path in (name, f"{variables.get('__package__')}.{name}"):
                yield from _inside(f"{where}.{name}", sys.modules.get(path), names)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield id(cell), (f"{function.__qualname__}.<{name}>", functools.partial(_contents, cell))
        yield from _inside(f"{function.__qualname__}.<{name}>", _contents(cell), names)


def _inside(where: str, value: Any, names: set[str]) -> Iterator[_Variable]:
    """Yields what a module of Python holds under names that code uses, and what modules in it do.

    Of a library these are functions and classes only: someone may put others in their place.
    """
    places = [(where, value)]
    seen: set[int] = set()
    for place, module in places:
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        variables = vars(module)
        for name in names & variables.keys():
            path, inner = f"{place}.{name}", variables[name]
            places.append((path, inner))
            is_code = isinstance(inner, (FunctionType, BuiltinFunctionType, type))
            if is_code or not is_library(module.__name__.split(".")[0]):
                yield (id(variables), name), (path, functools.partial(variables.get, name))


def _class_members(cls: type, names: Iterable[str]) -> Iterator[_Variable]:
    """Yields what classes of a user's own hold under names that are read: class attributes and methods."""
    bases = _own_bases(cls)
    for name in {name for base in bases for name in vars(base)} & {*names, *_implicit_methods(cls)}:
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
    if isinstance(item, (staticmethod, classmethod)):
        return [item.__func__]
    if isinstance(item, BuiltinFunctionType):
        return [] if isinstance(item.__self__, (Module, ModuleType)) else [item.__self__]
    if isinstance(item, (functools.partialmethod, functools.cached_property)):
        return [item.func]
    if isinstance(item, functools.singledispatchmethod):
        return [item.func, *item.dispatcher.registry.values()]
    wrapped = getattr(item, "__wrapped__", None) if callable(item) and not isinstance(item, type) else None
    if not isinstance(item, FunctionType):
        return [] if wrapped is None else [wrapped]
    kept = [wrapped, *map(_contents, item.__closure__ or ())]
    return [inner for inner in kept if isinstance(inner, (FunctionType, MethodType, functools.partial))]


def _own_bases(cls: type) -> list[type]:
    """Returns a class and its bases as far as no library defines them."""
    return [base for base in cls.__mro__ if not is_library(package_of(base))]


def _looks_attributes_up(cls: type) -> bool:
    """Tells whether a class of a user's own decides in code what an attribute is."""
    return any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in _own_bases(cls))


def _implicit_methods(cls: type) -> set[str]:
    """Returns the methods of a class that run without being named: calls, operators, a module's forward."""
    own = {name: value for base in _own_bases(cls) for name, value in vars(base).items()}
    names = {name for name, value in own.items() if name.startswith("__") and isinstance(value, _METHODS)}
    not_called = {*_NOT_CALLED, "__init__", "__new__", "__repr__"} if issubclass(cls, Module) else _NOT_CALLED
    return (names | _CALLED | {"__call__"}) - not_called


_METHODS = (FunctionType, staticmethod, classmethod, property)


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
