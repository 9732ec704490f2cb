# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Which attribute names a forward pass may read, from its code: a change of any other attribute cannot matter to it."""

import functools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch.nn import Module

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "eval", "exec", "hasattr", "attrgetter", "__getattribute__"})


def names_read(classes: Iterable[type]) -> frozenset[str] | None:
    """Returns every attribute name that the forward passes of these module classes may read.

    Methods and properties reachable by name from a forward pass, and Python functions it refers to by a global name,
    are followed. The answer is an upper bound: a name counts wherever it appears.

    Returns:
        The names, or None if the code looks attributes up dynamically and may read any.
    """
    names: set[str] = set()
    for cls in classes:
        found = _names_of_class(cls)
        if found is None:
            return None
        names |= found
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _names_of_class(cls: type) -> frozenset[str] | None:
    names: set[str] = set()
    pending: list[Any] = [_definitions(cls, "forward"), _definitions(cls, "__call__") if cls.__call__ is not Module.__call__ else []]
    done: set[CodeType] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
            continue
        function = _function(item)
        if function is None:
            if isinstance(item, property):
                pending.append(item.fget)
            continue
        if function.__module__ is not None and function.__module__.split(".")[0] == "torch" and not _is_method(cls, function):
            continue  # functions of torch itself: attributes they read are tensors' and torch's
        for code in _codes(function.__code__):
            if code in done:
                continue
            done.add(code)
            if not _DYNAMIC.isdisjoint(code.co_names):
                if function.__module__ is None or function.__module__.split(".")[0] != "torch":
                    return None
            for name in code.co_names:
                if name in names:
                    continue
                names.add(name)
                pending.append(_definitions(cls, name))
                if name in function.__globals__:
                    pending.append(function.__globals__[name])
    return frozenset(names)


def _definitions(cls: type, name: str) -> list[Any]:
    """Returns every definition of a name along the method resolution order: super() may reach any of them."""
    return [base.__dict__[name] for base in cls.__mro__ if base is not Module and base is not object and name in base.__dict__]


def _function(item: Any) -> FunctionType | None:
    for _ in range(8):
        if isinstance(item, FunctionType):
            return item
        item = item.__func__ if isinstance(item, (staticmethod, classmethod, MethodType)) else getattr(item, "__wrapped__", None)
        if item is None:
            return None
    return None


def _is_method(cls: type, function: FunctionType) -> bool:
    return any(function in base.__dict__.values() for base in cls.__mro__)


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
