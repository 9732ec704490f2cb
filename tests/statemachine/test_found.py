# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What the state machine and the field reports found, each as a short fit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import Reason
from tests.helpers.bits import assert_same
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    Learner,
    TwoResults,
    UsesTwice,
    batches,
    check_replayed,
    loader,
    mlp,
    run_both,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_a_result_that_another_is_made_from(weight: float) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits, hidden = module.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return loss + weight * hidden.square().mean() if weight else loss

    trace = check_replayed(lambda: Learner(TwoResults(), step))

    assert Reason.COTANGENTS not in trace.report.reasons


class Changed(nn.Module):
    """Multiplies with a number that something other than an attribute of a module holds."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.net = mlp()
        self.read = read

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) * self.read()


class Config:
    def __init__(self) -> None:
        self._gain = 1.0

    def gain(self) -> float:
        return self._gain


def test_a_number_behind_a_function_that_the_module_holds() -> None:
    def make() -> Learner:
        gain = 1.0

        def change(module: Any) -> None:
            nonlocal gain
            gain = 0.5

        return Learner(Changed(lambda: gain), events={5: change})

    check_replayed(make, actions=[*script(6), *script(6)], steps=12)


def test_a_number_behind_a_method_of_an_object_that_the_module_holds() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.config = mlp(), Config()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs) * self.config.gain()

    check_replayed(
        lambda: Learner(Configured(), events={5: lambda module: setattr(module.net.config, "_gain", 0.5)}),
        actions=[*script(6), *script(6)],
        steps=12,
    )


def test_a_number_on_the_class_of_the_module() -> None:
    def make() -> Learner:
        class WithConstant(nn.Module):
            gain = 1.0

            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, inputs: Tensor) -> Tensor:
                return self.net(inputs) * self.gain

        return Learner(WithConstant(), events={5: lambda module: setattr(WithConstant, "gain", 0.5)})

    check_replayed(make, actions=[*script(6), *script(6)], steps=12)


def test_two_layers_of_one_factory_have_closures_of_their_own() -> None:
    def make() -> Learner:
        changes = []

        def layer() -> nn.Module:
            gain = 1.0

            def change() -> None:
                nonlocal gain
                gain = 0.5

            changes.append(change)

            class Layer(nn.Linear):
                def forward(self, inputs: Tensor) -> Tensor:
                    return super().forward(inputs) * gain

            return Layer(FEATURES, FEATURES)

        net = nn.Sequential(layer(), layer(), mlp())
        return Learner(net, events={5: lambda _: changes[0](), 11: lambda _: changes[1]()})

    check_replayed(make, actions=[*script(6), *script(6), *script(6)], steps=18)


@pytest.mark.parametrize("later", [3, 4])
def test_more_calls_in_later_steps(later: int) -> None:
    """Two calls are replayed and others native: three parts of a sum keep their order."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        count = 2 if batch_idx < 5 else later
        return torch.stack([F.cross_entropy(module.net(batch[0] * (1 + i)), batch[1]) for i in range(count)]).sum()

    _, replay = run_both(lambda: Learner(mlp(), step), steps=10)

    assert replay.trace is not None
    assert replay.trace.actions[-2:] == ["replay", "replay"]


def test_penalties_before_and_after_a_call() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        weight = module.net[4].weight
        before = (weight * 1.3).square().sum() if batch_idx >= 4 else 0.0
        loss = F.cross_entropy(module.net(batch[0]), batch[1])
        return loss + 0.1 * before + 0.1 * (weight.abs().sum() if batch_idx >= 4 else 0.0)

    _, replay = run_both(lambda: Learner(mlp(), step), steps=10)

    assert replay.trace is not None
    assert replay.trace.actions[3:] == ["replay"] * 7


class Residual(nn.Module):
    """Uses its argument several times."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.left(inputs).tanh() * self.right(inputs).sigmoid() * 0.5 + 0.1


class Shortcuts(Learner):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, CLASSES))
        self.embed, self.block = nn.Linear(FEATURES, 8), Residual()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embed(batch[0])
        return F.cross_entropy(self.net(self.block(hidden) + hidden * 0.3), batch[1])


def test_an_argument_that_is_used_outside_as_well() -> None:
    _, replay = run_both(Shortcuts, steps=10)

    assert replay.trace is not None
    assert Reason.SHARED_PARAMETER in replay.trace.report.reasons
    assert "block" not in {recording.region for recording in replay.trace.report.recordings}


def test_gradients_are_there_after_a_backward_that_failed_half_way() -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("a hook of the user's own")

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        if batch_idx == 6:
            inputs.register_hook(fail)
        return F.cross_entropy(module.net(inputs), batch[1])

    native, replay = run_both(lambda: Learner(mlp(), step), batches(), steps=8)

    assert isinstance(native.error, ValueError)
    theirs, ours = (dict(arm.modules[0].named_parameters()) for arm in (native, replay))
    reached = {name: parameter.grad for name, parameter in theirs.items() if parameter.grad is not None}
    assert reached
    assert_same(reached, {name: ours[name].grad for name in reached})


class Before(Learner):
    """Uses a weight of the network on what goes into the network."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), mlp()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(torch.tanh(F.linear(batch[0], self.net[0].weight))), batch[1])


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_weight_used_upstream_of_the_replayed_network(window: int) -> None:
    """The two parts of its gradient are added to each other before they are added to the live one."""
    trace = check_replayed(Before, actions=script(12), steps=12, accumulate_grad_batches=window)

    assert len(trace.report.recordings) == 1


