# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Recordings, stand-ins, snapshots: what they give, and that they leave no trace."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_replay import CaptureError, Reason
from lightning_replay.engine import tree
from lightning_replay.engine.interposition import Shadowed, interposed, is_interposed
from lightning_replay.engine.modes import current_modes
from lightning_replay.engine.recording import Call, Recorder, check_outputs, take_apart
from lightning_replay.engine.snapshot import HostRandom, Snapshot
from lightning_replay.engine.standins import stand_ins
from lightning_replay.engine.tape import TapeBackend
from tests.helpers.bits import same_bits

CPU = torch.device("cpu")


def call_of(module: nn.Module, *inputs: Tensor) -> Call:
    given, paths, structure = tree.flatten((inputs, {}), "net")
    copies = [t.detach().clone() for t in given]
    return Call("net", module.forward, structure, copies, paths, [t.requires_grad for t in given], current_modes("cpu"))


def test_forward_and_backward_replayed() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parameters = list(net.parameters())
    backend = TapeBackend(CPU, poison=True)
    given = torch.randn(5, 3, requires_grad=True)
    recorder = Recorder(backend, backend.new_pool(), call_of(net, given), parameters, [torch.ones(5, 2)])
    recording = recorder.record(recorder.run_reference(), {}, draws=False)

    for _ in range(3):
        given, seed = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
        (result,) = recording.forward([given])
        assert recording.matches([seed])
        recording.backward([seed])

        native = net(given)
        gradients = torch.autograd.grad(native, [*parameters, given], seed)
        assert same_bits(result, native)
        assert same_bits([*recording.gradients, *recording.input_gradients], list(gradients))

    assert not recording.matches([None])
    assert not recording.matches([torch.ones(()).expand(5, 2)])
    assert not recording.matches([torch.ones(5, 2, dtype=torch.float64)])


def test_unused_parameters_have_no_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    net = Net()
    backend = TapeBackend(CPU)
    recorder = Recorder(
        backend, backend.new_pool(), call_of(net, torch.ones(1, 3)), list(net.parameters()), [torch.ones(1, 2)]
    )

    recording = recorder.record(recorder.run_reference(), {}, draws=False)

    assert [gradient is None for gradient in recording.gradients] == [False, False, True, True]
    assert recording.several_uses == frozenset()


def test_foreign_graphs_are_refused() -> None:
    outside = torch.ones(3, requires_grad=True)
    older = outside * 2

    class Net(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.held = [tensor]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs * self.held[0])

    backend = TapeBackend(CPU)
    for tensor in (outside, older):
        net = Net(tensor)
        recorder = Recorder(
            backend, backend.new_pool(), call_of(net, torch.ones(1, 3)), list(net.parameters()), [torch.ones(1, 2)]
        )
        with pytest.raises(CaptureError) as caught:
            recorder.run_reference()
        assert caught.value.finding.reason is Reason.FOREIGN_GRAPH


def test_outputs_that_alias() -> None:
    base, weight = torch.zeros(4, 4), torch.zeros(4)

    def finding(result: Any) -> Any:
        return check_outputs(take_apart(result, [base], "net"), {"net.x": base, "net.weight": weight}, CPU)

    own = torch.zeros(4, 4)
    assert finding((own, own, base)) is None  # the same object twice, and an argument itself
    assert finding(own.chunk(2, dim=1)) is None
    assert finding((own[:2], own[1:])).reason is Reason.OUTPUT_ALIAS
    assert finding(base[1:]).actual == "shares memory with net.x"
    assert finding(weight.view(2, 2)).actual == "shares memory with net.weight"
    assert finding(own.to_sparse()).reason is Reason.UNSUPPORTED_TENSOR
    with pytest.raises(CaptureError) as caught:
        take_apart(object(), [], "net")
    assert caught.value.finding.reason is Reason.RESULT


