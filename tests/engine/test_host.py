# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Host tensors on their way to a device. The meta device stands for one that is not the host: it has no values."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_replay import CaptureError, Reason
from lightning_replay.engine import host
from lightning_replay.engine.host import HostConstants, HostValues, host_values
from lightning_replay.engine.recording import Recorder
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.inspection import Inspector, Trace, Tracer
from lightning_replay.reasons import Finding
from tests.engine.test_recording import call_of

META = torch.device("meta")
CPU = torch.device("cpu")
INDEX = torch.ops.aten.index.Tensor

held = torch.tensor(0.5)
held_row = torch.tensor([1.0, 2.0, 3.0])

Run = Callable[[Tensor], object]


def inspect(run: Run, device: torch.device = META, seen: bool = True) -> Inspector:
    """Observes two runs as a recording does."""
    given = torch.zeros(2, 3, device=device)
    with Tracer("net", None, torch.device("cpu"), [], []) as tracer:
        run(given)
    inspector = Inspector("net", tracer.trace if seen else None, device, [], [], [], [], lambda: torch.zeros(1))
    with inspector:
        run(given)
    inspector.end_forward()
    return inspector


def crossings(trace: Trace) -> int:
    """Counts operations of the device that get a host tensor."""
    entries = (entry for entry in trace if entry[0] is not torch.ops.aten.lift_fresh.default)
    return sum(any(isinstance(leaf, HostValues) for leaf in entry) for entry in entries)


def refusal(run: Run, seen: bool = True) -> Finding:
    with pytest.raises(CaptureError) as error:
        inspect(run, seen=seen)
    return error.value.finding


CONSTANTS: dict[str, Run] = {
    "filled": lambda x: x + torch.full((3,), 2.0).to(x.device),
    "computed": lambda x: x + (torch.arange(3) * 2.0 + 1).to(x.device, torch.float64),
    "expanded": lambda x: x + torch.ones(1).expand(3).to(x.device),
    "in place": lambda x: x + torch.zeros(3).add_(1).to(x.device),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(1.0)),
    "index": lambda x: x[:, torch.tensor([0, 2])],
    "index_put": lambda x: x.index_put((torch.tensor([0, 1]),), torch.tensor(1.0)),
    "copy_": lambda x: x.clone()[0].copy_(torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("run", CONSTANTS.values(), ids=CONSTANTS)
def test_a_copy_of_a_constant_is_answered_on_the_device(run: Run) -> None:
    inspector = inspect(run)

    assert inspector.difference is None
    assert inspector.constants.needed
    assert {tensor.device for tensor in inspector.foreign} == {META}, "the constants are kept alive"
    given = torch.zeros(2, 3, device=META)
    with Tracer("net", None, torch.device("cpu"), [], []) as below, inspector.constants:
        run(given)
    assert crossings(inspector.trace) == 1
    assert crossings(below.trace) == 0


def test_a_number_stays_one() -> None:
    """A device tensor in its place would be rounded to the other argument's dtype first."""
    inspector = inspect(lambda x: x.bfloat16() * torch.tensor(1.001))

    assert inspector.difference is None
    assert not inspector.constants.needed


HELD: dict[str, Run] = {
    "number": lambda x: x * held,
    "copied": lambda x: x + held_row.to(x.device),
    "computed": lambda x: x + (held_row * 2).to(x.device),
    "copied to a constant": lambda x: x + torch.zeros(3).copy_(held_row).to(x.device),
    "view": lambda x: x + held_row.view(3)[:1].to(x.device),
}


@pytest.mark.parametrize("run", HELD.values(), ids=HELD)
def test_what_was_there_before_may_change(run: Run) -> None:
    finding = refusal(run)

    assert finding.reason is Reason.HOST_TENSOR
    assert "test_host.py" in finding.where
    assert "there before" in finding.actual


def test_a_replay_would_not_write_to_the_host() -> None:
    assert refusal(lambda x: held_row.add_(0)).reason is Reason.HOST_TENSOR


def test_one_observation_proves_nothing() -> None:
    finding = refusal(lambda x: x + torch.ones(3).to(x.device), seen=False)

    assert finding.reason is Reason.HOST_TENSOR
    assert "only once" in finding.actual


def test_random_numbers_of_the_host() -> None:
    assert refusal(lambda x: x + torch.rand(3).to(x.device)).reason is Reason.HOST_RANDOM


@pytest.mark.parametrize("device", [META, CPU], ids=str)
def test_other_values_in_the_second_run(device: torch.device) -> None:
    numbers = itertools.count()

    finding = inspect(lambda x: x + torch.tensor([float(next(numbers))]).to(x.device), device).difference

    assert finding is not None
    assert finding.reason is Reason.HOST_TENSOR


def test_another_number_is_no_other_tensor() -> None:
    numbers = itertools.count()

    finding = inspect(lambda x: x + torch.full((3,), float(next(numbers))).to(x.device)).difference

    assert finding is not None
    assert finding.reason is Reason.PYTHON_VALUE


def test_a_capture_meets_known_values_only() -> None:
    constants = inspect(lambda x: x + torch.ones(3).to(x.device)).constants

    with constants, pytest.raises(CaptureError) as error:
        torch.zeros(3).to(torch.ones(3).to(META).device)
    assert error.value.finding.reason is Reason.HOST_TENSOR


def test_a_recording_reads_the_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both passes. Integers stand for what is on the host; the constant is changed to see who reads it."""

    class Picking(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[:, torch.tensor([0, 2])]

    def integers(func: object, args: object, kwargs: object) -> list[Tensor]:
        leaves = tree_leaves((args, kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype is torch.int64]

    monkeypatch.setattr(host, "crossing", integers)
    given = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    constants, backend = HostConstants(CPU), TapeBackend(CPU)
    ((_, (constant,)), _) = constants.replaced(INDEX, (given, [torch.tensor([0, 2])]), {}, make=True)
    recorder = Recorder(backend, backend.new_pool(), call_of(Picking(), given), [], [torch.ones(1, 2)])
    recording = recorder.record(recorder.run_reference(), {}, draws=False, constants=constants)

    for picked, gradient in (([0, 2], [1, 0, 1]), ([1, 1], [0, 2, 0])):
        constant.copy_(torch.tensor(picked))
        (result,) = recording.forward([given])
        recording.backward([torch.ones(1, 2)])
        assert result.tolist() == given[:, picked].tolist()
        assert recording.input_gradients[0] is not None
        assert recording.input_gradients[0].tolist() == [gradient]


def test_numbers_are_lifted_only_meanwhile() -> None:
    before = torch._C._only_lift_cpu_tensors()
    with HostConstants(META):
        assert torch._C._only_lift_cpu_tensors()

    assert torch._C._only_lift_cpu_tensors() == before


def test_values_are_compared_as_bits() -> None:
    zero = torch.zeros(2)

    assert host_values(zero) == host_values(zero.clone())
    assert host_values(zero) != host_values(-zero)
    assert host_values(zero) != host_values(zero.double())
    assert host_values(zero) != host_values(torch.zeros(1, 2))
    assert host_values(torch.ones(2, 3)) != host_values(torch.ones(3, 2).t())
    assert host_values(torch.zeros(0)) == host_values(torch.zeros(0))
    assert host_values(torch.zeros(2).to_sparse()).digest == b""
    assert host_values(torch.zeros(2, device=META)).digest == b""