def test_a_parameter_that_only_a_recomputed_call_reaches_and_that_is_used_outside() -> None:
    """The recording knows of no gradient for it; its parts join the native ones in their order all the same."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for scale in (1.0, 0.5, 2.0):
            logits, hidden = module.net(batch[0] * scale)
            loss = hidden.square().mean() + 0.1 * module.net.head.weight.square().sum()
            losses.append(loss + F.cross_entropy(logits, batch[1]) if batch_idx >= 5 else loss)
        return torch.stack(losses).sum()

    _, replay = run_both(lambda: Learner(TwoResults(), step), steps=8)

    assert replay.trace is not None
    assert "replay" in replay.trace.actions[:5]
    assert replay.trace.report.reasons[Reason.COTANGENTS] > 0


@pytest.mark.parametrize("window", [1, 2])
def test_a_hook_that_sees_the_gradient_of_a_weight_used_upstream(window: int) -> None:
    """The live gradient stays in its place while autograd works."""

    class Hooked(Before):
        def __init__(self) -> None:
            super().__init__()
            weight = self.net[0].weight
            self.seen: list[Tensor] = []
            weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.clone()))

    native, replay = run_both(Hooked, steps=12, accumulate_grad_batches=window)

    assert replay.trace is not None
    assert "replay" in replay.trace.actions
    assert_same(native.modules[0].seen, replay.modules[0].seen, "seen")


def test_native_calls_in_between_are_no_uses_outside() -> None:
    """A network with a weight that it uses twice is recorded for another shape after an audit."""
    trace = check_replayed(
        lambda: Learner(UsesTwice(), events={6: lambda module: getattr(module.trainer.strategy, "audit", int)()}),
        lambda: loader([*batches(count=8), *batches(size=3, count=8)], 16),
        actions=[*script(7), "native", *script(8)],
        steps=16,
    )

    assert Reason.SHARED_PARAMETER not in trace.report.reasons


@pytest.mark.parametrize("window", [1, 2])
def test_a_hook_that_reads_a_gradient_while_parts_of_it_arrive(window: int) -> None:
    """Natively nothing is accumulated before all parts of a gradient are there."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        weight = module.net[0].weight

        def scaled(gradient: Tensor) -> Tensor:
            return gradient if weight.grad is None else gradient * (1 + weight.grad.abs().mean())

        loss = F.cross_entropy(module.net(batch[0]), batch[1])
        loss.register_hook(scaled)
        return loss + weight.square().sum()

    _, replay = run_both(
        lambda: Learner(mlp(), step), strategy=tape(scope="network"), steps=10, accumulate_grad_batches=window
    )

    assert replay.trace is not None
    assert replay.trace.actions == script(10)


def test_a_hook_on_a_tensor_inside_of_the_network_is_native() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.net = nn.Linear(FEATURES, FEATURES), mlp()
            self.seen: Any = lambda gradient: None

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            hidden.register_hook(lambda gradient: self.seen(gradient))
            return self.net(hidden)

    class Seeing(Learner):
        def __init__(self) -> None:
            super().__init__(Hooked())
            self.gradients: list[Tensor] = []
            self.net.seen = self.gradients.append

    native, replay = run_both(Seeing, steps=8)

    assert_same(native.modules[0].gradients, replay.modules[0].gradients, "gradients")
    assert len(native.modules[0].gradients) == 8
    assert replay.trace is not None
    assert replay.trace.report.reasons[Reason.HOOKS] > 0


def test_a_layer_added_to_a_container_from_which_one_was_deleted() -> None:
    """Deleting gives the container another dict of modules; the first one shows nothing of what comes later."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
            self.net = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = torch.tanh(layer(inputs))
            return self.net(inputs)

    def add(module: Any) -> None:
        module.net.layers.append(nn.Linear(FEATURES, FEATURES))

    def add_and_delete(module: Any) -> None:
        add(module)
        del module.net.layers[2]

    trace = check_replayed(
        lambda: Learner(Deep(), events={5: add_and_delete, 8: add}),
        actions=[*script(6), *script(3), *script(5)],
        steps=14,
    )

    assert trace.report.reasons[Reason.MODULE_CHANGED] == 2
