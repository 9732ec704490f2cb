# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Trains many models natively and with replay, each in a fresh process, and writes what was replayed and what is equal.

    python -m tests.benchmarks.zoo --out docs/evidence/zoo.json --jobs 8

Each model and precision is trained natively and with replay with deterministic algorithms, and natively, with replay
and natively again without them; where a deterministic run differs, it too is repeated natively. Without a GPU,
``--device cpu --backend tape --models siamese lora`` tries it; times mean nothing then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.benchmarks import zoo_worker
from tests.benchmarks.receipt import ROOT, command_line, receipt, write
from tests.benchmarks.zoo_models import BATCH, ZOO

LIMIT = 300
"""Seconds that a model may take."""

WRONG = frozenset({"different"})


def main() -> int:
    options = _parser().parse_args()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(_process, options, model) for model in options.models]
        for number, done in enumerate(as_completed(running), start=1):
            made = done.result()
            for row in made:
                print(_line(row), flush=True)
            rows = sorted([*rows, *made], key=lambda row: options.models.index(row["model"]))
            # Written after every model: a run that is cut short leaves what it has found.
            write(options.out, _receipt(options, rows, complete=number == len(running)))
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    return 1 if summary["wrong"] else 0


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the shares of what ran, and what did not run or is wrong."""
    ran = [row for row in rows if "replayed" in row]
    how = Counter(row["replayed"] for row in ran)
    names = [f"{row['model']}, {row['precision']}" for row in rows]
    some = how["whole network"] + how["some regions"]
    return {
        "asked": len(rows),
        "ran": len(ran),
        "replay_some_region": some / len(ran) if ran else None,
        "replay_whole_network": how["whole network"] / len(ran) if ran else None,
        "deterministic": dict(Counter(row["deterministic"]["verdict"] for row in ran)),
        "free": dict(Counter(row["free"]["verdict"] for row in ran)),
        "not_run": [name for name, row in zip(names, rows, strict=True) if "not_run" in row],
        "failed": [name for name, row in zip(names, rows, strict=True) if "error" in row],
        "wrong": [
            name
            for name, row in zip(names, rows, strict=True)
            if "replayed" in row and WRONG & {row["deterministic"]["verdict"], row["free"]["verdict"]}
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ZOO, default=list(ZOO))
    parser.add_argument("--out", required=True, help="the receipt to write")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time; their times disturb each other")
    zoo_worker.add_common(parser)
    return parser


def _process(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Runs one model in a process of its own; what it did not come to has an "error"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "tests.benchmarks.zoo_worker", "--model", model, "--out", str(out)]
        command += ["--precision", *options.precision, "--pixels", str(options.pixels)]
        command += ["--device", options.device, "--backend", options.backend]
        # Processes side by side share the cores.
        threads = {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
        try:
            done = subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT, env={**os.environ, **threads})
            ended = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {LIMIT} seconds"
        rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    missing = options.precision[len(rows) :]
    rows += [{"model": model, "precision": precision, "error": ended} for precision in missing]
    return [{"package": ZOO[model].package, **row} for row in rows]


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']:<32}{row['precision']:<12}"
    if "replayed" not in row:
        return name + row.get("not_run", row.get("error", ""))
    strict, free = row["deterministic"], row["free"]
    return (
        f"{name}{row['replayed']:<15}{free['steps_replayed']:>3} steps, deterministic={strict['mode']}:"
        f" {strict['verdict']} ({strict['steps_replayed']}); else: {free['verdict']}; {row['speed_up']:.2f} x;"
        f" {row['reasons_needing_cure'] or ''}; {row['seconds']} s"
    )


def _receipt(options: argparse.Namespace, rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name != "out"}
    settings = {
        **given,
        "steps": zoo_worker.STEPS,
        "timed_steps": zoo_worker.TIMED,
        "images_a_batch": BATCH,
        "scope": "network",
        "compared": list(zoo_worker.COMPARED),
        "process": "fresh for each model, all its runs in it",
        "loader": "four random batches in turn, ready on the device",
        "optimizer": "AdamW",
    }
    results = {"complete": complete, "rows": rows, "summary": summarise(rows)}
    return receipt("zoo", settings, results, command_line("tests.benchmarks.zoo"))


if __name__ == "__main__":
    sys.exit(main())
