# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Memory with the layout of other memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_replay.engine.layout import (
    ALIGNMENT,
    allocate_gradient,
    allocate_like,
    clone_exactly,
    copy_all,
    is_dense,
    is_plain,
    may_overlap,
    overlaps_itself,
    without_expanded,
)
from tests.helpers.bits import same_bits


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any strided view into a small storage, overlapping and expanded ones included."""
    size = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = [draw(st.integers(0, 6)) for _ in size]
    offset = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int16, torch.uint8]))
    return torch.arange(200).to(dtype).as_strided(size, stride, offset)


def addresses(tensor: Tensor) -> Tensor:
    """Returns the place of each element in its storage, in elements."""
    places = torch.tensor(tensor.storage_offset())
    for n, s in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * s
    return places.flatten()


@settings(max_examples=150, deadline=None)
@given(views())
def test_overlap_with_itself(tensor: Tensor) -> None:
    places = addresses(without_expanded(tensor))

    if places.numel() and places.unique().numel() < places.numel():
        assert overlaps_itself(tensor)  # never missed; it may be suspected in vain


@settings(max_examples=150, deadline=None)
@given(views())
def test_exact_copies(tensor: Tensor) -> None:
    if overlaps_itself(tensor):
        return

    copy = clone_exactly(tensor)

    assert same_bits(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.dtype == tensor.dtype
    if tensor.numel():
        assert copy.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_pieces_of_one_tensor(size: list[int], data: st.DataObject) -> None:
    base = torch.arange(math.prod(size)).view(size)
    pieces = []
    for _ in range(2):
        piece = base
        for dim in range(base.dim()):
            start = data.draw(st.integers(0, base.shape[dim] - 1))
            length = data.draw(st.integers(1, base.shape[dim] - start))
            piece = piece.narrow(dim, start, length)
        pieces.append(piece)
    shared = set(addresses(pieces[0]).tolist()) & set(addresses(pieces[1]).tolist())

    if shared:
        assert may_overlap(*pieces)
        assert may_overlap(*reversed(pieces))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_chunks_do_not_overlap(dim: int) -> None:
    left, right = torch.zeros(4, 6, 2).chunk(2, dim=dim)

    assert not may_overlap(left, right)
    assert not may_overlap(right, left)
    assert may_overlap(left, left)


def test_overlap_of_others() -> None:
    base = torch.zeros(12)

    assert not may_overlap(base, torch.zeros(12))
    assert not may_overlap(base[:0], base)
    assert may_overlap(base[:7], base[6:])
    assert may_overlap(base.view(torch.int32), base)
    assert may_overlap(base.view(3, 4), base.view(4, 3))


def test_gradients_are_laid_out_as_autograd_does() -> None:
    parameters = [
        torch.randn(4, 3),
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(8, 3)[::2],
        torch.randn(1, 5).expand(4, 5),
        torch.randn(()),
        torch.randn(3, 0),
    ]
    for values in parameters:
        parameter = nn.Parameter(values)
        (parameter * 2).sum().backward()
        assert parameter.grad is not None

        made = allocate_gradient(parameter)

        assert made.shape == parameter.grad.shape
        assert made.dtype == parameter.dtype
        if is_dense(parameter):
            assert made.stride() == parameter.grad.stride()


def test_plain_tensors() -> None:
    class Sub(torch.Tensor):
        pass

    assert is_plain(torch.ones(2))
    assert is_plain(nn.Parameter(torch.ones(2)))
    assert not is_plain(torch.ones(2).as_subclass(Sub))
    assert not is_plain(torch.eye(2).to_sparse())
    assert not is_plain(torch.ones(2, dtype=torch.complex64).conj())
    assert not is_plain(torch.imag(torch.ones(2, dtype=torch.complex64).conj()))
    assert not is_plain(torch._efficientzerotensor(2))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_copy_all(count: int) -> None:
    sources = [torch.randn(3), torch.randn(2).double(), torch.randn(2, 2)][:count]
    targets = [torch.empty_like(source) for source in sources]

    copy_all(targets, sources)

    assert same_bits(targets, sources)


def test_alignment_of_an_offset_view() -> None:
    view = torch.zeros(9)[1:]

    assert allocate_like(view).data_ptr() % ALIGNMENT == view.data_ptr() % ALIGNMENT == 4
