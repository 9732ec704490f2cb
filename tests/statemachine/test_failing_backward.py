# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Gradients after a backward pass that raises half way: those of which all parts had arrived, as in native."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.bits import assert_same
from tests.parity.harness import FEATURES, WARM_UP, Arm, Learner, TwoResults, UsesTwice, mlp, run_both, script, tape

pytestmark = pytest.mark.filterwarnings("ignore")

FAILING = 5
"""The step whose backward pass raises; where two batches are accumulated the second of its window."""

Mark = Callable[[Tensor], Tensor]
"""Marks a tensor; the failing step raises when its gradient has come."""


def fail(gradient: Tensor) -> None:
    raise ValueError("a hook of the user's own")


class Failing(Learner):
    """Args:
    loss: Makes the loss of a batch from the module, the batch, a marker, and whether the step is the failing one.
    net: The network.
    """

    def __init__(self, loss: Callable[[Any, Any, Mark, bool], Tensor], net: nn.Module | None = None) -> None:
        super().__init__(net or mlp())
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        failing = batch_idx == FAILING

        def mark(tensor: Tensor) -> Tensor:
            marked = tensor * 1.0
            if failing:
                marked.register_hook(fail)
            return marked

        return self.loss(self, batch, mark, failing)


class TwoNets(Failing):
    """One network on top of another."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.below = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())


class Hooked(Failing):
    """Sees the gradient of a weight."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.seen: list[Tensor] = []
        self.net[4].weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.clone()))


class HookedLate(Failing):
    """Puts its hook on the weight between the forward and the backward pass of the failing step."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.seen: list[Tensor] = []
        self.batches = 0

    def on_before_backward(self, loss: Tensor) -> None:
        if self.batches == FAILING:
            self.net[4].weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.clone()))
        self.batches += 1


class WithoutGradient(torch.autograd.Function):
    """Uses a weight and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs + weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def gradients(arm: Arm) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in arm.modules[-1].named_parameters()}


def check(make: Callable[[], Failing], replays: int, window: int = 1) -> dict[str, Tensor | None]:
    """Asserts that a native and a replayed run fail in the same step and leave the same gradients.

    Args:
        make: Makes the module.
        replays: Calls that are replayed, those of the failing step included.
        window: Batches that are accumulated.

    Returns:
        The gradients.
    """
    native, replay = run_both(make, strategy=tape(scope="network"), steps=8, accumulate_grad_batches=window)
    assert isinstance(native.error, ValueError)
    assert replay.partial.actions == script(FAILING, WARM_UP)
    assert sum(recording.replays for recording in replay.strategy.report().recordings) == replays
    assert_same(gradients(native), gradients(replay), "gradients")
    assert_same(getattr(native.modules[0], "seen", []), getattr(replay.modules[0], "seen", []), "seen by a hook")
    return gradients(native)


def absent(found: dict[str, Tensor | None]) -> set[str]:
    return {name for name, gradient in found.items() if gradient is None}


