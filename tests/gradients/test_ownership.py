# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Gradient buffers by themselves: who is found to hold one, and what a gradient that is handed over looks like."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack

from lightning_replay.engine.tape import TapeBackend
from lightning_replay.gradients import GradientBuffers, Publication, hand_over
from tests.helpers.bits import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")


def make(*parameters):
    """Buffers of some parameters, with a recorded publication of made-up gradients."""
    parameters = parameters or (Parameter(torch.ones(3)), Parameter(torch.ones(2, 2)))
    backend = TapeBackend(torch.device("cpu"))
    buffers = GradientBuffers(parameters)
    gradients = [torch.randn_like(parameter).detach() for parameter in parameters]
    return buffers, gradients, Publication(backend, backend.new_pool(), buffers, gradients)


def as_autograd_does(parameter):
    """The gradient that AccumulateGrad makes for a parameter of one with other strides."""
    twin = Parameter(parameter.detach())
    values = torch.ones(*twin.shape, 2, dtype=twin.dtype)[..., 0]
    (twin * 1).backward(values)
    return twin.grad


KEEP = {
    "tensor": lambda gradient: gradient,
    "view": lambda gradient: gradient[:1],
    "flat view": lambda gradient: gradient.view(-1),
    "detached": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "array": lambda gradient: gradient.numpy(),
    "array of a view": lambda gradient: gradient[1:].numpy(),
    "memoryview": lambda gradient: memoryview(gradient.numpy()),
    "dlpack": lambda gradient: from_dlpack(gradient),
    "dlpack, not opened": lambda gradient: to_dlpack(gradient),
    "storage": lambda gradient: gradient.untyped_storage(),
    "typed storage": lambda gradient: gradient.storage(),
    "another parameter's gradient": lambda gradient: _bound(gradient),
    "in a closure": lambda gradient: lambda: gradient,
    "saved for a backward": lambda gradient: torch.ones(gradient.shape, requires_grad=True) * gradient,
}
LEAVE = {
    "nothing": lambda gradient: None,
    "weak reference": weakref.ref,
    "weak references to a view": lambda gradient: weakref.ref(gradient[:1]),
    "copy": lambda gradient: gradient.clone(),
    "address": lambda gradient: gradient.data_ptr(),
}


def _bound(gradient):
    other = Parameter(torch.zeros(gradient.shape))
    other.grad = gradient
    return other


def _published(keep):
    buffers, gradients, publication = make()
    publication.publish()
    kept = keep(buffers.parameters[0].grad)
    for parameter in buffers.parameters:
        parameter.grad = None
    return buffers, gradients, publication, kept


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_what_someone_keeps_is_held(keep):
    buffers, _, publication, kept = _published(keep)

    assert buffers.is_held(0)
    assert not buffers.is_held(1)
    assert not publication.is_possible()

    del kept
    gc.collect()
    assert not buffers.is_held(0)
    assert publication.is_possible()


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_what_keeps_nothing_alive_does_not_hold(leave):
    buffers, _, publication, left = _published(leave)

    assert not buffers.held([0, 1])
    assert publication.is_possible()
    del left


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_what_is_kept_is_not_written_again(keep):
    buffers, gradients, _, kept = _published(keep)
    before = buffers.at(0).clone()
    for gradient in gradients:
        gradient.mul_(-3)

    added, fresh = hand_over(*_all(buffers, gradients))

    assert (added, fresh) == (0, 1)
    assert same_bits(buffers.at(0), before)
    assert buffers.parameters[0].grad.data_ptr() != buffers.at(0).data_ptr()
    assert buffers.parameters[1].grad is buffers.at(1)
    assert same_bits([parameter.grad for parameter in buffers.parameters], gradients)
    del kept


def _all(buffers, gradients):
    contributions = {p: [g] for p, g in zip(buffers.parameters, gradients, strict=True)}
    return contributions, {p: (buffers, i) for i, p in enumerate(buffers.parameters)}


def test_a_bound_gradient_holds_its_buffer():
    buffers, _, publication = make()
    publication.publish()

    assert buffers.is_held(0)
    assert not publication.is_possible()


def test_published_gradients_lie_outside_of_the_pool():
    buffers, gradients, publication = make()
    publication.publish()

    assert all(p.grad is buffers.at(i) for i, p in enumerate(buffers.parameters))
    assert not {p.grad.data_ptr() for p in buffers.parameters} & {g.data_ptr() for g in gradients}
    assert same_bits([p.grad for p in buffers.parameters], gradients)


