# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""How gradients were handed over, counted."""

from tests.helpers.trace import TraceResult
from tests.parity.harness import WARM_UP

FIRST_REPLAY = WARM_UP + 1

Counts = tuple[int, ...]


def counts(trace: TraceResult) -> Counts:
    """Backward passes whose gradients were published, added to live ones, and given fresh memory."""
    report = trace.report
    return report.gradients_published, report.gradients_added, report.gradients_copied


def check_counts(trace: TraceResult, expected: Counts) -> None:
    """Asserts how often gradients were published, added and given fresh memory."""
    assert counts(trace) == expected, f"published, added, copied: {counts(trace)}; {trace.actions}"


def expected_counts(steps: int, window: int = 1, in_place: bool = False, *, first: int = FIRST_REPLAY) -> Counts:
    """What a healthy run counts: the first batch of a window is published, the others are added to it.

    Gradients that are zeroed in place never die, so everything is added.
    """
    replayed = range(first, steps)
    published = 0 if in_place else sum(step % window == 0 for step in replayed)
    return published, len(replayed) - published, 0
