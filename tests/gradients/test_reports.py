# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Ways in which graphs are known to spoil gradients, each with the protection that stops it, and without.

A test that takes the protection away has to find the damage: otherwise it would prove nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from tests.gradients.counting import check_counts, expected_counts
from tests.gradients.mutants import take_away
from tests.helpers.bits import same_bits
from tests.parity.harness import CLASSES, FEATURES, Arm, Learner, batches, check_replayed, mlp, script, tape

pytestmark = pytest.mark.filterwarnings("ignore")

Remove = Callable[[str], None]


@pytest.fixture
def remove(monkeypatch: pytest.MonkeyPatch) -> Remove:
    """Takes one protection away for the rest of a test."""
    return lambda protection: take_away(protection, monkeypatch)


def damage(protected: bool, what: str = "gradients") -> AbstractContextManager[Any]:
    """Expects a run that equals native if it is protected, and one that does not otherwise."""
    return nullcontext() if protected else pytest.raises(AssertionError, match=what)


protection = pytest.mark.parametrize("protected", [True, False], ids=["protected", "not protected"])


def plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# -- F01: the second micro-batch overwrites the first one's gradient


@protection
def test_f01_static_gradients_are_not_adopted(protected: bool, remove: Remove) -> None:
    if not protected:
        remove("gradients outside of the pool")

    with damage(protected, r"gradients(_at_zero)?\.\d+"):
        trace = check_replayed(lambda: Learner(plain_net(), optimizer=plain_sgd), steps=20, accumulate_grad_batches=2)
        check_counts(trace, expected_counts(20, 2))


# -- F02: accumulation that begins after graphs were made


@protection
def test_f02_accumulation_that_begins_late(protected: bool, remove: Remove) -> None:
    if not protected:
        remove("adding to what lives")

    with damage(protected, r"gradients\.\d+"):
        trace = check_replayed(
            lambda: Learner(plain_net(), optimizer=plain_sgd),
            actions=[*script(8), *["replay"] * 24],
            callbacks=lambda: [GradientAccumulationScheduler({0: 1, 2: 4})],
            max_epochs=4,
            steps=8,
        )
        check_counts(trace, (5 + 8 + 2 * 2, 2 * 6, 0))


# -- F03: gradients that someone keeps without copying them


class KeepWithoutCopy(Callback):
    """Keeps the gradients of a step as they are and looks at them a step later, before and after its backward."""

    kept: list[Tensor]

    def __init__(self, seen: list[list[Tensor]], step: int = 5) -> None:
        self.seen, self.step = seen, step

    def on_train_start(self, *_: Any) -> None:
        self.seen.append([])
        self.kept = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen[-1] += [kept.clone() for kept in self.kept]
        if trainer.global_step == self.step:
            self.kept = [parameter.grad for parameter in pl_module.parameters()]

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen[-1] += [kept.clone() for kept in self.kept]


@protection
def test_f03_kept_gradients_stay_as_they_were(protected: bool, remove: Remove) -> None:
    if not protected:
        remove("leaving what is kept")
    seen: list[list[Tensor]] = []

    trace = check_replayed(
        lambda: Learner(mlp()), callbacks=lambda: [KeepWithoutCopy(seen)], steps=10, gradient_clip_val=0.5
    )

    assert len(seen[0]) == len(seen[1]) > 0
    assert same_bits(*seen) == protected
    # While the gradients of step 5 are kept, four steps get memory of their own.
    check_counts(trace, (3, 0, 4) if protected else (7, 0, 0))


# -- two micro-batches whose sum is twice the second


def _frozen(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@protection
@pytest.mark.parametrize("window", [2, 4])
def test_the_sum_is_not_twice_the_last_one(window: int, protected: bool, remove: Remove) -> None:
    """With memory of the pool for a gradient, K micro-batches sum up to exactly 2 g(K): powers of two are exact."""
    steps = 3 * window
    single = Arm(lambda: Learner(plain_net(), optimizer=_frozen), batches(), "auto", steps=steps)
    if not protected:
        remove("gradients outside of the pool")
    with damage(protected):
        check_replayed(lambda: Learner(plain_net(), optimizer=_frozen), steps=steps, accumulate_grad_batches=window)
    replay = Arm(
        lambda: Learner(plain_net(), optimizer=_frozen), batches(), tape(), steps=steps, accumulate_grad_batches=window
    )

    assert single.trace is not None
    assert replay.trace is not None
    last, total = single.trace.gradients[-1], replay.trace.gradients[-1]
    doubled = {name: entry["values"] * (2 / window) for name, entry in last.items()}
    assert same_bits(doubled, {name: entry["values"] for name, entry in total.items()}) != protected


# -- gradients zeroed in place, which double at every step


class InPlaceLater(Learner):
    """Zeroes gradients in place once replay has given them their memory."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=batch_idx < 5)


@protection
def test_gradients_zeroed_in_place_do_not_double(protected: bool, remove: Remove) -> None:
    single = Arm(lambda: Learner(plain_net(), optimizer=_frozen), batches(), "auto", steps=9)
    if not protected:
        remove("gradients outside of the pool")
    with damage(protected):
        trace = check_replayed(lambda: InPlaceLater(plain_net(), optimizer=_frozen), steps=9)
        check_counts(trace, (2, 4, 0))
    replay = Arm(lambda: InPlaceLater(plain_net(), optimizer=_frozen), batches(), tape(), steps=9)

    assert single.trace is not None
    assert replay.trace is not None
    for native, replayed in zip(single.trace.gradients[5:], replay.trace.gradients[5:], strict=True):
        doubled = {name: entry["values"] * 2 for name, entry in native.items()}
        assert same_bits(doubled, {name: entry["values"] for name, entry in replayed.items()}) != protected


# -- the next forward, which writes where gradients of the pool lie


@protection
def test_the_next_forward_does_not_touch_live_gradients(protected: bool, remove: Remove) -> None:
    """Seen in `on_before_zero_grad` alone: the next backward makes everything new."""
    if not protected:
        remove("gradients outside of the pool")

    with damage(protected, r"gradients_at_zero\.\d+\.net\.0\.weight\.values.*replay nan"):
        trace = check_replayed(lambda: Learner(mlp()))
        check_counts(trace, expected_counts(7))
