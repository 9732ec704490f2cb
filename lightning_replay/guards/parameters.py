# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What code does with names, decided from the code: which parameter a method uses, where an attribute is set."""

import ast
import dis
import inspect
import textwrap
from dataclasses import replace
from types import CodeType, FunctionType

from torch.nn import Module

from lightning_replay.guards.contents import package_of
from lightning_replay.reasons import Finding

_EVERYTHING = frozenset({"locals", "vars", "eval", "exec"})
"""What gives access to a variable without naming it."""


def find_use(owner: type, function: FunctionType, position: int) -> str | None:
    """Finds a use of a parameter that is given by position.

    A parameter that is handed on, as it is, to another method of the same object is followed there; anything else that
    names it counts as a use.

    Args:
        owner: The class of the object.
        function: A method of it.
        position: Which parameter, the object itself being 0.

    Returns:
        File and line of the first use, or None if there is none.
    """
    return _find_use(owner, function, position, frozenset())


def _find_use(owner: type, function: FunctionType, position: int, above: frozenset[CodeType]) -> str | None:
    code = function.__code__
    if position < code.co_argcount:
        name = code.co_varnames[position]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return None
    line = _line_of_load(code, name)
    if not _EVERYTHING.isdisjoint(code.co_names):
        return line or f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
    if line is None or code in above:
        return None
    if hasattr(function, "__wrapped__"):  # its source is shown as that of what it wraps
        return line
    if position >= code.co_argcount or (handed := _handed_on(owner, function, name)) is None:
        return line
    for method, argument in handed:
        if (found := _find_use(owner, method, argument, above | {code})) is not None:
            return found
    return None


def _line_of_load(code: CodeType, name: str) -> str | None:
    """Returns the place where code first loads a local variable."""
    number = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        number = _line(code, instruction.offset) or number
        loads = instruction.opname.startswith(
            ("LOAD_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "MAKE_CELL", "STORE_FAST_LOAD")
        )
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if loads and name in names:
            return f"{code.co_filename}:{number}, in {code.co_name}"
    return None


def _line(code: CodeType, offset: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= offset < end), None)


def _handed_on(owner: type, function: FunctionType, name: str) -> list[tuple[FunctionType, int]] | None:
    """Returns the methods that a parameter is handed on to, and as which parameter; None if it is used otherwise."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    this = tree.args.args[0].arg
    handed: list[tuple[FunctionType, int]] = []
    allowed = 0
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        places: list[int | str] = [i for i, a in enumerate(call.args) if _is_name(a, name)]
        places += [k.arg for k in call.keywords if _is_name(k.value, name) and k.arg is not None]
        if not places:
            continue
        method = _method(owner, function, call.func, this)
        if method is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        for place in places:
            position = _position(method, place)
            if position is None:
                return None
            handed.append((method, position))
            allowed += 1
    uses = sum(_is_name(node, name) for node in ast.walk(tree))
    return handed if uses == allowed else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _method(owner: type, function: FunctionType, callee: ast.expr, this: str) -> FunctionType | None:
    """Returns the plain method that `self.name` or `super().name` is."""
    if not isinstance(callee, ast.Attribute):
        return None
    bases = owner.__mro__
    if isinstance(callee.value, ast.Call) and _is_name(callee.value.func, "super") and not callee.value.args:
        home = next((i for i, base in enumerate(bases) if function in vars(base).values()), None)
        if home is None:
            return None
        bases = bases[home + 1 :]
    elif not _is_name(callee.value, this):
        return None
    found = next((vars(base)[callee.attr] for base in bases if callee.attr in vars(base)), None)
    return found if isinstance(found, FunctionType) else None


def _position(method: FunctionType, place: int | str) -> int | None:
    """Returns the position of a method's parameter that is given by position among the arguments, or by name."""
    if isinstance(place, int):
        return place + 1
    names = method.__code__.co_varnames[: method.__code__.co_argcount]
    return names.index(place) if place in names else None


def with_line(finding: Finding, root: Module, prefix: str) -> Finding:
    """Adds to a finding about an attribute where methods of its module set or, failing that, name it, and its owner.

    Args:
        finding: The finding.
        root: The module tree.
        prefix: The dotted path of the root.
    """
    line = _line_that_sets(root, prefix, finding.where)
    where = f"self.{finding.where}" if not prefix and finding.where in vars(root) else finding.where
    return replace(finding, where=where, actual=finding.actual if line is None else f"{finding.actual}, at {line}")


def _line_that_sets(root: Module, prefix: str, path: str) -> str | None:
    """Finds where an attribute of a module is set or, failing that, named, in the methods of its class."""
    module, name = root, ""
    for part in path.removeprefix(prefix).strip(".").split("."):
        module, name = module._modules.get(name) or module, part
    named = None
    for method in (value for base in type(module).__mro__ for value in vars(base).values()):
        if not isinstance(method, FunctionType) or package_of(method) == "torch" or method.__name__ == "__init__":
            continue
        code = method.__code__
        for instruction in dis.get_instructions(code):
            if instruction.argval == name and instruction.opname.endswith(("_ATTR", "_METHOD")):
                line = f"{code.co_filename}:{_line(code, instruction.offset)}, in {code.co_name}"
                if instruction.opname == "STORE_ATTR":
                    return line
                named = named or line
    return named
