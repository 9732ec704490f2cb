# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Compare tensors as bits: 0.0 is not -0.0, and a NaN equals a NaN of the same bits."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """Returns the contiguous integer view of a tensor's values."""
    tensor = tensor.detach().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tells whether two tensors hold the same values in the same shape and dtype, as bits."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(as_bits(left), as_bits(right))


def first_difference(left: Tensor, right: Tensor) -> str:
    """Describes the first element in which two tensors differ."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
    unequal = as_bits(left).ne(as_bits(right))
    if left.is_complex():
        unequal = unequal.any(-1)
    index = tuple(torch.nonzero(unequal)[0].tolist()) if unequal.dim() else ()
    count = int(unequal.sum())
    return (
        f"{left[index].item()!r} and {right[index].item()!r} at index {list(index)} ({count} of {left.numel()} differ)"
    )
