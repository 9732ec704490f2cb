# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Versions tell of every write to a dict, and of nothing else."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_replay.guards import versions
from lightning_replay.guards.versions import Versions

counts = pytest.mark.skipif(not versions._CAN_COUNT, reason="this Python does not count what is set on modules")


def test_python_counts() -> None:
    assert versions._can_count() == versions._CAN_COUNT
    assert versions._CAN_COUNT or sys.version_info >= (3, 13), "all but some releases do"


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "attribute set": lambda m: setattr(m, "rate", 2),
    "attribute added": lambda m: setattr(m, "other", 2),
    "attribute deleted": lambda m: delattr(m, "rate"),
    "item set": lambda m: m.__dict__.__setitem__("rate", 2),
    "updated": lambda m: m.__dict__.update(rate=2),
    "merged": lambda m: m.__dict__.__ior__({"rate": 2}),
    "taken out": lambda m: m.__dict__.pop("rate"),
    "last one taken out": lambda m: m.__dict__.popitem(),
    "default": lambda m: m.__dict__.setdefault("other", 2),
    "emptied and filled": lambda m: (saved := dict(m.__dict__), m.__dict__.clear(), m.__dict__.update(saved)),
    "mode": lambda m: m.eval(),
    "object": lambda m: object.__setattr__(m, "rate", 2),
}


def module() -> nn.Module:
    made = nn.Linear(2, 2)
    made.rate = 1
    return made


@counts
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str) -> None:
    written, other = module(), module()
    counted = Versions([other.__dict__, written.__dict__])
    assert counted.are_same()

    WRITES[name](written)

    assert not counted.are_same()
    assert not counted.are_same(), "until it is accepted"
    assert counted.accept() == {id(written.__dict__)}
    assert counted.are_same()


@counts
def test_reading_is_no_write() -> None:
    read = module()
    counted = Versions([read.__dict__])

    assert (read.rate, vars(read)["rate"], [*read.__dict__.items()][-1]) == (1, 1, ("rate", 1))
    assert hasattr(read, "missing") is False

    assert counted.are_same()


@counts
def test_writes_elsewhere_do_not_count() -> None:
    read, other = module(), module()
    counted, others = Versions([read.__dict__]), Versions([other.__dict__])

    other.rate = 2

    assert counted.are_same()
    assert not others.are_same()


@counts
def test_each_of_many_writes_is_seen() -> None:
    """Python takes another way through code that has run a few times."""
    written = module()
    counted = Versions([written.__dict__])
    for step in range(1000):
        written.rate = step
        assert not counted.are_same(), step
        counted.accept()
        assert counted.are_same(), step


@counts
def test_what_is_left_out_does_not_count() -> None:
    left_out, kept = module(), module()
    counted = Versions([left_out.__dict__, kept.__dict__])
    counted.leave_out({id(left_out.__dict__)})

    left_out.rate = 2
    assert counted.are_same()
    kept.rate = 2
    assert not counted.are_same()
    assert counted.accept() == {id(kept.__dict__)}


@counts
def test_a_write_before_another_is_told_is_seen_by_all() -> None:
    written = module()
    early = Versions([written.__dict__])
    written.rate = 2
    late = Versions([written.__dict__])

    assert late.are_same()
    assert not early.are_same()


def test_a_torch_that_does_not_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_version", lambda _: 0)
    assert not versions._can_count()

    monkeypatch.setattr(versions, "_CAN_COUNT", False)
    assert not Versions([module().__dict__]).are_same()


def test_an_answer_that_is_none_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> int:
        raise RuntimeError("not supported")

    monkeypatch.setattr(versions, "_version", refuse)
    assert not versions._can_count()
