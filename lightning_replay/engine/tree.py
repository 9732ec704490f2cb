# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Take arguments and results apart into tensors and a structure, and put them together again.

Lists, tuples, named tuples, dicts, dataclasses, and every type registered with torch's pytree (such as the ModelOutput
classes of transformers) are opened. Plain values stay in the structure, told apart by type and by bits: True is not 1,
and 0.0 is not -0.0. Anything else is opaque, and so is a tensor that carries Python attributes.
"""

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Structure = tuple[Any, ...]

_VALUES = (
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    range,
    type,
)


class OpaqueValueError(TypeError):
    """A value that can be neither opened nor compared.

    Attributes:
        path: Dotted path of the value.
        kind: Name of its type.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(f"{path}: {kind}")
        self.path = path
        self.kind = kind


def flatten(tree: Any, path: str = "") -> tuple[list[Tensor], list[str], Structure]:
    """Takes a nested value apart.

    Args:
        tree: Tensors and plain values in any nesting.
        path: Dotted path of `tree`, the prefix of the paths returned.

    Returns:
        The tensors in order, their dotted paths, and the hashable structure that `rebuild` needs.

    Raises:
        OpaqueValueError: If a value can be neither opened nor compared.
    """
    tensors: list[Tensor] = []
    paths: list[str] = []
    return tensors, paths, _open(tree, path, tensors, paths)


def _open(tree: Any, path: str, tensors: list[Tensor], paths: list[str]) -> Structure:
    if isinstance(tree, Tensor):
        if tree.__dict__ and type(tree) is Tensor:
            raise OpaqueValueError(path, f"a tensor with attributes of its own: {', '.join(tree.__dict__)}")
        tensors.append(tree)
        paths.append(path)
        return ("tensor",)
    kind = type(tree)
    if kind is tuple or kind is list:
        return (kind, *(_open(v, f"{path}[{i}]", tensors, paths) for i, v in enumerate(tree)))
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        keys = tuple(tree)
        if not all(isinstance(key, (str, int, bool, float, tuple, enum.Enum, type(None))) for key in keys):
            raise OpaqueValueError(path, "dict with keys that are not plain values")
        extra = tree.default_factory if kind is defaultdict else None
        typed = tuple((type(key), key) for key in keys)
        children = (_open(tree[key], f"{path}.{key}", tensors, paths) for key in keys)
        return ("dict", kind, extra, keys, typed, *children)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = ((name, getattr(tree, name)) for name in tree._fields)
        return ("namedtuple", kind, *(_open(v, f"{path}.{name}", tensors, paths) for name, v in fields))
    if (value := _value(tree)) is not None:
        return value
    if kind in pytree.SUPPORTED_NODES:
        items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
        opened = [_open(v, f"{path}[{i}]", tensors, paths) for i, v in enumerate(items)]
        return ("node", kind, _freeze(context, path), *opened)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        if set(vars(tree)) - {field.name for field in dataclasses.fields(tree)} if hasattr(tree, "__dict__") else False:
            raise OpaqueValueError(path, f"{kind.__qualname__} with attributes that are not fields")
        names = tuple(field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name))
        opened = [_open(getattr(tree, name), f"{path}.{name}", tensors, paths) for name in names]
        return ("dataclass", kind, names, *opened)
    raise OpaqueValueError(path, kind.__qualname__)


def _value(tree: Any) -> Structure | None:
    """Returns the structure of a plain value, or None if it is not one."""
    kind = type(tree)
    if kind is bool or kind is int:
        return ("value", kind, tree, tree)
    if kind is float:
        return ("value", kind, tree.hex(), _Opaque(tree))
    if kind is complex:
        return ("value", kind, (tree.real.hex(), tree.imag.hex()), _Opaque(tree))
    if isinstance(tree, np.generic) and not isinstance(tree, np.object_):
        return ("value", kind, tree.tobytes(), _Opaque(tree))
    if isinstance(tree, enum.Enum) or kind in _VALUES or isinstance(tree, type):
        return ("value", kind, tree, tree)
    if kind is slice:
        parts = tuple(_value(part) for part in (tree.start, tree.stop, tree.step))
        return None if None in parts else ("value", kind, parts, _Opaque(tree))
    if isinstance(tree, FunctionType) and tree.__closure__ is None and "<locals>" not in tree.__qualname__:
        return ("value", kind, tree, tree)
    return None


class _Opaque:
    """Carries a value in a structure without taking part in its comparison: the bits beside it do."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return repr(self.value)


def _freeze(context: Any, path: str) -> Any:
    """Makes a pytree context hashable and comparable by value."""
    if isinstance(context, (list, tuple)):
        return (type(context), *(_freeze(item, path) for item in context))
    if (value := _value(context)) is not None:
        return value
    raise OpaqueValueError(path, type(context).__qualname__)


def _thaw(frozen: Any) -> Any:
    if frozen[0] is list or frozen[0] is tuple:
        return frozen[0](_thaw(item) for item in frozen[1:])
    return _plain(frozen)


def _plain(structure: Structure) -> Any:
    value = structure[3]
    return value.value if isinstance(value, _Opaque) else value


def plain_values(structure: Structure) -> list[Any]:
    """Returns the plain values in a structure, None left out, in order."""
    if structure[0] == "value":
        value = _plain(structure)
        return [] if value is None else [value]
    first = {"tensor": len(structure), "dict": 5, "namedtuple": 2, "node": 3, "dataclass": 3}.get(structure[0], 1)
    return [value for child in structure[first:] for value in plain_values(child)]


def rebuild(structure: Structure, tensors: Iterator[Any]) -> Any:
    """Puts a nested value together again.

    Args:
        structure: What `flatten` returned.
        tensors: The tensors, in `flatten`'s order; consumed as far as needed.
    """
    kind = structure[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return _plain(structure)
    if kind is list or kind is tuple:
        return kind(rebuild(child, tensors) for child in structure[1:])
    if kind == "dict":
        _, cls, extra, keys, _, *children = structure
        items = zip(keys, [rebuild(child, tensors) for child in children], strict=True)
        return defaultdict(extra, items) if cls is defaultdict else cls(items)
    if kind == "namedtuple":
        return structure[1](*[rebuild(child, tensors) for child in structure[2:]])
    if kind == "node":
        _, cls, context, *children = structure
        return pytree.SUPPORTED_NODES[cls].unflatten_fn([rebuild(c, tensors) for c in children], _thaw(context))
    _, cls, names, *children = structure
    made = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, rebuild(child, tensors))
    return made
