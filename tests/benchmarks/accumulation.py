# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Replayed steps that accumulate over four batches, against steps that do not.

python -m tests.benchmarks.accumulation --out docs/evidence/accumulation.json
"""

import statistics
import sys
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker

MODELS = ("resnet18", "vit_tiny", "gpt")
WINDOW = 4
SKIP = 16  # whole windows of accumulation
SETTINGS = {
    "what": f"Milliseconds a batch, replayed. `each` and `{WINDOW} batches` are means over windows of steps, fenced at"
    " their ends, with an update after every batch and after every fourth. The share of the update is the difference"
    " between batches that end in one and batches that do not, each fenced. `expected` is what four batches would take"
    " if accumulating cost nothing; the bar for the ratio to it is 1.05.",
    "process": "fresh for each way, all networks in it",
}
WAYS = {
    "each": {"accumulate": 1, "steps": SKIP + 60, "skip": SKIP, "window": 20},
    "accumulated": {"accumulate": WINDOW, "steps": SKIP + 60, "skip": SKIP, "window": 20},
    "fenced": {"accumulate": WINDOW, "steps": SKIP + 40, "skip": SKIP, "window": 1},
}


def main() -> int:
    options = parser(__doc__, MODELS).parse_args()
    given = {"device": options.device, "backend": options.backend}
    runs = [
        {**run, "way": way}
        for way, steps in WAYS.items()
        for run in run_worker("replay", options.models, {**steps, **given})
    ]
    return finish("accumulation", options, {**SETTINGS, "ways": WAYS}, runs, summarise(runs))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network that was measured in every way."""
    times = {(run["model"], run["way"]): run["windows_ms"] for run in runs if run.get("windows_ms")}
    rows = []
    for model in dict.fromkeys(run["model"] for run in runs):
        if any((model, way) not in times for way in WAYS):
            continue
        each, accumulated = (statistics.median(times[model, way]) for way in ("each", "accumulated"))
        fenced = times[model, "fenced"]
        # Batches are counted from SKIP, a whole number of windows: each WINDOW-th ends in an update.
        updating = fenced[WINDOW - 1 :: WINDOW]
        others = [time for index, time in enumerate(fenced) if index % WINDOW != WINDOW - 1]
        update = statistics.median(updating) - statistics.median(others)
        expected = each - update * (WINDOW - 1) / WINDOW
        rows.append(
            {
                "workload": model,
                "each": round(each, 4),
                f"{WINDOW} batches": round(accumulated, 4),
                "update": round(update, 4),
                "update's share of a batch": round(update / each, 3),
                "ratio to each": round(accumulated / each, 4),
                "expected": round(expected, 4),
                "ratio to expected": round(accumulated / expected, 4),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
