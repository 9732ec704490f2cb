# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The rules: one for each event, each followed by a few compared steps."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.statemachine.world import EVENTS, WILD, World

STEPS_PER_EVENT = 3


class Totals:
    """What all sequences of a run did together."""

    def __init__(self) -> None:
        self.sequences = 0
        self.events: Counter[str] = Counter()
        self.steps = 0
        self.actions: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()
        self.declared: Counter[str] = Counter()

    def as_dict(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "steps": self.steps,
            "actions": dict(self.actions),
            "events": dict(self.events.most_common()),
            "ended_by_a_declared_error": dict(self.declared),
            "reasons": dict(self.findings.most_common()),
        }


class Base(RuleBasedStateMachine):
    """Two arms, made anew for each sequence."""

    totals = Totals()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.wild = False

    @initialize(seed=st.integers(0, 2**16), patient=st.booleans(), wild=st.sampled_from([False, False, True]))
    def begin(self, seed: int, patient: bool, wild: bool) -> None:
        self.world = World(seed, patient)
        self.wild = wild
        self.world.train(4)

    def teardown(self) -> None:
        if self.world is None:
            return
        totals = type(self).totals
        totals.sequences += 1
        totals.steps += self.world.steps
        totals.actions += self.world.replay.actions
        totals.findings += self.world.replay.findings
        if self.world.over:
            totals.declared[str(self.world.declared)] += 1
        self.world.close()


def _rule(name: str) -> Callable[..., None]:
    def act(self: Base, choice: int, steps: int) -> None:
        assert self.world is not None
        if self.world.over:  # the arms have parted: a declared error was raised in one of them
            return
        type(self).totals.events[name] += 1
        EVENTS[name](self.world, choice)
        self.world.train(steps)

    act.__name__ = name
    made = rule(choice=st.integers(0, 23), steps=st.integers(1, STEPS_PER_EVENT))(act)
    return precondition(lambda self: self.wild)(made) if name in WILD else made


def make_machine(without: frozenset[str] = frozenset()) -> type[Base]:
    """Returns a machine with totals of its own.

    Args:
        without: Events that do not happen.
    """
    rules: dict[str, Any] = {name: _rule(name) for name in EVENTS if name not in without}
    return type("Machine", (Base,), {"totals": Totals(), **rules})


def run(sequences: int, events: int, start: int, shrink: bool = True) -> Totals:
    """Runs random sequences.

    Args:
        sequences: How many.
        events: Events in each.
        start: Seed of the choices.
        shrink: Look for the shortest sequence that fails.

    Raises:
        AssertionError: Of the first difference, with the events that led to it.
    """
    machine = make_machine()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    profile = settings(
        max_examples=sequences,
        stateful_step_count=events,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(start)(machine), settings=profile)
    return machine.totals
