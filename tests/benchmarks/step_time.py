# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
r"""Times a Lightning step in several arms and writes a receipt.

    python -m tests.benchmarks.step_time --out docs/evidence/step_time.json
    python -m tests.benchmarks.step_time --out docs/evidence/step_time.json --log --update fused --arms native replay \
        replay_step graphed_callables compile_default compile_reduce_overhead compile_cudagraphs full_iteration
    python -m tests.benchmarks.step_time --out docs/evidence/empty_step.json --models empty --arms native
    python -m tests.benchmarks.step_time --out docs/evidence/gradient_norm.json --models resnet18 efficientnet_b0 \
        vit_tiny gpt --arms native norm_only replay replay_no_norm replay_no_clip

Arms run in turn, each repeat of each arm in a fresh process; every second repeat runs them in the opposite order, so
that a slow drift of the machine does not favour one. Without a GPU, ``--device cpu --backend tape --models tiny --arms
native replay`` tries the harness; its figures mean nothing.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from tests.benchmarks import worker
from tests.benchmarks.arms import FULL_ITERATION, NAMES, NETWORK_ARMS, NORM_ARMS, USUAL_ARMS
from tests.benchmarks.processes import lane_environment, run_worker
from tests.benchmarks.receipt import command_line, receipt, write
from tests.benchmarks.workloads import WORKLOADS

# Same for both arms of every comparison, whatever the options.
FIXED = {
    "loader": "ready batches on the device, no workers",
    "logger": False,
    "checkpoint": False,
    "progress_bar": False,
    "model_summary": False,
    "deterministic": False,
    "cudnn_benchmark": False,
    "process": "fresh for each arm and repeat, forked from one that has only imported; all workloads of its lane in it",
    "memory": "peaks since the workload's batches were on the device, its module not yet",
    "not_measured": "no external observer of clocks and power; no loader, validation or checkpoint in the fit",
}
# What differs from Lightning's own way, in the arms and settings where it does.
UNLIKE = {
    FULL_ITERATION: "full_iteration: the same module, batches and clock without a Trainer; AdamW is capturable, and"
    " nothing is logged",
    "compile": "compile_*: torch.compile of the network in place, within the same fit",
    "fused": "fused AdamW: MixedPrecision refuses to clip for an optimizer whose _step_supports_amp_scaling is true;"
    " in every arm of Lightning it is set to False on the object, which only a gradient scaler would read otherwise,"
    " and bf16-mixed has none",
}
_BASES = ("native", "graphed_callables", "replay_no_clip", FULL_ITERATION)
_HOST = ("clip_host_ms", "update_host_ms")


def main() -> int:
    options = _parser().parse_args()
    runs: list[dict[str, Any]] = []
    planned = options.repeats * sum(len(_models(arm, options.models)) for arm in options.arms)
    writing = Lock()

    def run_lane(lane: int) -> None:
        for repeat in range(options.repeats):
            for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
                measured = _process(options, arm, repeat, lane)
                with writing:  # after every process: a run that is cut short leaves what it has measured
                    runs.extend(measured)
                    write(options.out, _receipt(options, runs, len(runs) == planned))

    with ThreadPoolExecutor(options.lanes) as lanes:
        list(lanes.map(run_lane, range(options.lanes)))
    summary = summarise(runs)
    print(table(summary))
    return _complain(runs, options)


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns model -> arm -> median, range and ratios. A run's figure is the median of its windows."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        if run.get("windows_ms"):
            arms = summary.setdefault(run["model"], {})
            cell = arms.setdefault(run["arm"], {"runs_ms": [], "peak_allocated_bytes": [], "peak_reserved_bytes": []})
            cell["runs_ms"].append(statistics.median(run["windows_ms"]))
            for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
                cell[peak].append(run.get(peak))
            for name in _HOST:
                if run.get(name) is not None:
                    cell.setdefault(_runs_of(name), []).append(run[name])
    for arms in summary.values():
        for cell in arms.values():
            times = cell["runs_ms"]
            cell.update(median_ms=statistics.median(times), min_ms=min(times), max_ms=max(times))
            cell.update({name: statistics.median(cell[_runs_of(name)]) for name in _HOST if _runs_of(name) in cell})
            for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
                known = [value for value in cell[peak] if value is not None]
                cell[peak] = int(statistics.median(known)) if known else None
        for cell in arms.values():
            for base in _BASES:
                if base in arms:
                    cell[f"ratio_to_{base}"] = cell["median_ms"] / arms[base]["median_ms"]
    return summary


def _runs_of(name: str) -> str:
    return name.replace("_host_", "_runs_")


def table(summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns a short plain-text table."""
    columns = {
        "to native": "ratio_to_native",
        "to graphed": "ratio_to_graphed_callables",
        "to limit": f"ratio_to_{FULL_ITERATION}",
        "to no clip": "ratio_to_replay_no_clip",
        "clip host ms": "clip_host_ms",
        "update host ms": "update_host_ms",
    }
    lines = [
        f"{'model':<18}{'arm':<25}{'ms a step (range)':<28}"
        + "".join(f"{name:>16}" for name in columns)
        + f"{'reserved MiB':>14}"
    ]
    for model, arms in summary.items():
        for arm, cell in arms.items():
            times = f"{cell['median_ms']:.3f} ({cell['min_ms']:.3f}-{cell['max_ms']:.3f})"
            values = [cell.get(key) for key in columns.values()]
            reserved = cell["peak_reserved_bytes"]
            lines.append(
                f"{model:<18}{arm:<25}{times:<28}"
                + "".join(f"{'-' if value is None else f'{value:.3f}':>16}" for value in values)
                + f"{'-' if reserved is None else f'{reserved / 2**20:.0f}':>14}"
            )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=list(USUAL_ARMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--lanes",
        type=int,
        default=1,
        help="workloads are dealt to so many lanes, which run at the same time, each with a GPU and cores of its own;"
        " all arms of a workload run in the same one",
    )
    parser.add_argument("--out", required=True, help="the receipt to write")
    worker.add_common(parser)
    return parser


