# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Memory with exactly the layout that a kernel saw when it was recorded.

Kernels choose their code by strides and by pointer alignment, and another choice may round differently. So every
static tensor has the sizes, strides and 16-byte alignment of the tensor it stands for, expanded (stride 0) dimensions
included.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; the widest vector load of torch's element-wise kernels


def is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor is an ordinary strided tensor: no subclass, not sparse, nested or lazily computed."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def has_memory(tensor: Tensor) -> bool:
    """Tells whether a tensor lies at one address; sparse ones and wrappers of others do not."""
    try:
        tensor.data_ptr()
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _dense_strides(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for extent, step in sorted(
        ((extent, step) for extent, step in zip(size, stride, strict=True) if extent != 1), key=lambda pair: pair[1]
    ):
        if step != expected:
            return False
        expected *= extent
    return True


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor fills its memory without gaps or overlap, in whatever order of dimensions."""
    return tensor.numel() == 0 or _dense_strides(tensor.shape, tensor.stride())


def without_expanded(tensor: Tensor) -> Tensor:
    """Returns the view in which each expanded dimension (stride 0) has length one: every element once."""
    for dim, (extent, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and extent > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overlaps_itself(tensor: Tensor) -> bool:
    """Tells whether two elements may share memory, expanded dimensions left aside."""
    return _overlaps(tensor.shape, tensor.stride())


def _overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    reach = 0
    pairs = ((s, n) for n, s in zip(size, stride, strict=True) if n > 1 and s != 0)
    for step, extent in sorted(pairs):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def may_overlap(left: Tensor, right: Tensor) -> bool:
    """Tells whether two tensors may share elements. Pieces of one tensor, split along a dimension, do not."""
    if not left.numel() or not right.numel() or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    if left.dtype == right.dtype and left.storage_offset() > right.storage_offset():
        left, right = right, left
    ends = [t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in _extents(t))) for t in (left, right)]
    if ends[0] <= right.data_ptr() or ends[1] <= left.data_ptr():
        return False
    if left.dtype != right.dtype or left.stride() != right.stride():
        return True
    gap = right.storage_offset() - left.storage_offset()
    for dim, step in enumerate(left.stride()):
        if step and gap % step == 0 and gap // step >= left.shape[dim]:
            whole = [max(pair) for pair in zip(left.shape, right.shape, strict=True)]
            whole[dim] = gap // step + right.shape[dim]
            if not _overlaps(whole, left.stride()):
                return False
    return True


def _extents(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)


def allocate_like(tensor: Tensor) -> Tensor:
    """Allocates uninitialised memory with the layout and alignment of `tensor`, in a storage of its own."""
    lead = (tensor.data_ptr() % ALIGNMENT) // tensor.element_size()
    if lead == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.empty(lead + span, dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride(), lead)


def allocate_gradient(parameter: Tensor) -> Tensor:
    """Allocates a gradient as autograd's AccumulateGrad lays it out.

    A dense parameter gives its strides to the gradient, any other gets a contiguous one
    (torch/csrc/autograd/functions/accumulate_grad.h, the gradient layout contract).
    """
    if is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@torch.no_grad()
def clone_exactly(tensor: Tensor) -> Tensor:
    """Returns a detached copy with the same layout and alignment."""
    copy = allocate_like(tensor)
    without_expanded(copy).copy_(without_expanded(tensor))
    return copy


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target with as few kernels as torch knows how to."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    # One multi-tensor kernel takes a single dtype; a mixed list would be copied tensor by tensor.
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault(target.dtype, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