def test_stand_ins_share_memory_and_leave_no_trace() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 2)
            self.tied = nn.Linear(3, 2)
            self.again = nn.ModuleList([self.tied])
            self.listed = [self.tied.weight, 3]

    net = Net()
    net.other = nn.Parameter(torch.ones(1))
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    members = {name: dict(module._parameters) for name, module in net.named_modules()}
    parameters = list(net.parameters())[:-1]

    with stand_ins(net, parameters) as leaves:
        assert all(leaf.data_ptr() == p.data_ptr() for leaf, p in zip(leaves, parameters, strict=True))
        assert not {id(leaf) for leaf in leaves} & {id(p) for p in parameters}
        assert net.listed[0] is net.tied.weight is net.again[0].weight
        assert net.listed[0] is not parameters[-2]
        held = net.rnn.weight_ih_l0.data_ptr()
        net.rnn(torch.ones(1, 1, 3))[0].sum().backward()
        assert net.rnn.weight_ih_l0.data_ptr() == held
        assert net.rnn.weight_ih_l0.grad is not None

    assert {name: dict(module._parameters) for name, module in net.named_modules()} == members
    for name, module in net.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[key] is value for key, value in before[name].items())
    assert all(p.grad is None for p in net.parameters())


def test_stand_ins_are_taken_away_after_an_error() -> None:
    net = nn.Linear(2, 2)
    weight = net.weight

    with pytest.raises(ValueError, match="inside"), stand_ins(net, [weight]):
        raise ValueError("inside")

    assert net.weight is weight


def test_snapshot() -> None:
    buffer, expanded = torch.arange(4.0), torch.ones(1).expand(3)
    backend = TapeBackend(CPU)
    before = Snapshot(backend, {"buffer": buffer, "expanded": expanded})
    version = buffer._version
    drawn = torch.rand(2), random.random(), np.random.rand()

    buffer.data.mul_(2)
    after = Snapshot(backend, {"buffer": buffer, "expanded": expanded})
    assert after.names_changed_since(before) == ["buffer"]
    assert after.drew_since(before)
    before.restore()

    assert buffer.tolist() == [0, 1, 2, 3]
    assert buffer._version == version
    assert same_bits((torch.rand(2), random.random(), np.random.rand()), drawn)


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "Python"),
        (lambda: np.random.rand(), "NumPy"),
        (lambda: None, None),
        (lambda: torch.rand(1), None),
    ],
    ids=["python", "numpy", "nothing", "torch"],
)
def test_host_random(draw: Any, named: str | None) -> None:
    before = HostRandom(CPU)
    draw()

    moved = HostRandom(CPU).moved_since(before)

    assert moved is None if named is None else named in str(moved)


def test_cpu_generator_counts_for_other_devices() -> None:
    before = HostRandom(torch.device("cuda"))
    torch.rand(1)

    assert "torch" in str(HostRandom(torch.device("cuda")).moved_since(before))


def test_interposition() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    own = lambda inputs: inputs  # noqa: E731
    second.forward = own

    def use() -> None:
        with interposed({first: lambda x: x * 5, second: lambda x: x * 7}):
            assert first(torch.ones(1)).item() == 5
            assert second(torch.ones(1)).item() == 7
            assert is_interposed(first.forward)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        use()

    assert "forward" not in first.__dict__
    assert second.__dict__["forward"] is own
    assert not is_interposed(second.forward)


@pytest.mark.parametrize("copy_of", [copy.copy, nn.Module._replicate_for_data_parallel])
def test_a_shallow_copy_has_its_own_forward(copy_of: Any) -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.scale

    module, given = Scaled(), Scaled()
    given.forward = lambda inputs: inputs + 1
    with interposed({module: lambda x: x * 5, given: lambda x: x * 7}):
        copied, kept, other = copy_of(module), copy_of(module), copy_of(given)
        copied.scale = kept.scale = 3.0
        assert copied(torch.ones(1)).item() == 3
        assert other(torch.ones(1)).item() == 2
        assert module(torch.ones(1)).item() == 5
        assert given(torch.ones(1)).item() == 7
        assert is_interposed(kept.forward)  # nobody has called it yet

    assert kept(torch.ones(1)).item() == 3
    assert [m for m in (module, copied, kept) if "forward" in m.__dict__] == []


def test_a_forward_set_meanwhile_stays() -> None:
    module = nn.Linear(1, 1)

    def own(inputs: Tensor) -> Tensor:
        return inputs * 3

    with interposed({module: lambda x: x * 5}):
        module.forward = own  # type: ignore[method-assign]

    assert module.__dict__["forward"] is own


def test_shadowed() -> None:
    class Target:
        def act(self) -> int:
            return 1

    target = Target()
    with Shadowed(target, "act", lambda: 2):
        assert target.act() == 2
    assert target.act() == 1
    assert not target.__dict__
    target.act = lambda: 3  # type: ignore[method-assign]
    with Shadowed(target, "act", lambda: 2):
        assert target.act() == 2
    assert target.act() == 3
