# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Who owns a gradient: published, added to, or fresh."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_replay.engine.tape import TapeBackend
from lightning_replay.gradients import GradientBuffers, Publication, hand_over
from tests.helpers.bits import same_bits


def make(count: int = 3) -> tuple[list[nn.Parameter], list[Any], GradientBuffers, Publication]:
    parameters = [nn.Parameter(torch.randn(2, k + 1)) for k in range(count)]
    gradients = [torch.randn_like(p) for p in parameters]
    gradients[1] = None
    buffers = GradientBuffers(parameters)
    backend = TapeBackend(torch.device("cpu"))
    return parameters, gradients, buffers, Publication(backend, backend.new_pool(), buffers, gradients)


def test_published() -> None:
    parameters, gradients, buffers, publication = make()
    assert publication.positions == (0, 2)
    assert publication.is_possible()

    publication.publish()

    assert same_bits([p.grad for p in parameters], [None if g is None else g.detach() for g in gradients])
    assert parameters[0].grad is buffers.at(0)
    assert parameters[1].grad is None
    gradients[0].fill_(7)
    assert not (parameters[0].grad == 7).any(), "what is published is a copy"
    assert not publication.is_possible()
    for parameter in parameters:
        parameter.grad = None
    assert publication.is_possible()
    publication.publish()
    assert (parameters[0].grad == 7).all()


@pytest.mark.parametrize(
    "keep",
    [lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach(), lambda grad: grad.untyped_storage()],
    ids=["tensor", "view", "detached", "storage"],
)
def test_kept_by_someone(keep: Any) -> None:
    parameters, gradients, buffers, publication = make()
    publication.publish()
    kept = keep(parameters[0].grad)
    for parameter in parameters:
        parameter.grad = None

    assert not publication.is_possible()
    assert buffers.is_held(0)
    assert not buffers.is_held(2)
    hand_over(
        {p: [g] for p, g in zip(parameters, gradients, strict=True) if g is not None},
        {p: (buffers, i) for i, p in enumerate(parameters)},
    )
    assert parameters[0].grad is not buffers.at(0)
    assert parameters[2].grad is buffers.at(2)
    del kept
    for parameter in parameters:
        parameter.grad = None
    assert publication.is_possible()


def test_a_dropped_publication_takes_its_references_along() -> None:
    parameters, gradients, buffers, publication = make()
    backend = TapeBackend(torch.device("cpu"))
    second = Publication(backend, backend.new_pool(), buffers, gradients)
    assert publication.is_possible()

    del second

    assert publication.is_possible()
    publication.publish()
    kept = parameters[2].grad
    for parameter in parameters:
        parameter.grad = None
    assert not publication.is_possible()
    assert kept is not None


def test_added_to_live_gradients_in_place() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    mine = weight.grad = torch.full((3,), 0.5)

    added = hand_over({weight: [torch.ones(3), torch.full((3,), 2.0)], other: [torch.ones(2)]}, {})

    assert added == (1, 1)
    assert weight.grad is mine
    assert mine.tolist() == [3.5] * 3
    assert other.grad is not None
    assert other.grad.tolist() == [1, 1]


def test_sums_have_autograds_order() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    weight = nn.Parameter(torch.zeros(1))

    hand_over({weight: list(parts)}, {})

    assert weight.grad is not None
    assert weight.grad.item() == 1.0


def test_what_is_handed_over_is_never_the_engines_memory() -> None:
    weight = nn.Parameter(torch.zeros(2))
    source = torch.ones(2)

    hand_over({weight: [source]}, {})
    source.fill_(float("nan"))

    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_layout_of_a_fresh_gradient() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))

    hand_over({weight: [torch.randn(2, 3, 4, 4)]}, {})

    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


def test_negative_zero_survives() -> None:
    weight = nn.Parameter(torch.zeros(1))

    hand_over({weight: [torch.tensor([-0.0])]}, {})

    assert same_bits(weight.grad, torch.tensor([-0.0]))
