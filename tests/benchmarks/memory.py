# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Memory that replay reserves, against native's peak, each network and arm in a fresh process.

python -m tests.benchmarks.memory --out docs/evidence/memory.json
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker

MODELS = ("resnet18", "resnet50", "efficientnet_b0", "vit_tiny", "gpt", "gpt32")
BAR = 1.15
SETTINGS = {
    "what": "Reserved memory in MiB. The bar: what is reserved after recording, at the last step, is at most"
    f" {BAR} times native's peak and the bytes of the parameters; a ratio of at most 1.",
    "process": "fresh for each network and arm",
    "memory": "of the allocator, counted since the batches were on the device and the module was not yet",
}
STEPS = {"steps": 20, "skip": 10, "window": 5}


def main() -> int:
    made = parser(__doc__, MODELS)
    made.add_argument("--jobs", type=int, default=1, help="networks measured at the same time; each has its allocator")
    options = made.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        pairs = pool.map(lambda model: _pair(options, model), options.models)
        runs = [run for pair in pairs for run in pair]
    return finish("memory", options, {**SETTINGS, **STEPS}, runs, summarise(runs), problems(summarise(runs)))


def _pair(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    given = {**STEPS, "device": options.device, "backend": options.backend}
    return [run for arm in ("native", "replay") for run in run_worker(arm, [model], given)]


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network that was measured in both arms."""
    by_arm = {(run["model"], run["arm"]): run for run in runs if "peak_reserved_bytes" in run}
    rows = []
    for model in dict.fromkeys(run["model"] for run in runs):
        native, replay = by_arm.get((model, "native")), by_arm.get((model, "replay"))
        if native is None or replay is None:
            continue
        parameters = native["parameter_bytes"]
        allowed = BAR * native["peak_reserved_bytes"] + parameters
        rows.append(
            {
                "workload": model,
                "native peak": _mib(native["peak_reserved_bytes"]),
                "after recording": _mib(replay["reserved_at_end_bytes"]),
                "replay peak": _mib(replay["peak_reserved_bytes"]),
                "parameters": _mib(parameters),
                "ratio": round(replay["reserved_at_end_bytes"] / allowed, 4),
            }
        )
    return rows


def problems(summary: list[dict[str, Any]]) -> list[str]:
    """Returns the networks above the bar."""
    return [f"{row['workload']}: {row['ratio']} of what is allowed" for row in summary if row["ratio"] > 1]


def _mib(value: int) -> float:
    return round(value / 2**20, 1)


if __name__ == "__main__":
    sys.exit(main())