def two_calls(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises between the backward passes of the second and the first call."""
    inputs, labels = batch
    first, second = mark(module.net(inputs)), module.net(inputs * 0.5)
    return F.cross_entropy(first, labels) + F.cross_entropy(second, labels)


def penalty_before(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises when the call has been differentiated, and the penalty of one of its weights has not."""
    penalty = mark(module.net[4].weight * 0.5).square().sum()
    return F.cross_entropy(module.net(batch[0]), batch[1]) + penalty


def penalty_after(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises when the penalty has been differentiated, and the call has not."""
    logits = mark(module.net(batch[0]))
    return F.cross_entropy(logits, batch[1]) + module.net[4].weight.square().sum()


def below(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises when one network has been differentiated, and the one below it has not."""
    return F.cross_entropy(module.net(mark(module.below(batch[0]))), batch[1])


def part_without_gradient(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises when all parts of a weight's gradient have arrived, one of them as None."""
    inputs = mark(module.below(batch[0]))
    return F.cross_entropy(WithoutGradient.apply(module.net(inputs), module.net[4].weight), batch[1])


def more_results(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises between two calls; the second is computed natively, as the loss comes from one more result than before."""
    first = mark(module.net(batch[0])[0])
    second, hidden = module.net(batch[0] * 0.5)
    loss = F.cross_entropy(first, batch[1]) + F.cross_entropy(second, batch[1])
    return loss + hidden.square().mean() if failing else loss


def other_results(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises between two calls that are computed natively, and give gradients to weights that had none before."""
    first, lower = map(mark, module.net(batch[0]))
    second, hidden = module.net(batch[0] * 0.5)
    if failing:
        return F.cross_entropy(first, batch[1]) + F.cross_entropy(second, batch[1])
    return lower.square().mean() + hidden.square().mean()


def one_result_each(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises between two calls of which only the second, which is done then, leads to the weights of the head."""
    hidden = mark(module.net(batch[0])[1])
    return hidden.square().mean() + F.cross_entropy(module.net(batch[0] * 0.5)[0], batch[1])


def second_call(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises between a call and another, native one, that the steps before did not have."""
    first = module.net(batch[0])
    if failing:
        first = mark(first) + module.net(batch[0] * 0.5)
    return F.cross_entropy(first, batch[1])


def penalty_of_a_tied_weight(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    """Raises when the parts of a call that are left apart have arrived, and a new penalty has not."""
    penalty = mark(module.net.shared.weight * 0.5).square().sum() if failing else 0.0
    return F.cross_entropy(module.net(batch[0]), batch[1]) + penalty


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("make", [Failing, Hooked, HookedLate])
def test_between_two_calls(make: Any, window: int) -> None:
    found = check(lambda: make(two_calls), 6, window)

    assert absent(found) == (set(found) if window == 1 else set())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("loss", [penalty_before, penalty_after])
@pytest.mark.parametrize("make", [Failing, Hooked])
def test_between_a_call_and_native_operations(make: Any, loss: Any, window: int) -> None:
    found = check(lambda: make(loss), 3, window)

    missing = {"net.4.weight"} if loss is penalty_before else set(found)
    assert absent(found) == (missing if window == 1 else set())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("loss", [below, part_without_gradient])
def test_what_is_complete_is_there(loss: Any, window: int) -> None:
    found = check(lambda: TwoNets(loss), 6, window)

    assert absent(found) == ({"below.0.weight", "below.0.bias"} if window == 1 else set())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (more_results, {1: {"head", "body"}, 2: set()}),
        (other_results, {1: {"head", "body"}, 2: {"head"}}),
        (one_result_each, {1: {"body"}, 2: set()}),
    ],
)
def test_between_two_calls_with_other_results(loss: Any, missing: dict[int, set[str]], window: int) -> None:
    found = check(lambda: Failing(loss, TwoResults()), 6, window)

    assert {name.split(".")[1] for name in absent(found)} == missing[window]


@pytest.mark.parametrize("window", [1, 2])
def test_between_a_native_and_a_replayed_call(window: int) -> None:
    found = check(lambda: Failing(second_call), 3, window)

    assert absent(found) == (set(found) if window == 1 else set())


@pytest.mark.parametrize("window", [1, 2])
def test_between_parts_that_are_left_apart(window: int) -> None:
    found = check(lambda: Failing(penalty_of_a_tied_weight, UsesTwice()), 3, window)

    assert absent(found) == ({"net.shared.weight"} if window == 1 else set())


def hidden_raises(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    logits, hidden = module.net(batch[0])
    if failing:
        hidden.register_hook(fail)
    return F.cross_entropy(logits, batch[1]) + hidden.square().mean()


def weight_raises(module: Any, batch: Any, mark: Mark, failing: bool) -> Tensor:
    if failing:
        module.net.body[4].weight.register_hook(fail)
    return F.cross_entropy(module.net(batch[0])[0], batch[1])


@pytest.mark.parametrize("loss", [hidden_raises, weight_raises])
def test_a_network_is_differentiated_as_a_whole(loss: Any) -> None:
    """A limit: a hook in the midst of a network raises natively when some of its gradients are there."""
    native, replay = run_both(lambda: Failing(loss, TwoResults()), strategy=tape(scope="network"), steps=8)

    assert isinstance(native.error, ValueError)
    assert replay.partial.actions == script(FAILING, WARM_UP)
    theirs, ours = absent(gradients(native)), absent(gradients(replay))
    everything = set(gradients(native))
    assert set() < theirs < everything
    assert ours == ({"net.body.4.weight"} if loss is weight_raises else everything)
