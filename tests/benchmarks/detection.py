# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Complete fits of a small detector on photographs: what each part of replay adds by itself.

    python -m tests.benchmarks.detection --pairs 5 --out docs/evidence/detection.json

Each pair runs every arm in a fresh process, every second one in the opposite order. ``--more`` adds pairs to a receipt
that is there, made with the same sources and settings on the same machine.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.arms import NORM_ARMS
from tests.benchmarks.processes import finish, parser, run_worker
from tests.benchmarks.receipt import device, source_hashes

MODELS = ("detector",)
# What each arm is held against: the one that it adds something to, or takes something from.
ARMS = {
    "native": "native",
    "norm_only": "native",
    "replay_no_norm": "native",
    "replay": "replay_no_norm",
    "replay_step": "replay",
    "replay_cloned": "replay",
}
SETTINGS = {
    "what": "Complete fits: construction of the Trainer, warm-up, recording, all steps, validation after each epoch,"
    " teardown and a checkpoint; strictly deterministic, bf16-mixed, clip 1.0. *norm only* adds the recorded norm to a"
    " native fit, *replay no norm* replays the network and clips natively, *replay* does both, *replay step* records"
    " all of `training_step`; *replay cloned* is *replay* with every live gradient cloned before each forward pass,"
    " which nothing needs. Medians and ranges over pairs of fresh processes; `process` is all of a process, imports"
    " included; `saved` compares with the median of the arm named beside it. Losses of all steps, validation metrics"
    " and weights are compared as bits with the first run.",
    "process": "fresh for each arm, in alternating order",
    "images": "crops of scikit-learn's two photographs with shapes drawn on them, ready on the device",
}
STEPS = {"skip": 15, "window": 15}
EQUAL = ("losses_sha256", "metrics", "weights_sha256")


def main() -> int:
    made = parser(__doc__, MODELS)
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--steps", type=int, default=45, help="steps an epoch")
    made.add_argument("--more", action="store_true", help="add pairs to the receipt that is there")
    options = made.parse_args()
    runs = earlier(options) if options.more else []
    first = 1 + max((run["pair"] for run in runs), default=-1)
    given = {**STEPS, "epochs": options.epochs, "steps": options.steps}
    given |= {"device": options.device, "backend": options.backend}
    failed = 0
    for pair in range(first, first + options.pairs):
        for arm in options.arms if pair % 2 == 0 else options.arms[::-1]:
            runs += [{**run, "pair": pair} for run in run_worker(arm, options.models, given, whole=True)]
            print(f"pair {pair}, {arm}: {runs[-1]['process_seconds']:.1f} s", flush=True)
        # Written after every pair: a run that is cut short leaves what it has measured.
        options.pairs = pair + 1
        summary = summarise(runs)
        failed = finish("detection", options, {**SETTINGS, **STEPS}, runs, summary, problems(runs, summary))
    return failed


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the runs of the receipt that pairs are added to.

    Raises:
        ValueError: if what is added could not be compared with them.
    """
    content = json.loads(Path(options.out).read_text())
    same = {name: getattr(options, name) for name in ("models", "arms", "epochs", "steps", "device", "backend")}
    stated = {name: content["settings"][name] for name in same}
    if (stated, content["sources"], content["device"]) != (same, source_hashes(), device()):
        raise ValueError(f"{options.out}: made with other settings or sources, or on another machine")
    return list(content["runs"])


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network and arm; `equal` compares bits with the first run of that network."""
    rows = []
    measured = [run for run in runs if run.get("windows_ms")]
    for model in dict.fromkeys(run["model"] for run in measured):
        own = [run for run in measured if run["model"] == model]
        by_arm = {arm: [run for run in own if run["arm"] == arm] for arm in ARMS}
        for arm, base in ARMS.items():
            if not by_arm[arm]:
                continue
            rows.append(
                {
                    "workload": model,
                    "arm": arm.replace("_", " "),
                    "runs": len(by_arm[arm]),
                    "fit s": _spread(_seconds(by_arm[arm], "fit_seconds")),
                    "process s": _spread(_seconds(by_arm[arm], "process_seconds")),
                    "ms a step": _spread([statistics.median(run["windows_ms"]) for run in by_arm[arm]]),
                    "compared with": "" if base == arm else base.replace("_", " "),
                    "fit saved": _saved(by_arm[base], by_arm[arm], "fit_seconds") if base != arm else "",
                    "process saved": _saved(by_arm[base], by_arm[arm], "process_seconds") if base != arm else "",
                    "equal": all(run[key] == own[0][key] for run in by_arm[arm] for key in EQUAL),
                }
            )
    return rows


def problems(runs: list[dict[str, Any]], summary: list[dict[str, Any]]) -> list[str]:
    """Returns the arms whose training differs, and those that did not do what they are there for."""
    bad = [f"{row['workload']}, {row['arm']}: losses, metrics or weights differ" for row in summary if not row["equal"]]
    bad += [
        f"{run['model']}, {run['arm']}: {run['norm_replays']} norms were replayed"
        for run in runs
        if "error" not in run and bool(run["norm_replays"]) != (run["arm"] in NORM_ARMS)
    ]
    return bad


def _seconds(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run[name] for run in runs]


def _saved(base: list[dict[str, Any]], runs: list[dict[str, Any]], name: str) -> str:
    if not base:
        return ""
    return f"{1 - statistics.median(_seconds(runs, name)) / statistics.median(_seconds(base, name)):.1%}"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
