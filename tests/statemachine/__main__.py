# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A long run of the state machine, written as a receipt."""

import argparse
import sys
import time
import warnings

from tests.benchmarks.receipt import receipt, write
from tests.statemachine.machine import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="where the receipt is written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    totals = run(arguments.sequences, arguments.events, arguments.seed)
    settings = {"sequences": arguments.sequences, "events": arguments.events, "seed": arguments.seed, "backend": "tape"}
    seconds = round(time.perf_counter() - started, 1)
    results = {"differences": 0, "seconds": seconds, **totals.as_dict()}
    print(f"{totals.sequences} sequences, {totals.steps} steps in {seconds} s, no difference: {dict(totals.actions)}")
    if arguments.out:
        write(arguments.out, receipt("statemachine", settings, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
