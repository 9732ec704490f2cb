# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Gradients: who sees them, who keeps them, and what else is differentiated in a step."""

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_replay import NotReplayedError, Reason
from tests.helpers.bits import same_bits
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    Arm,
    Learner,
    batches,
    check_native,
    check_replayed,
    classify,
    mlp,
    run_both,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def penalized(module: Any, batch: Any, batch_idx: int) -> Tensor:
    penalty = sum(parameter.square().sum() for parameter in module.net.parameters())
    return classify(module, batch, batch_idx) + 0.01 * penalty


def penalty_first(module: Any, batch: Any, batch_idx: int) -> Tensor:
    penalty = module.net[0].weight.abs().sum()
    return 0.01 * penalty + classify(module, batch, batch_idx)


def now_and_then(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return penalized(module, batch, batch_idx) if batch_idx % 3 == 2 else classify(module, batch, batch_idx)


@pytest.mark.parametrize("in_place", [False, True], ids=["to None", "in place"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("step", [penalized, penalty_first, now_and_then])
def test_parameters_used_outside(step: Any, window: int, in_place: bool) -> None:
    check_replayed(
        lambda: Learner(mlp(), step, in_place=in_place), accumulate_grad_batches=window, actions=script(8), steps=8
    )


def test_tied_weight_used_outside() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net(batch[0]) @ module.net[0].weight[:CLASSES, :CLASSES], batch[1])

    check_replayed(lambda: Learner(mlp(), step))


class KeepGradients(Callback):
    """Keeps gradients of every step, and checks that they never change."""

    def __init__(self, every: int = 1, view: bool = False) -> None:
        self.every, self.view = every, view
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step % self.every == 0:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    kept = parameter.grad.view(-1)[:1] if self.view else parameter.grad
                    self.kept.append((kept, kept.clone()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.kept
        assert all(same_bits(kept, then) for kept, then in self.kept)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_kept_gradients_keep_their_values(every: int, view: bool) -> None:
    check_replayed(lambda: Learner(mlp()), callbacks=lambda: [KeepGradients(every, view)], steps=10)


class KeepOutputs(Callback):
    """Keeps results of the network across steps, detached and as views."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for kept in (outputs["logits"], outputs["row"]):
            self.kept.append((kept, kept.clone()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert len({kept.data_ptr() for kept, _ in self.kept}) == len(self.kept)
        assert all(same_bits(kept, then) for kept, then in self.kept)


def test_kept_outputs_keep_their_values() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        logits = module.net(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach(), "row": logits.detach()[1]}

    check_replayed(lambda: Learner(mlp(), step), callbacks=lambda: [KeepOutputs()])


def test_an_undetached_output_kept_for_a_step_makes_calls_native_while_it_lives() -> None:
    kept: list[Tensor] = []

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        kept.clear()
        extra = module.net(batch[0] * 2)
        if batch_idx == 4:
            kept.append(extra)
        return classify(module, batch, batch_idx)

    trace = check_replayed(lambda: Learner(mlp(), step), actions=script(8), steps=8)
    assert Reason.PENDING not in trace.report.reasons


def test_outputs_changed_in_place_by_the_loss() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        logits *= 2
        logits[:, 0].zero_()
        return F.cross_entropy(logits.add_(0.5), batch[1])

    check_replayed(lambda: Learner(mlp(), step))


def test_inputs_changed_in_place_between_calls() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone()
        first = module.net(inputs)
        inputs.mul_(-1)
        return F.cross_entropy(first - module.net(inputs), batch[1])

    # What a first layer saved for its backward was written: native raises, and so does every arm.
    native, _ = run_both(lambda: Learner(mlp(), step))
    assert "modified by an inplace operation" in str(native.error)


def test_trainable_inputs() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs = (batch[0] * module.scale).requires_grad_()
        return F.cross_entropy(module.net(inputs), batch[1]) + module.net(batch[0] + module.scale).mean()

    def make() -> Learner:
        module = Learner(mlp(), step)
        module.scale = nn.Parameter(torch.ones(FEATURES))
        return module

    check_replayed(make)


def test_an_input_that_is_a_leaf_gets_its_gradient() -> None:
    seen: list[list[Tensor]] = []

    class Read(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append([])

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            seen[-1].append(pl_module.given.grad.clone())

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        object.__setattr__(module, "given", batch[0].clone().requires_grad_())
        return F.cross_entropy(module.net(module.given), batch[1])

    check_replayed(lambda: Learner(mlp(), step), callbacks=lambda: [Read()])
    assert same_bits(seen[0], seen[1])
    assert len(seen[0]) == 7


# -- hooks and other ways to differentiate


@pytest.mark.parametrize("window", [1, 2])
def test_tensor_hooks_on_parameters(window: int) -> None:
    def make() -> Learner:
        module = Learner(mlp())
        module.net[0].weight.register_hook(lambda gradient: gradient * 2)
        module.net[4].bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return module

    check_replayed(make, accumulate_grad_batches=window, actions=script(8), steps=8)


def test_post_accumulate_hooks_see_the_sum() -> None:
    seen: list[list[Tensor]] = []

    def make() -> Learner:
        module = Learner(mlp())
        calls: list[Tensor] = []
        seen.append(calls)
        module.net[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
        return module

    check_replayed(make, accumulate_grad_batches=2)
    assert len(seen[0]) == 7
    assert same_bits(seen[0], seen[1])


def test_hook_on_a_result() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        logits.register_hook(lambda gradient: gradient * 0.5)
        return F.cross_entropy(logits, batch[1])

    check_replayed(lambda: Learner(mlp(), step))


def test_retained_gradient_of_a_result() -> None:
    seen: list[list[Tensor]] = []

    class Read(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append([])

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            seen[-1].append(pl_module.logits.grad.clone())

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        logits.retain_grad()
        object.__setattr__(module, "logits", logits)
        return F.cross_entropy(logits, batch[1])

    check_replayed(lambda: Learner(mlp(), step), callbacks=lambda: [Read()])
    assert same_bits(seen[0], seen[1])


def grad_in_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    logits = module.net(inputs)
    (slope,) = torch.autograd.grad(logits.sum(), inputs, retain_graph=True)
    return F.cross_entropy(logits, batch[1]) + slope.square().mean()


def gradient_penalty(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    logits = module.net(inputs)
    (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
    return F.cross_entropy(logits, batch[1]) + slope.square().mean()


def backward_in_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
    classify(module, batch, batch_idx).backward()
    return classify(module, batch, batch_idx)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (grad_in_step, Reason.REPEATED_BACKWARD),
        (gradient_penalty, Reason.HIGHER_ORDER),
        (backward_in_step, Reason.REPEATED_BACKWARD),
    ],
)
def test_differentiated_within_the_step(step: Any, reason: Reason) -> None:
    check_native(lambda: Learner(mlp(), step), reason, where="net")


def test_differentiated_within_a_later_step_is_an_error_that_names_the_cure() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return (grad_in_step if batch_idx == 5 else trainable)(module, batch, batch_idx)

    def trainable(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net(batch[0].clone().requires_grad_()), batch[1])

    arm = Arm(lambda: Learner(mlp(), step), batches(), tape())

    assert isinstance(arm.error, NotReplayedError)
    assert arm.error.finding.reason is Reason.REPEATED_BACKWARD
    assert "to do:" in str(arm.error)


def test_checkpoint_around_the_network() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = checkpoint(module.net, batch[0], use_reentrant=False)
        return F.cross_entropy(logits, batch[1])

    run_both(lambda: Learner(mlp(), step))


def test_another_pattern_of_results() -> None:
    """The loss reaches another result in some steps: these backward passes are redone natively."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)
            self.drop = nn.Dropout(0.2)

        def forward(self, inputs: Tensor) -> Any:
            hidden = self.drop(torch.tanh(self.body(inputs)))
            return self.left(hidden), self.right(hidden)

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        left, right = module.net(batch[0])
        loss = F.cross_entropy(left, batch[1])
        return loss + F.cross_entropy(right, batch[1]) if batch_idx % 5 == 4 else loss

    trace = check_replayed(lambda: Learner(Heads(), step), actions=script(10), steps=10)
    assert trace.report.reasons[Reason.COTANGENTS] == 2
    assert trace.gradients[0]["net.right.weight"] is None
    assert trace.gradients[4]["net.right.weight"] is not None


def test_another_layout_of_incoming_gradients() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        return logits.sum() * 0.1 if batch_idx == 4 else F.cross_entropy(logits, batch[1])

    trace = check_replayed(lambda: Learner(mlp(), step), actions=script(8), steps=8)
    assert trace.report.reasons[Reason.COTANGENTS] == 1


def test_non_finite_values() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = classify(module, batch, batch_idx)
        return loss * float("inf") if batch_idx == 4 else loss

    check_replayed(lambda: Learner(mlp(), step), gradient_clip_val=1.0)


def test_signed_zeros() -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(CLASSES, FEATURES))

        def forward(self, inputs: Tensor) -> Tensor:
            return F.linear(inputs * -0.0, self.weight)

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return module.net(batch[0]).sum()

    check_replayed(lambda: Learner(Zeros(), step, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))


@pytest.mark.parametrize("window", [1, 2])
def test_frozen_parts(window: int) -> None:
    def make() -> Learner:
        module = Learner(mlp(), optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.1))
        module.net[0].requires_grad_(False)
        module.net[4].bias.requires_grad_(False)
        return module

    trace = check_replayed(make, accumulate_grad_batches=window)
    assert trace.gradients[-1]["net.0.weight"] is None


def test_optimizer_with_part_of_the_parameters() -> None:
    check_replayed(
        lambda: Learner(mlp(), optimizer=lambda p: torch.optim.SGD(list(p)[:2], lr=0.1)), accumulate_grad_batches=2
    )


def test_foreign_parameter_in_the_network_is_native() -> None:
    outside = nn.Linear(FEATURES, FEATURES)

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(outside(inputs))

    check_native(lambda: Learner(Borrowing()), Reason.FOREIGN_GRAPH, where="net")


def test_foreign_tensor_in_the_network_is_kept_alive() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.shift = torch.full((FEATURES,), 0.5)  # neither buffer nor parameter

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs + self.shift)

    check_replayed(lambda: Learner(Constant()))


def test_autograd_of_a_replayed_step_works_in_the_thread_that_asks() -> None:
    """Its own thread would have to be woken, and Python handed over to it; afterwards all is as it was."""
    seen: list[bool] = []

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        logits.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
        return F.cross_entropy(logits, batch[1])

    trace = check_replayed(lambda: Learner(mlp(), step), strategy=tape(scope="network"))

    assert seen[: len(trace.actions)] == [True] * len(trace.actions), "the native run"
    assert seen[len(trace.actions) :] == [action != "replay" for action in trace.actions]
    assert torch._C._is_multithreading_enabled()


class Noisy(torch.autograd.Function):
    """Scales gradients by a number that Python draws."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * random.random()


class NoisyByNumpy(Noisy):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(np.random.rand())


class Talking(Noisy):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        print("a gradient has come")
        return gradient


class Timed(Noisy):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.perf_counter()
        return gradient.clone()


class Through(nn.Module):
    """A network whose gradients pass a function with a backward of its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function.apply(self.inner(inputs))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Noisy, Reason.HOST_RANDOM),
        (NoisyByNumpy, Reason.HOST_RANDOM),
        (Talking, Reason.HOST_EFFECT),
        (Timed, Reason.HOST_EFFECT),
    ],
)
def test_python_in_the_backward_of_a_function(function: Any, reason: Reason) -> None:
    check_native(lambda: Learner(Through(function)), reason)
