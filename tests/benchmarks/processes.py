# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Fresh processes for the arms of a comparison, and what benchmarks of few figures share."""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.benchmarks import worker
from tests.benchmarks.receipt import command_line, receipt, write
from tests.benchmarks.workloads import WORKLOADS

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.benchmarks.worker", "timm"])
"""Processes that begin where all has been imported and nothing done: no device, no seed, no tensor."""

_WHOLE = multiprocessing.get_context("spawn")
"""Processes that import everything themselves."""


def _run(words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    worker.main(words)


def lane_environment(lane: int, lanes: int) -> dict[str, str]:
    """Returns what gives the processes of one lane a GPU and a share of the cores to themselves.

    Args:
        lane: the lane, from 0.
        lanes: how many there are.
    """
    if lanes == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // lanes
    own = cores[lane * share : (lane + 1) * share]
    return {"CUDA_VISIBLE_DEVICES": str(lane), "LIGHTNING_REPLAY_CORES": ",".join(map(str, own))}


def run_worker(
    arm: str,
    models: Sequence[str],
    options: Mapping[str, Any],
    environment: Mapping[str, str] = MappingProxyType({}),
    whole: bool = False,
) -> list[dict[str, Any]]:
    """Runs one arm over some workloads in a process of its own; a run that failed has an "error".

    Args:
        arm: the arm.
        models: the workloads.
        options: further options of the worker.
        environment: further environment variables of the process.
        whole: it imports everything itself, for its seconds to be those of a whole run.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        words = ["--arm", arm, "--out", str(out), "--models", *models]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        process = (_WHOLE if whole else _FORKED).Process(target=_run, args=(words, dict(environment)))
        started = time.perf_counter()
        process.start()
        process.join()
        seconds = time.perf_counter() - started
        if out.exists():
            measured = json.loads(out.read_text())
        else:
            measured = [{"model": model, "error": f"the process ended with {process.exitcode}"} for model in models]
    return [{"arm": arm, "process_seconds": seconds, **run} for run in measured]


def parser(what: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a benchmark of few figures."""
    made = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(models))
    made.add_argument("--out", required=True, help="the receipt to write")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--backend", choices=["auto", "cuda", "tape"], default="auto", help="of the replay arms")
    return made


def finish(
    name: str,
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    runs: list[dict[str, Any]],
    summary: list[dict[str, Any]],
    problems: Sequence[str] = (),
) -> int:
    """Writes the receipt, prints its summary and tells whether something is wrong with it."""
    given = {key: value for key, value in vars(options).items() if key != "out"}
    workloads = {model: WORKLOADS[model].what for model in options.models}
    content = {"runs": runs, "summary": summary}
    write(
        options.out,
        receipt(name, {**given, **settings, "workloads": workloads}, content, command_line(f"tests.benchmarks.{name}")),
    )
    for row in summary:
        print(row)
    bad = [f"{run['model']}, {run['arm']}: {run['error']}" for run in runs if "error" in run] + list(problems)
    for run in runs:
        timed = run.get("timed_actions", {})
        # Long runs are audited: a native step now and then belongs to them.
        if run["arm"].startswith("replay") and timed.get("replay", 0) < 0.98 * sum(timed.values()):
            bad.append(f"{run['model']}, {run['arm']}: timed {timed}")
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0
