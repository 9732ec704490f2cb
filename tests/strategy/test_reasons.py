# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A user learns why: every native step has a reason, what never ends says so, and nothing floods."""

import re
import warnings
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_replay import NotReplayedError, Reason, ReplayWarning
from lightning_replay.dispatch import MAX_NEW_SIGNATURES
from lightning_replay.whole_step import PATIENCE
from tests.parity.harness import Arm, Learner, batches, check_native, check_replayed, classify, mlp, run_both, tape


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor, scale: float) -> Tensor:
        return self.layer(inputs) * scale


def changing(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return nn.functional.cross_entropy(module.net(batch[0], scale=1 + batch_idx / 100), batch[1])


def test_a_number_that_changes_in_every_call_is_native() -> None:
    steps = MAX_NEW_SIGNATURES + 8

    trace = check_native(lambda: Learner(Scaled(), changing), Reason.NEVER_REPEATS, steps=steps)

    assert trace.report.steps_replayed == 0
    assert trace.report.reasons[Reason.WARM_UP] == MAX_NEW_SIGNATURES
    assert "1.2" in trace.report.messages[Reason.NEVER_REPEATS], "the message shows the value"
    assert f"than {MAX_NEW_SIGNATURES} calls of a network, or {PATIENCE} whole steps" in Reason.NEVER_REPEATS.cause


def test_a_last_batch_of_the_usual_size_is_told_from_a_smaller_one() -> None:
    trace = check_native(lambda: Learner(Scaled(), changing), Reason.LAST_BATCH, max_epochs=2)

    message = trace.report.messages[Reason.LAST_BATCH]
    assert re.search(r"actual: +\(5, 6\) float32, 1\.\d+\n", message), message
    assert "Where a plain value is new" in message


def test_that_is_an_error_on_request() -> None:
    arm = Arm(lambda: Learner(Scaled(), changing), batches(), tape(on_native="error"), steps=MAX_NEW_SIGNATURES + 8)

    assert isinstance(arm.error, NotReplayedError)
    assert arm.error.finding.reason is Reason.NEVER_REPEATS


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.counter = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.counter += 1
        return self.layer(inputs) * self.counter


@pytest.mark.parametrize("scope", ["network", "step"])
def test_what_a_network_counts_is_its_own_doing_and_no_change_from_outside(scope: str) -> None:
    arm = Arm(lambda: Learner(Counting(), classify), batches(), tape(scope=scope, on_native="error"), steps=8)

    assert isinstance(arm.error, NotReplayedError)
    assert arm.error.finding.reason is Reason.ATTRIBUTE_WRITTEN
    assert arm.error.finding.where == "net.counter"
    assert re.fullmatch(rf"2, at {re.escape(__file__)}:\d+, in forward", arm.error.finding.actual)
    assert Reason.MODULE_CHANGED not in arm.strategy.report().reasons


@pytest.mark.parametrize("modules", [["self"], ["net.1"]], ids=str)
def test_a_named_module_that_is_never_called(modules: list[str]) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return classify(module, batch, batch_idx) if modules == ["self"] else module.net[0](batch[0]).square().mean()

    with pytest.warns(ReplayWarning, match=r"\[no_region\](.|\n)*or self\(batch\) with modules=\[.self.\]"):
        trace = check_native(
            lambda: Learner(mlp(), step), Reason.NO_REGION, strategy=tape(modules=modules, on_native="warn")
        )

    assert trace.report.reasons == {Reason.NO_REGION: trace.report.steps_total}


def test_parts_too_small_to_replay_do_not_flood() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(12))

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs if inputs.sum().item() < 1e9 else -inputs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_both(lambda: Learner(Waits()), strategy=tape(on_native="warn"), steps=12)

    said = [str(warning.message) for warning in caught if issubclass(warning.category, ReplayWarning)]
    assert len(said) == 1
    assert "host_sync" in said[0]


def test_a_shape_that_also_ends_an_epoch_is_recorded() -> None:
    trace = check_replayed(
        lambda: Learner(mlp()),
        batches(count=2),
        actions=["native", "native", "record", *["replay"] * 5],
        max_epochs=4,
        steps=2,
    )

    assert Reason.LAST_BATCH not in trace.report.reasons


def test_steps_without_a_loss_put_the_recording_off() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = classify(module, batch, batch_idx)
        return None if 2 <= batch_idx < 12 else loss

    _, replay = run_both(lambda: Learner(mlp(), step), steps=24)

    assert replay.trace is not None, replay.error
    assert replay.trace.report.reasons[Reason.NO_GRADIENT] > 0
    assert replay.trace.report.reasons[Reason.RECORDING] < 8
    assert replay.trace.actions[-1] == "replay"


def test_two_regions_publish_their_gradients() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), nn.Linear(3, 3)

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(module.net.second(module.net.first(batch[0])), batch[1])

    trace = check_replayed(lambda: Learner(Two(), step))

    assert {recording.region for recording in trace.report.recordings} == {"net.first", "net.second"}
    assert trace.report.gradients_published == trace.report.steps_replayed
