# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Numbers that code reads from the device are read again for other arguments, from where they come from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_replay import Reason
from lightning_replay.engine.reads import Check, Made, Operation, Reads
from lightning_replay.errors import CaptureError
from lightning_replay.inspection import Inspector, Tracer

CPU = torch.device("cpu")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
FULL = torch.ones_like(MASK)

Run = Callable[[Tensor, Tensor], object]


def inspect(run: Run, mask: Tensor, buffer: Tensor) -> Reads:
    inspector = Inspector("net", None, CPU, [mask], [], [buffer], [buffer], lambda: torch.zeros(1))
    with inspector:
        run(mask, buffer)
    return inspector.constants.reads


NUMBERS: dict[str, tuple[Run, list[Any]]] = {
    "bool": (lambda mask, _: bool((mask == 1).all()), [False]),
    "several": (lambda mask, _: (int(mask.sum()), mask.any().item()), [5, True]),
    "through views": (lambda mask, _: mask.t()[2].clone()[:1].sum().item(), [0]),
    "several results": (lambda mask, _: mask.min(dim=1)[1].sum().item(), [2]),
    "from a buffer": (lambda _, buffer: buffer.sum().item(), [3]),
    "of a float argument": (lambda mask, _: torch.isnan(mask[:, 1]).any().item(), [False]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_read_again(name: str) -> None:
    run, numbers = NUMBERS[name]
    mask = MASK.double() if name == "of a float argument" else MASK.clone()
    buffer = torch.tensor([1, 2])
    reads = inspect(run, mask, buffer)

    assert reads.answers == numbers
    assert reads.difference([mask.clone()]) is None
    buffer += 1
    other = torch.full_like(mask, torch.nan) if mask.is_floating_point() else FULL
    recorded, now = reads.difference([other]) or (None, None)
    assert recorded == numbers[0]
    assert now not in (None, recorded)


def test_a_number_that_nothing_changes_is_not_read_again() -> None:
    def run(mask: Tensor, buffer: Tensor) -> None:
        positions = torch.arange(mask.shape[1]).unsqueeze(0)
        assert (positions.diff() == 1).all()

    reads = inspect(run, MASK, torch.zeros(1))

    assert reads.answers == [True]
    assert reads.program == []
    assert reads.difference([FULL]) is None


def test_only_what_leads_to_a_number_is_run_again() -> None:
    reads = inspect(lambda mask, buffer: (mask.cumsum(0), mask.all().item()), MASK, torch.zeros(1))

    operation, check = reads.program
    assert isinstance(operation, Operation)
    assert operation.func.overloadpacket.__name__ == "all"
    assert check == Check(Made(operation, 0), False)


def test_what_a_number_guards_is_run_after_it() -> None:
    table = torch.tensor([0, 1, 2])

    def run(ids: Tensor, buffer: Tensor) -> None:
        if (ids.max() >= 3).item():
            ids = ids.clamp(max=2)
        assert buffer[ids].sum().item() == 6

    reads = inspect(run, torch.tensor([1, 2, 2, 1]), table)

    assert reads.difference([torch.tensor([2, 1, 1, 2])]) is None
    assert reads.difference([torch.tensor([2, 1, 1, 7])]) == (False, True)


def test_an_error_on_the_way_to_a_number_is_a_difference() -> None:
    reads = inspect(lambda ids, buffer: buffer[ids].sum().item(), torch.tensor([0, 1]), torch.tensor([1, 2]))

    _, actual = reads.difference([torch.tensor([0, 5])]) or (None, None)
    assert "IndexError" in str(actual)


def _swapped(tensor: Tensor) -> Tensor:
    tensor.data = torch.zeros(3, dtype=torch.long)
    return tensor


REFUSED: dict[str, Run] = {
    "computed in floating point": lambda mask, _: (mask.double().mean() > 0.5).item(),
    "a floating point number": lambda mask, buffer: mask.double().sum().item(),
    "written before": lambda mask, buffer: buffer.add_(1).sum().item(),
    "written through a view": lambda mask, buffer: (buffer[0].add_(1), buffer.sum().item()),
    "given other memory": lambda mask, _: _swapped(mask.clone()).sum().item(),
    "filled": lambda mask, _: torch.zeros_like(mask).masked_fill_(mask == 1, 2).sum().item(),
    "random": lambda mask, _: torch.randint(0, 2, (3,)).sum().item(),
}


@pytest.mark.parametrize("run", REFUSED.values(), ids=REFUSED)
def test_a_number_of_unknown_origin_is_refused(run: Run) -> None:
    with pytest.raises(CaptureError) as error:
        inspect(run, MASK, torch.tensor([1, 2]))

    assert error.value.finding.reason is Reason.HOST_SYNC
    assert "test_reads.py" in error.value.finding.where


def test_memory_used_anew_is_not_what_was_written_there() -> None:
    def run(mask: Tensor, _: Tensor) -> None:
        for _ in range(4):
            torch.zeros(2, 3, dtype=torch.long).add_(1)
            assert (mask + 1).sum().item() == 11

    assert inspect(run, MASK, torch.zeros(1)).answers == [11] * 4


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "jagged"])
def test_tensors_without_a_storage_are_passed_over(layout: str) -> None:
    def run(mask: Tensor, _: Tensor) -> None:
        if layout == "jagged":
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).cos()
        else:
            other = mask.double().to_sparse(layout=getattr(torch, layout))
            assert (other @ torch.ones(3, 1, dtype=torch.double)).sum() == 5
        assert mask.sum().item() == 5

    tracer = Tracer("net", None, CPU, [MASK], [])
    with tracer:
        run(MASK, MASK)

    assert tracer.trace


def test_the_recorded_numbers_are_given_without_reading() -> None:
    def run(mask: Tensor, _: Tensor) -> list[Any]:
        return [mask.all().item(), mask.sum().item()]

    inspector = Inspector("net", None, CPU, [MASK], [], [], [], lambda: torch.zeros(1))
    with inspector:
        run(MASK.detach(), MASK)

    for _ in range(2):
        with inspector.constants:
            assert run(FULL, FULL) == [False, 5]
