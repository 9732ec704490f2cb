# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Measures, and publishes: renders the pages and draws the pictures of what the receipts say.

    python -m tests.benchmarks                      step times
    python -m tests.benchmarks memory --jobs 4      another benchmark, with options of its own
    python -m tests.benchmarks all                  all of them with their defaults, one after the other

A receipt is written to docs/evidence/NAME.json; with ``--out`` it goes elsewhere, and nothing is published. Without a
CUDA device nothing is measured for publication, and what the receipts say is published anew.
"""

import argparse
import subprocess
import sys

import torch

from tests.benchmarks import plots, render

BENCHMARKS = (
    "step_time",
    "update_time",
    "sweep",
    "accumulation",
    "omission",
    "detection",
    "memory",
    "host_cost",
    "host_time",
    "zoo",
    "soak",
)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"], help="step_time if nothing is given")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark; --help shows them")
    given = parser.parse_args(words or ["step_time"])
    names = BENCHMARKS if given.name == "all" else (given.name,)
    publishing = not {"--out", "--help"} & set(given.options)
    if publishing and not torch.cuda.is_available():
        print("Without a CUDA device nothing is measured for publication; --out FILE measures for a trial.")
        names = ()
    failed = [name for name in names if not measure(name, given.options, publishing)]
    if publishing:
        render.publish(render.rendered())
        plots.publish(plots.EVIDENCE, plots.drawings())
    return 1 if failed else 0


def measure(name: str, options: list[str], publishing: bool) -> bool:
    """Runs a benchmark in a process of its own, and tells whether all went well."""
    out = ["--out", str(render.EVIDENCE / f"{name}.json")] if publishing else []
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options, *out]
    return subprocess.run(command, cwd=render.ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
