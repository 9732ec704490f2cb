# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Networks wrapped in or built from torch's own transformations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from lightning_replay import Reason
from tests.helpers.bits import same_bits
from tests.helpers.trace import run_fit
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    Learner,
    batches,
    check_replayed,
    classify,
    loader,
    mlp,
    run_both,
    script,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Around(nn.Module):
    """Owns an MLP and lets a function run it."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.inner, self.run = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)), run

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self.inner, inputs)


def by_function(net: nn.Module, inputs: Tensor) -> Tensor:
    return functional_call(net, dict(net.named_parameters()), (inputs,))


def by_vmap(net: nn.Module, inputs: Tensor) -> Tensor:
    return vmap(net)(inputs)


def by_scan(net: nn.Module, inputs: Tensor) -> Tensor:
    return torch.stack([net(row) for row in inputs.unbind(0)])


def by_double(net: nn.Module, inputs: Tensor) -> Tensor:
    return F.linear(F.linear(inputs.double(), net[0].weight.double()), net[2].weight.double()).float()


@pytest.mark.parametrize("run", [by_function, by_vmap, by_scan, by_double])
def test_inside(run: Any) -> None:
    check_replayed(lambda: Learner(Around(run)))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def step_by_vmap(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(vmap(module.net)(batch[0]), batch[1])


def step_by_grad(module: Any, batch: Any, batch_idx: int) -> Tensor:
    slope = grad(lambda inputs: module.net(inputs).sum())(batch[0])
    return classify(module, batch, batch_idx) + slope.square().sum()


def step_by_jvp(module: Any, batch: Any, batch_idx: int) -> Tensor:
    logits, tangent = jvp(module.net, (batch[0],), (torch.ones_like(batch[0]),))
    return F.cross_entropy(logits, batch[1]) + tangent.square().sum()


def step_with_inference(module: Any, batch: Any, batch_idx: int) -> Tensor:
    with torch.inference_mode():
        target = module.net(batch[0]).softmax(1)
    return F.cross_entropy(module.net(batch[0]), target.clone())


@pytest.mark.parametrize("step", [step_by_vmap, step_by_grad, step_by_jvp, step_with_inference])
def test_calls_that_are_transformed_are_native(step: Any) -> None:
    _, replay = run_both(lambda: Learner(plain(), step))

    assert replay.error is None
    assert replay.trace is not None
    assert replay.trace.report.reasons[Reason.UNRECORDED_MODE] == len(replay.trace.actions)


def step_with_tangents(module: Any, batch: Any, batch_idx: int) -> Tensor:
    if not module.dual:
        return classify(module, batch, batch_idx)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
        logits, tangent = forward_ad.unpack_dual(module.net(dual))
        return F.cross_entropy(logits, batch[1]) + tangent.square().sum()


def test_tangents_come_after_a_recording() -> None:
    def make() -> Learner:
        module = Learner(plain(), step_with_tangents, events={4: lambda module: setattr(module, "dual", True)})
        module.dual = False
        return module

    trace = check_replayed(make, actions=[*script(5), "native", "native"])

    assert trace.report.reasons[Reason.UNRECORDED_MODE] == 2


def test_data_parallel_without_devices() -> None:
    check_replayed(lambda: Learner(nn.DataParallel(mlp())))


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool) -> None:
    def make() -> Learner:
        torch._dynamo.reset()
        net = mlp(0.0)
        if whole:
            return Learner(torch.compile(net, backend="eager"))
        net[0] = torch.compile(net[0], backend="eager")
        return Learner(net)

    _, replay = run_both(make)

    assert replay.trace is not None
    assert replay.trace.actions.count("replay") > 0


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch >= 2.6 can switch compiled code off")
def test_code_that_computes_otherwise_once_compiled() -> None:
    """A tape holds what runs eagerly. Where that is not what was compiled, the network stays native, and compiled."""

    def compiler(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(out * 1.5 for out in graph(*args))

    def make() -> Learner:
        return Learner(torch.compile(mlp(0.0), backend=compiler))

    torch._dynamo.reset()
    native, replay = run_both(make)
    afterwards = run_fit(make, lambda: loader(batches(), 7), "auto", max_epochs=1)

    assert replay.trace is not None
    assert "replay" not in replay.trace.actions
    assert replay.trace.report.reasons[Reason.MISMATCH] == 5
    assert native.trace is not None
    assert same_bits(native.trace.losses[0], afterwards.losses[0])
