# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Decisions, with nothing recorded: counting, budgets, strikes, modes."""

from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn

from lightning_replay import Finding, Reason
from lightning_replay.dispatch import (
    EVICTION_AGE,
    MAX_STRIKES,
    PAYBACK_REPLAYS,
    REMEMBERED_SIGNATURES,
    Action,
    Decision,
    Dispatcher,
    Engaged,
    Region,
    Slot,
)
from lightning_replay.report import RecordingStats

CPU = torch.device("cpu")
CHANGED = Finding(Reason.MODULE_CHANGED, "net")


def dispatcher(warmup_steps: int = 2, max_recordings: int = 2) -> Dispatcher:
    return Dispatcher(CPU, Mock, warmup_steps, max_recordings)


def region() -> Region:
    module = nn.Linear(3, 2)
    return Region("net", module, module.forward)


def decide(decider: Dispatcher, target: Region, *args: Any, counts: bool = True) -> Decision:
    target.calls = 0
    decider.step += 1
    return decider.decide(target, args or (torch.ones(2, 3),), {}, counts)


def engage(decision: Decision, replays: int = 0, step: int = 0) -> None:
    assert decision.slot is not None
    stats = RecordingStats("net", "", 0.0, 0, "off", replays)
    decision.slot.engaged[decision.key] = Engaged(Mock(), Mock(), stats, None, step, step)


def test_warm_up_record_replay() -> None:
    decider, target = dispatcher(), region()

    decisions = [decide(decider, target) for _ in range(3)]
    assert [d.action for d in decisions] == [Action.OBSERVE, Action.OBSERVE, Action.RECORD]
    assert [d.finding.reason for d in decisions if d.finding] == [Reason.WARM_UP, Reason.WARM_UP, Reason.RECORDING]
    engage(decisions[-1])
    assert decide(decider, target).action is Action.REPLAY


def test_a_ragged_batch_is_not_counted() -> None:
    decider, target = dispatcher(), region()

    for _ in range(5):
        decision = decide(decider, target, counts=False)
        assert decision.action is Action.NATIVE
        assert decision.finding is not None
        assert decision.finding.reason is Reason.LAST_BATCH
    assert decide(decider, target).action is Action.OBSERVE


def test_budget_and_eviction() -> None:
    decider, target = dispatcher(warmup_steps=1, max_recordings=2), region()
    for size in (2, 3):
        decide(decider, target, torch.ones(size, 3))
        engage(decide(decider, target, torch.ones(size, 3)), step=decider.step)

    decision = decide(decider, target, torch.ones(4, 3))
    assert decision.action is Action.NATIVE
    assert decision.finding is not None
    assert decision.finding.reason is Reason.BUDGET
    decider.step += EVICTION_AGE + 1
    assert decide(decider, target, torch.ones(4, 3)).action is Action.OBSERVE
    assert len(target.engaged()) == 1


def test_modes_and_evaluation() -> None:
    decider, target = dispatcher(), region()

    with torch.no_grad():
        assert decide(decider, target).action is Action.NATIVE
    target.module.eval()
    decision = decide(decider, target)
    assert decision.finding is not None
    assert decision.finding.reason is Reason.UNRECORDED_MODE
    target.module.train()
    first = decide(decider, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = decide(decider, target)
    assert first.key != second.key


def test_trainability_is_part_of_the_signature() -> None:
    decider, target = dispatcher(), region()
    first = decide(decider, target)
    target.module.bias.requires_grad_(False)
    second = decide(decider, target)

    assert first.key != second.key
    assert second.slot is first.slot


def test_a_budget_spent_by_freezing_says_so() -> None:
    decider, target = dispatcher(warmup_steps=1, max_recordings=1), region()
    decide(decider, target)
    engage(decide(decider, target))
    target.module.bias.requires_grad_(False)

    finding = decide(decider, target).finding
    assert finding is not None
    assert finding.reason is Reason.BUDGET
    assert "trainable parameters than recorded" in finding.actual


def test_a_change_retires_and_counts_strikes() -> None:
    decider, target = dispatcher(warmup_steps=1), region()
    for strike in range(MAX_STRIKES):
        assert target.refusal is None, strike
        decide(decider, target)
        engage(decide(decider, target))
        target.module.weight = nn.Parameter(torch.ones(2, 3))
        decide(decider, target)
        assert not target.engaged()
    assert target.refusal is not None
    assert decide(decider, target).action is Action.NATIVE


def test_a_recording_that_has_paid_is_no_strike() -> None:
    decider, target = dispatcher(warmup_steps=1), region()
    decide(decider, target)
    engage(decide(decider, target), replays=PAYBACK_REPLAYS)

    target.retire(CHANGED)

    assert target.strikes == 0
    assert target.state is None
    assert target.buffers is None


def test_hooks_do_not_retire() -> None:
    decider, target = dispatcher(warmup_steps=1), region()
    decide(decider, target)
    engage(decide(decider, target))

    handle = target.module.register_forward_hook(lambda *_: None)
    decision = decide(decider, target)
    assert decision.action is Action.NATIVE
    assert decision.finding is not None
    assert decision.finding.reason is Reason.HOOKS
    handle.remove()
    assert decide(decider, target).action is Action.REPLAY


def test_pending_calls_take_slots_of_their_own() -> None:
    decider, target = dispatcher(), region()
    first = decide(decider, target)
    second = decider.decide(target, (torch.ones(2, 3),), {}, True)

    assert first.slot is not second.slot
    assert target.most_calls == 2
    assert first.slot is not None
    waiting = Mock(done=False)
    first.slot.waiting = lambda: waiting
    decision = decide(decider, target)
    assert decision.finding is not None
    assert decision.finding.reason is Reason.PENDING
    waiting.done = True
    assert not first.slot.is_pending()
    first.slot.waiting = lambda: None
    assert not first.slot.is_pending()


def test_signatures_are_forgotten_in_order() -> None:
    slot = Slot(Mock())
    assert slot.sight("first") == 0
    assert slot.sight("first") == 1
    for key in range(REMEMBERED_SIGNATURES):
        slot.sight(key)
    assert len(slot.sightings) == REMEMBERED_SIGNATURES
    assert slot.sight("first") == 0


def test_parameters_that_cannot_be_recorded() -> None:
    class Sub(nn.Parameter):
        pass

    class Net(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs

    decider = dispatcher()
    for make in (lambda p: Sub(p.data), lambda p: nn.Parameter(p.data.to("meta"))):
        module = Net(3, 2)
        module.weight = make(module.weight)
        decision = decide(decider, Region("net", module, module.forward))
        assert decision.finding is not None
        assert decision.finding.reason is Reason.UNSUPPORTED_TENSOR
        assert decision.finding.where == "net.weight"


def test_opaque_arguments() -> None:
    decision = decide(dispatcher(), region(), torch.ones(2, 3), object())

    assert decision.finding is not None
    assert decision.finding.reason is Reason.ARGUMENT
