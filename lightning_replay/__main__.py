# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Can anything be replayed here, and if not, why not?

The exit code is 0 if training on this machine could be replayed and 1 if it would run natively altogether.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from lightning_replay.__about__ import __version__
from lightning_replay.compat import check, load_contract
from lightning_replay.reasons import Reason

_EVERY_STEP = "every step"

# What is native on every machine, by design.
_ALWAYS_NATIVE = {
    "validation, test and predict": Reason.UNRECORDED_MODE,
    "the first steps of each input signature": Reason.WARM_UP,
    "a shape first met at the end of an epoch": Reason.LAST_BATCH,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the facts.

    Args:
        arguments: Command-line words; None takes them from the process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_replay", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0 if facts["replayable"] else 1


def collect() -> dict[str, Any]:
    """Return versions, contract, CUDA devices and what would run natively, ready for JSON."""
    verdict = check()
    contract = load_contract(verdict.version)
    devices = cuda_devices()
    blocking = [] if verdict.known else [Reason.UNKNOWN_CONTRACT]
    blocking += [] if devices else [Reason.NO_CUDA]
    native = [{"what": _EVERY_STEP, "why": reason.cause, "cure": reason.cure} for reason in blocking]
    native += [{"what": what, "why": reason.cause, "cure": reason.cure} for what, reason in _ALWAYS_NATIVE.items()]
    return {
        "replayable": not blocking,
        "versions": {
            "lightning_replay": __version__,
            "lightning": verdict.version,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "contract": {
            **asdict(verdict),
            "message": verdict.message(),
            "inspected": contract.inspected if contract else None,
            "facts": dict(contract.facts) if contract else {},
        },
        "cuda_devices": devices,
        "native": native,
    }


def cuda_devices() -> list[dict[str, Any]]:
    """Describe the CUDA devices that torch can use."""
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = round(properties.total_memory / 2**30, 1)
        devices.append({"index": index, "name": properties.name, "capability": capability, "memory_gib": memory})
    return devices


def show(facts: dict[str, Any]) -> None:
    """Print the facts for a person, in a table if rich is installed."""
    rows = [(name, str(value)) for name, value in facts["versions"].items() if value is not None]
    rows += [
        (f"cuda:{device['index']}", "{name}, capability {capability}, {memory_gib} GiB".format(**device))
        for device in facts["cuda_devices"]
    ] or [("cuda devices", "none")]
    rows += [("contract", facts["contract"]["message"])]
    # Where every step is native, what else would be does not matter.
    blocking = [entry for entry in facts["native"] if entry["what"] == _EVERY_STEP]
    rows += [(f"native: {e['what']}", f"{e['why']}\n{e['cure']}") for e in blocking or facts["native"]]
    rows += [("verdict", _verdict(facts))]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"{name:<{width}}  {text}".replace("\n", "\n" + " " * (width + 2)))
        return
    table = Table(show_header=False)
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    Console().print(table)


def _verdict(facts: dict[str, Any]) -> str:
    """Say whether anything can be replayed, and what a GPU would change."""
    if facts["replayable"]:
        return "Training can be replayed here."
    if facts["cuda_devices"] or not facts["contract"]["known"]:
        return "Nothing can be replayed here."
    if facts["versions"]["cuda"] is None:
        return "Nothing can be replayed here. With a CUDA device and a torch built for CUDA, training could be."
    return "Nothing can be replayed here. With a CUDA device, training could be."


if __name__ == "__main__":
    sys.exit(main())
