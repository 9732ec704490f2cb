# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The pages of the state machine and of the mutations say what the receipts say."""

from pathlib import Path

from tests.benchmarks import render
from tests.benchmarks.receipt import receipt, write
from tests.statemachine.machine import run


def test_a_run_of_the_state_machine(tmp_path: Path) -> None:
    totals = run(2, 5, 1)
    settings = {"sequences": 2, "events": 5, "seed": 1}
    write(tmp_path / "a.json", receipt("statemachine", settings, {"differences": 0, **totals.as_dict()}))

    page = render.render(tmp_path)

    assert totals.actions["replay"]
    assert f"| of them replayed | {totals.actions['replay']} |" in page
    assert f"| sequences of events | {totals.sequences} |" in page
    assert "| differences from native | 0 |" in page


def test_a_guard_that_nothing_notices_is_told(tmp_path: Path) -> None:
    guards = [{"guard": "hooks", "caught_by": "a | b: `c`"}, {"guard": "flags", "caught_by": None}]
    write(tmp_path / "a.json", receipt("mutation", {}, {"guards": guards, "unnoticed": ["flags"]}))

    page = render.render(tmp_path)

    assert "Each of 2 guards was switched off in turn; 1 went unnoticed." in page
    assert "| hooks | a / b: 'c' |\n| flags | **nothing** |" in page


def test_of_a_difference_the_page_says_what_differs(tmp_path: Path) -> None:
    guards = [{"guard": "hooks", "caught_by": "hook(0): step.loss[0, 0]: native 1.5 (0x3fc00000), replay 2.5 (0x40"}]
    write(tmp_path / "a.json", receipt("mutation", {}, {"guards": guards, "unnoticed": []}))

    assert "| hooks | hook(0): step.loss[0, 0] |" in render.render(tmp_path)
