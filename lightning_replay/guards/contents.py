# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What values hold: items of builtin containers, attributes of objects, what functions and methods are made of."""

import array
import contextvars
import enum
import functools
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from lightning_replay.engine.interposition import is_interposed

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype)
MUTABLE = (list, dict, set, deque)
LIBRARIES = frozenset(
    {"torch", "torchmetrics", "numpy", "builtins", "lightning", "lightning_fabric", "lightning_replay"}
    | {"lightning_utilities", "pytorch_lightning"}
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MEMBERS = ("_parameters", "_buffers", "_modules")
TORCH_OWN = frozenset(
    {*MEMBERS, "_non_persistent_buffers_set", "training"}
    | {name for name in torch.nn.Module().__dict__ if name.endswith("_hooks") or "_hooks_" in name}
)
UNNAMED = ("forward", "_call_impl", "_compiled_call_impl")
"""Attributes of a module that matter whether or not code names them: torch calls them."""

MAX_ARRAY_BYTES = 2**16
"""The size up to which the contents of an array of numbers are compared."""

_SEQUENCES = (tuple, frozenset, list, set, deque)
_MAPPINGS = (dict, MappingProxyType)
_BUFFERS = (np.ndarray, bytearray, array.array)
_BUILTIN = (*_SEQUENCES, *_MAPPINGS, *_BUFFERS)
_LEADING = (functools.partial, MethodType, weakref.ref, contextvars.ContextVar)
_OPAQUE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType)
_OTHERS = LIBRARIES | {"weakref", "typing", "logging"}


def package_of(item: Any) -> str:
    """Returns the top-level package that a class or function was defined in."""
    module = item.__module__  # of the types that Cython makes it is a descriptor
    return module.split(".")[0] if isinstance(module, str) else ""


def is_library(package: str) -> bool:
    """Tells whether code of a package is trusted to read nothing that changes."""
    return package in LIBRARIES or package in sys.stdlib_module_names


@functools.cache
def is_installed(package: str) -> bool:
    """Tells whether a package is not a user's own code, but was installed."""
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return path.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))


def is_container(value: Any) -> bool:
    """Tells whether a value holds others that matter: a builtin container, or an instance of a user's own class."""
    if isinstance(value, (*weakref.ProxyTypes, Module, *_BUILTIN, *_LEADING)):
        return True
    if isinstance(value, _OPAQUE) or not (hasattr(value, "__dict__") or hasattr(value, "__slots__")):
        return False
    return package_of(type(value)) not in _OTHERS


def items(container: Any, names: frozenset[str] | None) -> list[Any]:
    """Returns what a container holds; of an object the attributes with these names."""
    always, attributes = parts(container)
    return [*always, *(item for k, v in attributes.items() if names is None or k in names for item in (k, v))]


def parts(container: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns what matters in a container whatever code names, and the attributes that matter if code names them."""
    kind: Any = type(container)
    if kind in weakref.ProxyTypes:
        return [_stood_for(container)], {}
    if isinstance(container, _BUILTIN):
        own = kind.__module__ not in sys.stdlib_module_names
        return _builtin_items(container), attributes_of(container) if own else {}
    if isinstance(container, _LEADING):
        return _items_led_to(container), {}
    attributes = attributes_of(container)
    if isinstance(container, Module):
        members = [item for name in (*MEMBERS, *HOOKS) for item in attributes[name].values()]
        attributes = {k: v for k, v in attributes.items() if k not in TORCH_OWN and not is_interposed(v)}
        called = [attributes.pop(name, None) for name in UNNAMED]
        return [kind, *members, container.training, *called], attributes
    return ([*attributes, *attributes.values()], {}) if _all_matter(kind) else ([], attributes)


def _builtin_items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]  # whatever a class makes of them
    if isinstance(container, _MAPPINGS):
        return [*container.keys(), *container.values()]
    if isinstance(container, np.ndarray):
        return [container.tobytes()] if container.nbytes <= MAX_ARRAY_BYTES and not container.dtype.hasobject else []
    if isinstance(container, (bytearray, array.array)):
        return [bytes(container)] if len(container) <= MAX_ARRAY_BYTES else []
    return list(container)


def _items_led_to(value: Any) -> list[Any]:
    """Returns what a partial, a method, a reference or a context variable leads to."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.keys(), *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, *(() if isinstance(value.__self__, Module) else (value.__self__,))]
    return [value() if isinstance(value, weakref.ref) else value.get(None)]


def _stood_for(proxy: Any) -> Any:
    """Returns what a weak proxy stands for, or None if it is gone: its methods are bound to it."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


@functools.lru_cache(maxsize=1024)
def _all_matter(cls: type) -> bool:
    """Tells whether attributes are read by code that is not followed, or does not name them."""
    return hasattr(cls, "__match_args__") or any(base.__module__ in ("collections", "types") for base in cls.__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, those in slots included."""
    kind: Any = type(value)
    inside = {slot: getattr(value, slot) for slot in slots(kind) if hasattr(value, slot)}
    return {**inside, **getattr(value, "__dict__", {})}


@functools.lru_cache(maxsize=1024)
def slots(cls: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class and its bases."""
    found = (slot for base in cls.__mro__ for slot in _own_slots(base))
    return tuple(slot for slot in found if slot not in ("__dict__", "__weakref__"))


def _own_slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(private + name if name.startswith("__") and not name.endswith("__") else name for name in names)


def same_items(container: Any, earlier: list[Any], names: frozenset[str] | None) -> bool:
    """Tells whether a container holds what it held."""
    live = items(container, names)
    return len(live) == len(earlier) and (all(map(is_, live, earlier)) or all(map(same_value, live, earlier)))


def same_value(left: Any, right: Any) -> bool:
    """Tells whether two values are the same object, or plain values with the same bits."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return bool(left.hex() == right.hex())
    return isinstance(left, SCALARS) and bool(left == right)


def own_code(value: Any) -> Iterator[Any]:
    """Yields what arguments of a call bring along of a user's own: functions, classes, members of an enumeration."""
    if isinstance(value, enum.Enum):
        yield value
    elif isinstance(value, (type, FunctionType)):
        yield from () if is_library(package_of(value)) else (value,)
    elif (isinstance(value, _BUILTIN) and not isinstance(value, _BUFFERS)) or is_dataclass(value):
        yield from own_code(type(value))
        for item in items(value, None):
            yield from own_code(item)
