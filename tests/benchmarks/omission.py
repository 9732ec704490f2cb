# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What it would cost to copy every live gradient away before each forward replay, which replay does not need.

python -m tests.benchmarks.omission --pairs 5 --out docs/evidence/omission.json
"""

import statistics
import sys
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker

MODELS = ("densenet121",)
ARMS = ("replay", "replay_cloned")
SETTINGS = {
    "what": "A complete fit of a network of about 370 parameters, replayed as it is, and with every live gradient"
    " cloned, one by one, before each forward pass. Median and range over alternating pairs of fresh processes; the"
    " workflow spans construction of the Trainer, warm-up, recording, all steps and teardown. Losses and weights of"
    " all runs are compared as bits.",
    "process": "fresh for each arm, in alternating order",
}
STEPS = {"steps": 175, "skip": 15, "window": 20}
EQUAL = ("losses_sha256", "weights_sha256")


def main() -> int:
    made = parser(__doc__, MODELS)
    made.add_argument("--pairs", type=int, default=5)
    options = made.parse_args()
    given = {**STEPS, "device": options.device, "backend": options.backend}
    runs = []
    failed = 0
    for pair in range(options.pairs):
        for arm in ARMS if pair % 2 == 0 else ARMS[::-1]:
            runs += [{**run, "pair": pair} for run in run_worker(arm, options.models, given)]
        # Written after every pair: a run that is cut short leaves what it has measured.
        options.pairs = pair + 1
        summary = summarise(runs)
        unequal = [f"{row['workload']}, {row['arm']}: losses or weights differ" for row in summary if not row["equal"]]
        failed = finish("omission", options, {**SETTINGS, **STEPS}, runs, summary, unequal)
    return failed


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network and arm; `equal` compares it with the first run of that network."""
    rows = []
    measured = [run for run in runs if run.get("windows_ms")]
    for model in dict.fromkeys(run["model"] for run in measured):
        own = [run for run in measured if run["model"] == model]
        for arm in ARMS:
            of_arm = [run for run in own if run["arm"] == arm]
            if not of_arm:
                continue
            rows.append(
                {
                    "workload": model,
                    "arm": arm,
                    "parameters": of_arm[0]["parameters"],
                    "workflow s": _spread([run["fit_seconds"] for run in of_arm]),
                    "ms a step": _spread([statistics.median(run["windows_ms"]) for run in of_arm]),
                    "equal": all(run[key] == own[0][key] for run in of_arm for key in EQUAL),
                }
            )
    return rows


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
