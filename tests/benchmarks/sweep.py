# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Batch sizes from 1 to 256: where replay pays, and that it costs nothing where it does not.

python -m tests.benchmarks.sweep --out docs/evidence/sweep.json
"""

import statistics
import sys
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker
from tests.benchmarks.workloads import SIZES, SWEPT, sized

MODELS = ("resnet18", "gpt")
ARMS = ("native", "replay", "replay_step")
BAR = 0.99
SETTINGS = {
    "what": "Milliseconds a step after recording, by batch size: medians of windows of steps, fenced. `gain` is the"
    f" time of native divided by that of the arm; the bar is {BAR}: never slower. `break-even` is the number of steps"
    " whose saving makes up for the seconds that the recordings took.",
    "process": "fresh for each network, arm and repeat, all batch sizes in it",
}
STEPS = {"steps": 40, "skip": 15, "window": 5}


def main() -> int:
    made = parser(__doc__, MODELS)
    made.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="batch sizes")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--repeats", type=int, default=1)
    options = made.parse_args()
    if unknown := set(options.models) - set(SWEPT):
        made.error(f"no other batch sizes are known of {', '.join(sorted(unknown))}")
    given = {**STEPS, "device": options.device, "backend": options.backend}
    runs = []
    for repeat in range(options.repeats):
        for model in options.models:
            for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
                measured = run_worker(arm, [sized(model, size) for size in options.sizes], given)
                print(f"repeat {repeat}, {model}, {arm}: {measured[0]['process_seconds']:.1f} s", flush=True)
                runs += [
                    {**run, "repeat": repeat, "network": model, "batch": size}
                    for run, size in zip(measured, options.sizes, strict=True)
                ]
    # The receipt says what was run: each network with each batch size.
    options.models = [sized(model, size) for model in options.models for size in options.sizes]
    summary = summarise(runs)
    return finish("sweep", options, {**SETTINGS, **STEPS, "bar": BAR}, runs, summary, problems(summary))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network and batch size that was measured natively."""
    times: dict[tuple[str, int, str], list[float]] = {}
    captures: dict[tuple[str, int, str], list[float]] = {}
    for run in runs:
        if run.get("windows_ms"):
            key = (run["network"], run["batch"], run["arm"])
            times.setdefault(key, []).append(statistics.median(run["windows_ms"]))
            recordings = (run["report"] or {}).get("recordings", [])
            captures.setdefault(key, []).append(sum(recording["capture_seconds"] for recording in recordings))
    rows = []
    for network, batch in dict.fromkeys((run["network"], run["batch"]) for run in runs):
        if (network, batch, "native") not in times:
            continue
        native = statistics.median(times[network, batch, "native"])
        row: dict[str, Any] = {"network": network, "batch": batch, "native": round(native, 4)}
        for arm in ARMS[1:]:
            key = (network, batch, arm)
            if key not in times:
                continue
            replay = statistics.median(times[key])
            row[arm] = round(replay, 4)
            row[f"{arm}: gain"] = round(native / replay, 4)
            row[f"{arm}: break-even"] = _break_even(statistics.median(captures[key]), (native - replay) / 1e3)
        rows.append(row)
    return rows


def problems(summary: list[dict[str, Any]]) -> list[str]:
    """Returns what is slower than native by more than the bar allows."""
    return [
        f"{row['network']}, batch {row['batch']}, {arm}: {row[f'{arm}: gain']} of native's speed"
        for row in summary
        for arm in ARMS[1:]
        if row.get(f"{arm}: gain", BAR) < BAR
    ]


def _break_even(seconds: float, saving: float) -> int | str:
    return round(seconds / saving) if saving > 0 else "never"


if __name__ == "__main__":
    sys.exit(main())