def _models(arm: str, models: Sequence[str]) -> list[str]:
    """Returns the workloads of an arm: without a network there is none to compile or to wrap."""
    return [model for model in models if model != "empty" or arm not in NETWORK_ARMS]


def _process(options: argparse.Namespace, arm: str, repeat: int, lane: int) -> list[dict[str, Any]]:
    """Runs one arm over all workloads of a lane in a process of its own."""
    models = _models(arm, options.models[lane :: options.lanes])
    if not models:
        return []
    names = ("steps", "skip", "window", "precision", "clip", "update", "log", "seed", "device", "backend")
    given = {name: getattr(options, name) for name in names}
    measured = run_worker(arm, models, given, lane_environment(lane, options.lanes))
    print(f"repeat {repeat}, {arm}: {measured[0]['process_seconds']:.1f} s", flush=True)
    return [{**run, "repeat": repeat} for run in measured]


def _receipt(options: argparse.Namespace, runs: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name != "out"}
    workloads = {model: WORKLOADS[model].what for model in options.models}
    results = {"complete": complete, "runs": runs, "summary": summarise(runs)}
    words = " ".join([*options.arms, options.update])
    unlike = [text for name, text in UNLIKE.items() if name in words]
    settings = {**given, **FIXED, "workloads": workloads, "optimizer": f"AdamW ({options.update})", "unlike": unlike}
    return receipt("step_time", settings, results, command_line("tests.benchmarks.step_time"))


def _complain(runs: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Errors, and an arm that did not replay what it is there for, must not pass for a measurement."""
    bad = [f"{run['model']}, {run['arm']}, repeat {run['repeat']}: {run['error']}" for run in runs if "error" in run]
    for run in runs:
        clips = run["arm"] in NORM_ARMS and "error" not in run and options.clip
        if clips and not run["norm_replays"]:
            bad.append(f"{run['model']}, {run['arm']}, repeat {run['repeat']}: no gradient norm was replayed")
        if run["arm"].startswith("replay") and "error" not in run and set(run["timed_actions"]) != {"replay"}:
            reasons = (run.get("report") or {}).get("reasons")
            bad.append(f"{run['model']}, repeat {run['repeat']}: timed {run['timed_actions']}, reasons {reasons}")
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
