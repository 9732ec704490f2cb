# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a single dispatched operation means for a recording."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from lightning_replay.reasons import Finding, Reason

_ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
COPYING = frozenset({"_to_copy", "copy_", "where"}) | _INDEXING
"""Operations that copy host tensors among their arguments to the device, whatever their shape."""
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_TORCH_MODULES = str(Path(torch.nn.__file__).resolve().parent)
_SKIPPED = (_PACKAGE, _TORCH, str(warnings.__file__), str(contextlib.__file__), "<")
_CALLERS = (f"{_PACKAGE}/engine/recording.py", f"{_PACKAGE}/runner/steps.py")


def is_allocation(func: OpOverload) -> bool:
    """Tells whether an operation only allocates: running it again would read uninitialised memory."""
    return func.overloadpacket.__name__ in _ALLOCATIONS


def shares_memory(tensor: Tensor, others: list[Tensor]) -> bool:
    """Tells whether a tensor lies in the storage of one of the others."""
    address = tensor.untyped_storage().data_ptr()
    return any(address == other.untyped_storage().data_ptr() for other in others)


def written_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensor arguments that an operation's schema declares as written."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def host_access(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Finding | None:
    """Finds an operation that a graph on `device` cannot hold because the host takes part in it."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    name = str(func)
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return Finding(
            Reason.HOST_RANDOM, user_line(), "the device's default generator", f"{name} with its own generator"
        )
    if _waits_for_device(func, args):
        if device.type != "cpu" and tensors and all(tensor.device.type == "cpu" for tensor in tensors):
            return None  # a computation among CPU tensors waits for nothing; its way to the device is found below
        return Finding(Reason.HOST_SYNC, user_line(), "work that the device can do alone", name)
    if device.type == "cpu":
        return None
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu" and not _is_seed(func, tensor)]
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if torch.Tag.nondeterministic_seeded in func.tags and (on_host or (not tensors and (to_host or target is None))):
        return Finding(Reason.HOST_RANDOM, user_line(), f"random numbers drawn on {device}", f"{name} on the CPU")
    if any(tensor.dim() or func.overloadpacket.__name__ in COPYING for tensor in crossing(func, args, kwargs)):
        return Finding(Reason.HOST_TENSOR, user_line(), f"tensors on {device}", f"{name} with a CPU tensor")
    if to_host and len(on_host) < len(tensors):
        return Finding(Reason.HOST_SYNC, user_line(), f"tensors that stay on {device}", f"{name} to the CPU")
    return None


def crossing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the host tensors among the arguments of an operation on another device.

    One without dimensions may be a number to the operation; the others, and all those of `COPYING`, are copied.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    target = kwargs.get("device")
    on_device = target is not None and torch.device(target).type != "cpu"
    if not on_device and all(tensor.device.type == "cpu" for tensor in tensors):
        return []
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and not _is_seed(func, tensor)]


def _is_seed(func: OpOverload, tensor: Tensor) -> bool:
    """Fused attention keeps seed and offset of its dropout on the host natively, and on the device under capture."""
    return "attention" in func.overloadpacket.__name__ and tensor.dim() == 0 and tensor.dtype is torch.int64


def _waits_for_device(func: OpOverload, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket.__name__ in _INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None)
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def user_line() -> str:
    """Returns file and line of the innermost Python frame of the region that is not torch's.

    In a module of torch itself it is the line there, and in the backward pass there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    inside = "the backward pass"
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return _line(frame)
        if name.startswith(_TORCH_MODULES) and inside == "the backward pass":
            inside = _line(frame)
        frame = frame.f_back
    return inside


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
