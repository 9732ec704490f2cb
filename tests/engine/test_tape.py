# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Tapes: fixed addresses, frozen Python, poisoned memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import CaptureError, Reason
from lightning_replay.engine.tape import TapeBackend, fill_with_garbage
from tests.helpers.bits import same_bits

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["plain", "poisoned"])
def backend(request: pytest.FixtureRequest) -> TapeBackend:
    return TapeBackend(CPU, poison=request.param)


def record(backend: TapeBackend, run: Callable[[], Any]) -> tuple[Any, Any]:
    return backend.capture(backend.new_pool(), run, overwrites_pool=True)


def test_a_replay_reads_its_input_anew_and_writes_where_it_wrote(backend: TapeBackend) -> None:
    given = torch.ones(3)
    tape, result = record(backend, lambda: (given * 2 + 1).relu())
    address = result.data_ptr()

    given.fill_(-3)
    tape.replay()
    assert result.tolist() == [0, 0, 0]
    given.fill_(4)
    tape.replay()
    assert result.tolist() == [9, 9, 9]
    assert result.data_ptr() == address


def test_python_is_frozen(backend: TapeBackend) -> None:
    calls = []
    given = torch.ones(1)

    def run() -> Tensor:
        calls.append(1)
        return given * len(calls)

    tape, result = record(backend, run)
    tape.replay()
    tape.replay()

    assert calls == [1]
    assert result.item() == 1


def test_random_numbers_are_drawn_anew(backend: TapeBackend) -> None:
    given = torch.ones(50)
    tape, result = record(backend, lambda: F.dropout(given, 0.5))

    torch.manual_seed(1)
    tape.replay()
    first = result.clone()
    torch.manual_seed(1)
    native = F.dropout(given, 0.5)
    assert same_bits(first, native)
    tape.replay()
    assert not same_bits(result, first)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.t().contiguous().view(-1)[1:],
        lambda x: x.clone().transpose_(0, 1).mul(2),
        lambda x: x.clone().unsqueeze_(0).squeeze_(0).add_(1),
        lambda x: torch.cat([x, x]).chunk(2)[1] * 3,
        lambda x: torch.empty(3, 3).copy_(x).sub_(1),
        lambda x: x.sort(dim=0).values,
        lambda x: x.expand(2, 3, 3).sum(0),
        lambda x: x.new_zeros(3).index_add_(0, torch.tensor([0, 2]), x[0, :2]),
        lambda x: torch.zeros(3, 3).masked_fill_(x > 0, 1.0),
        lambda x: torch.split(x, 1)[2].clone(),
        lambda x: F.layer_norm(x, (3,)),
        lambda x: torch.where(x > 0, x, x * 0),
    ],
    ids=[
        "contiguous",
        "transpose_",
        "squeeze_",
        "chunk",
        "empty",
        "sort",
        "expand",
        "index_add_",
        "masked_fill_",
        "split",
        "layer_norm",
        "where",
    ],
)
def test_operations(backend: TapeBackend, run: Callable[[Tensor], Tensor]) -> None:
    given = torch.randn(3, 3)
    tape, result = record(backend, lambda: run(given))

    for _ in range(3):
        given.copy_(torch.randn(3, 3))
        tape.replay()
        assert same_bits(result, run(given))


def test_in_place_on_memory_of_others(backend: TapeBackend) -> None:
    counter = torch.zeros(())
    tape, _ = record(backend, lambda: counter.add_(1))

    tape.replay()
    tape.replay()

    assert counter.item() == 3


def test_poison_reaches_all_that_a_forward_may_write() -> None:
    backend = TapeBackend(CPU, poison=True)
    pool = backend.new_pool()
    given = torch.ones(2)
    forward, first = backend.capture(pool, lambda: given * 2, overwrites_pool=True)
    backward, second = backend.capture(pool, lambda: first * 3)
    backward.replay()
    assert second.tolist() == [6, 6]

    forward.replay()

    assert first.tolist() == [2, 2]
    assert second.isnan().all(), "a forward replay may destroy what the backward left"
    assert given.tolist() == [1, 1]
    assert pool.bytes() == 16
    del second, backward
    assert pool.bytes() == 8


def test_a_tape_starts_from_nothing() -> None:
    """What was computed while recording must not pass for the result of a replay."""
    given = torch.ones(2)
    tape, result = record(TapeBackend(CPU), lambda: given * 2)
    entries, tape._entries = tape._entries, []

    tape.replay()

    assert len(entries) == 1

    assert result.isnan().all()


def test_garbage() -> None:
    filled = [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.long, torch.bool)]
    filled.append(torch.zeros(1).expand(3))

    fill_with_garbage(filled)

    assert filled[0].isnan().all()
    assert filled[1].tolist() == [113, 113]
    assert filled[2].all()
    assert filled[3].isnan().all()


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x.sum().item(), Reason.HOST_SYNC),
        (lambda x: x[x > 0], Reason.HOST_SYNC),
        (lambda x: x.nonzero(), Reason.HOST_SYNC),
        (lambda x: x.tolist(), Reason.HOST_SYNC),
        (lambda x: x.numpy(), Reason.HOST_SYNC),
        (lambda x: "yes" if x.any() else "no", Reason.HOST_SYNC),
        (lambda x: torch.rand(2, generator=torch.Generator()), Reason.HOST_RANDOM),
    ],
    ids=["item", "mask", "nonzero", "tolist", "numpy", "branch", "generator"],
)
def test_what_the_host_takes_part_in(backend: TapeBackend, run: Callable[[Tensor], Any], reason: Reason) -> None:
    with pytest.raises(CaptureError) as caught:
        record(backend, lambda: run(torch.ones(3)))

    assert caught.value.finding.reason is reason
    assert "test_tape.py" in caught.value.finding.where


def test_gradient_mode_is_part_of_the_tape(backend: TapeBackend) -> None:
    rnn = nn.LSTM(3, 2, batch_first=True)
    given = torch.randn(2, 4, 3)
    pool = backend.new_pool()
    forward, result = backend.capture(pool, lambda: rnn(given)[0], overwrites_pool=True)
    seed = torch.ones_like(result)
    backward, gradients = backend.capture(pool, lambda: torch.autograd.grad(result, list(rnn.parameters()), seed))

    given.copy_(torch.randn(2, 4, 3))
    forward.replay()
    backward.replay()

    native = torch.autograd.grad(rnn(given)[0], list(rnn.parameters()), seed)
    assert same_bits(gradients, native)
    assert torch.is_grad_enabled()


def test_random_state_of_the_device() -> None:
    backend = TapeBackend(CPU)
    state = backend.random_state()
    drawn = torch.rand(3)

    backend.set_random_state(state)

    assert same_bits(torch.rand(3), drawn)
