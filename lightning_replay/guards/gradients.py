# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a recording of the gradient norm depends on in the gradients."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replay.engine.layout import is_dense, is_plain
from lightning_replay.reasons import Finding, Reason

ALIGNMENT = 64
"""Bytes that gradients start at a multiple of, as any allocator gives: torch's kernels choose by alignment."""

WHERE = "Precision.clip_grad_by_norm"

_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})

_TYPES = {Tensor, torch.nn.Parameter}

Layout = tuple[Any, ...]
Place = tuple[int, ...]


def find_unsupported(gradients: Sequence[Tensor]) -> Finding | None:
    """Finds gradients that are not recorded: anything but dense tensors of their own on one device."""

    def found(reason: Reason, position: int, expected: str, actual: str) -> Finding:
        return Finding(reason, f"gradient {position} of {len(gradients)}", expected, actual)

    storages = set()
    offset = None
    for position, gradient in enumerate(gradients):
        if gradient.device != gradients[0].device:
            return found(Reason.NORM_DEVICES, position, f"{gradients[0].device}", f"{gradient.device}")
        if gradient.is_sparse or gradient.layout is not torch.strided:
            return found(Reason.NORM_SPARSE, position, "torch.strided", f"{gradient.layout}")
        if not is_plain(gradient) or gradient.requires_grad or gradient.dtype not in _FLOATS:
            kind = f"{type(gradient).__qualname__} of {gradient.dtype}, requires_grad={gradient.requires_grad}"
            return found(Reason.NORM_LAYOUT, position, "a plain tensor of real numbers without history", kind)
        storage = gradient.untyped_storage().data_ptr()
        if storage in storages:
            return found(Reason.NORM_ALIASED, position, "memory of its own", "it shares memory with another")
        if gradient.numel():
            storages.add(storage)
        if gradient.storage_offset() or gradient.data_ptr() % ALIGNMENT:
            offset = position
        if not is_dense(gradient):
            return found(Reason.NORM_LAYOUT, position, "dense memory", f"{gradient.shape} with {gradient.stride()}")
    if offset is not None:
        actual = f"offset {gradients[offset].storage_offset()}"
        return found(Reason.NORM_LAYOUT, offset, "the start of its memory", actual)
    return None


def find_observer(device: torch.device) -> Finding | None:
    """Finds a mode of torch that would change, or wants to see, the native operations."""
    if torch.is_autocast_enabled(device.type):
        return Finding(Reason.NORM_MODE, WHERE, "no autocast around clipping", f"autocast on {device.type}")
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return Finding(Reason.NORM_MODE, WHERE, "no mode around clipping", "a TorchDispatchMode or TorchFunctionMode")
    return None


def layouts_of(gradients: Sequence[Tensor]) -> list[Layout]:
    """Returns shape, strides and dtype of each gradient."""
    strides = map(Tensor.stride, gradients)
    return list(zip([g.shape for g in gradients], strides, [g.dtype for g in gradients], strict=True))


def describe_layout(layout: Layout) -> str:
    """Describes one of `layouts_of`."""
    shape, stride, dtype = layout
    return f"{tuple(shape)} with strides {stride} of {dtype}"


def place_of(gradients: Sequence[Tensor]) -> Place:
    """Returns where each gradient lies; nothing if one of them is no ordinary tensor with an address."""
    if not set(map(type, gradients)) <= _TYPES:
        return ()
    try:
        return tuple(map(Tensor.data_ptr, gradients))
    except RuntimeError:  # sparse
        return ()


def are_same(references: Sequence["weakref.ref[Tensor]"], gradients: Sequence[Tensor]) -> bool:
    """Tells whether gradients are the very tensors that were seen before."""
    if len(references) != len(gradients) or (references and references[0]() is not gradients[0]):
        return False  # new ones differ from the first on
    return all(map(operator.is_, [reference() for reference in references], gradients))


def current_stream(device: torch.device) -> int:
    """Returns the current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
