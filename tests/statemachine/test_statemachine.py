# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A short run of the state machine; `python -m tests.statemachine` makes long ones."""

import pytest

from tests.statemachine.machine import make_machine, run
from tests.statemachine.world import EVENTS, World

pytestmark = pytest.mark.filterwarnings("ignore")


def test_without_events_all_is_replayed() -> None:
    world = World()
    try:
        world.train(6)
        assert world.replay.actions == {"native": 1, "record": 1, "replay": 4}
    finally:
        world.close()


@pytest.mark.parametrize("name", EVENTS)
def test_one_event_between_replays(name: str) -> None:
    for choice in range(2):
        world = World(seed=choice)
        try:
            world.train(4)
            EVENTS[name](world, choice)
            world.train(4)
            EVENTS[name](world, choice + 1)
            world.train(3)
        finally:
            world.close()


def test_random_sequences() -> None:
    totals = run(sequences=25, events=30, start=0)

    assert totals.actions["replay"] > totals.steps / 10, totals.as_dict()
    assert totals.actions["record"] > 25


def _replays(world: World) -> int:
    assert world.replay.runner is not None
    return sum(recording.replays for recording in world.replay.runner.recordings)


def test_a_backward_that_raises_between_two_calls_leaves_no_part_of_a_gradient() -> None:
    """Native adds up all parts of a gradient before it shows any of them."""
    machine = make_machine()()
    try:
        machine.begin(seed=0, wild=True, patient=False)
        machine.habit(choice=1, steps=1)
        machine.accumulation(choice=0, steps=1)
        machine.accumulation(choice=0, steps=1)
        machine.calls(choice=1, steps=1)
        replays = _replays(machine.world)
        machine.habit(choice=4, steps=1)  # writes what autograd has saved: an error of the backward pass
        assert _replays(machine.world) > replays
        assert machine.world.native.gradients()["net.layers.0.linear.weight"] is None
    finally:
        machine.teardown()


def test_nothing_is_compared_after_a_declared_error() -> None:
    machine = make_machine()()
    try:
        machine.begin(seed=712, wild=False, patient=True)
        machine.autocast(choice=1, steps=6)  # with a weight cache, which two calls of a step would share
        machine.deep_copy(choice=0, steps=1)
        machine.calls(choice=4, steps=1)
        assert machine.world.over
        machine.deep_copy(choice=0, steps=1)
        assert machine.totals.events["deep_copy"] == 1
    finally:
        machine.teardown()