def test_a_live_gradient_is_added_to_in_place():
    buffers, gradients, publication = make()
    publication.publish()
    live = [parameter.grad for parameter in buffers.parameters]
    expected = [gradient + gradient for gradient in gradients]

    assert hand_over(*_all(buffers, gradients)) == (2, 0)
    assert all(p.grad is g for p, g in zip(buffers.parameters, live, strict=True))
    assert same_bits(live, expected)


def test_a_foreign_gradient_is_added_to_in_place():
    buffers, gradients, publication = make()
    foreign = torch.full((3,), 0.25)
    buffers.parameters[0].grad = foreign

    assert not publication.is_possible()
    assert hand_over(*_all(buffers, gradients)) == (1, 0)
    assert buffers.parameters[0].grad is foreign
    assert same_bits(foreign, torch.full((3,), 0.25) + gradients[0])
    assert buffers.parameters[1].grad is buffers.at(1)


def test_negative_zeros_are_kept_as_autograd_keeps_them():
    zeros = [torch.full((3,), -0.0), torch.full((2, 2), -0.0)]
    for live in (None, 0.0, -0.0):
        buffers, gradients, _ = make()
        native = Parameter(torch.ones(3))
        for parameter in (native, buffers.parameters[0]):
            parameter.grad = None if live is None else torch.full((3,), live)
        for gradient, zero in zip(gradients, zeros, strict=True):
            gradient.copy_(zero)
        hand_over(*_all(buffers, gradients))
        native.backward(torch.full((3,), -0.0))
        assert same_bits(buffers.parameters[0].grad, native.grad), live


def test_several_contributions_are_summed_in_order():
    parameter = Parameter(torch.zeros(1))
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]

    hand_over({parameter: parts}, {})

    assert same_bits(parameter.grad, parts[0] + parts[1] + parts[2])
    assert not same_bits(parameter.grad, parts[0] + parts[2] + parts[1])


def test_a_parameter_without_gradient_stays_without():
    backend = TapeBackend(torch.device("cpu"))
    buffers = GradientBuffers([Parameter(torch.ones(3)), Parameter(torch.ones(2))])
    publication = Publication(backend, backend.new_pool(), buffers, [torch.ones(3), None])
    publication.publish()

    assert buffers.parameters[0].grad is not None
    assert buffers.parameters[1].grad is None
    assert buffers.buffers[1] is None


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 3),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "transposed": lambda: torch.randn(4, 3).t(),
    "channels last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels last of one channel": lambda: torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "every second column": lambda: torch.randn(4, 6)[:, ::2],
    "with an offset": lambda: torch.randn(13)[1:].view(4, 3),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("published", [True, False], ids=["published", "fresh"])
def test_layout_and_dtype_are_those_of_autograd(layout, dtype, published):
    values = layout().to(dtype)
    native = as_autograd_does(Parameter(values))
    parameter = Parameter(values)
    if published:
        _, _, publication = make(parameter)
        publication.publish()
    else:
        hand_over({parameter: [torch.ones(parameter.shape, dtype=dtype)]}, {})

    assert parameter.grad.dtype == native.dtype
    assert _strides(parameter.grad) == _strides(native)
    assert parameter.grad.is_contiguous(memory_format=torch.contiguous_format) == native.is_contiguous()


def _strides(tensor):
    """Strides of dimensions that have more than one element: the others address nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def test_fused_updates_take_gradients_of_channels_last_weights():
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    _, _, publication = make(*net.parameters())
    publication.publish()

    torch.optim.AdamW(net.parameters(), fused=True).step()

    assert net.weight.grad.stride() == net.weight.stride()


@pytest.mark.parametrize("keep_old", [False, True])
def test_a_buffer_that_was_given_other_memory_is_not_published_into(keep_old):
    buffers, gradients, publication = make()
    publication.publish()
    old = buffers.parameters[0].grad.detach() if keep_old else None
    before = None if old is None else old.clone()
    buffers.parameters[0].grad.data = torch.zeros(3)
    for parameter in buffers.parameters:
        parameter.grad = None

    assert not publication.is_possible()
    hand_over(*_all(buffers, gradients))
    assert same_bits([parameter.grad for parameter in buffers.parameters], gradients)
    assert same_bits(old, before)


def test_references_of_a_recording_are_nobodys_while_it_lives():
    buffers, _, publication = make()
    publication.publish()

    class Recording:
        pass

    recording = Recording()
    with buffers.expecting_references(recording):
        recording.refers_to = [buffers.at(0), buffers.at(1).detach().view(-1)]
    for parameter in buffers.parameters:
        parameter.grad = None
    assert not buffers.held([0, 1])

    extra = buffers.at(0)
    assert buffers.is_held(0)
    del extra
    del recording
    gc.collect()
    assert not buffers.held([0, 1])
