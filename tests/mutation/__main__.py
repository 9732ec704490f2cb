# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Switches each guard off in turn and prints what notices. Exits with an error if something goes unnoticed."""

import argparse
import contextlib
import io
import sys
import warnings
from typing import Any

import pytest

from tests.benchmarks.receipt import receipt, write
from tests.mutation.mutants import MUTANTS, Mutant, switched_off
from tests.statemachine.world import EVENTS, World


def difference(mutant: Mutant, name: str, choice: int) -> str | None:
    """Returns how replay and native differ after an event, or None."""
    world = World(seed=choice)
    try:
        for earlier, value in mutant.before:
            EVENTS[earlier](world, value)
        world.train(5)
        EVENTS[name](world, choice)
        world.train(3)
        EVENTS[name](world, choice + 1)
        world.train(4)
    except (AssertionError, RuntimeError, IndexError, KeyError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    finally:
        world.close()
    return None


def by_event(mutant: Mutant) -> str | None:
    """Returns the first event after which replay and native differ with the guard off, and not with it on."""
    for name in mutant.events:
        for choice in range(12):
            with switched_off(mutant):
                found = difference(mutant, name, choice)
            if found is not None:
                if (always := difference(mutant, name, choice)) is not None:
                    raise SystemExit(f"{name}({choice}) differs with all guards on: {always}")
                return f"{name}({choice}): {found}"
    return None


def by_test(mutant: Mutant) -> str | None:
    """Returns the first test that fails."""
    for test in mutant.tests:
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with silent[0], silent[1], switched_off(mutant):
            failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "--no-header", test])
        if failed == pytest.ExitCode.TESTS_FAILED:
            return test.split("::")[1]
        if failed:
            raise SystemExit(f"{test} could not be run: {failed!r}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="where the receipt is written")
    parser.add_argument("--only", default="", help="guards whose name contains this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name, mutant in MUTANTS.items():
        if arguments.only not in name:
            continue
        caught = by_event(mutant) or by_test(mutant)
        rows.append({"guard": name, "caught_by": caught})
        print(f"{name:<55} {caught or '--- NOTHING ---'}", flush=True)
    unnoticed = [row["guard"] for row in rows if row["caught_by"] is None]
    print(f"{len(rows)} guards, {len(unnoticed)} unnoticed when switched off")
    if arguments.out:
        write(arguments.out, receipt("mutation", {"backend": "tape"}, {"guards": rows, "unnoticed": unnoticed}))
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
