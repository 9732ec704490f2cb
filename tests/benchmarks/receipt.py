# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Receipts: JSON files, written by the program that measured, from which every published figure is rendered."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCHEMA = "lightning_replay.receipt/1"
ROOT = Path(__file__).resolve().parents[2]
_DISTRIBUTIONS = ("torch", "lightning", "numpy", "timm", "transformers", "triton")


def receipt(name: str, settings: dict[str, Any], results: dict[str, Any], command: str | None = None) -> dict[str, Any]:
    """Returns a complete receipt: what was measured, on what, with which sources, by which command.

    Args:
        name: what kind of receipt it is, and which renderer reads it.
        settings: everything that was the same for every run.
        results: raw numbers and what was computed from them.
        command: the command line; by default this process's own.
    """
    sources = source_hashes()
    return {
        "schema": SCHEMA,
        "name": name,
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command or command_line(),
        "versions": versions(),
        "device": device(),
        "sources": sources,
        "sources_digest": hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest(),
        "revision": revision(),
        "settings": settings,
        **results,
    }


def write(path: str | Path, content: dict[str, Any]) -> None:
    """Writes a receipt where it was asked for, through a temporary file: a receipt is whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(_PATHS.sub("", json.dumps(content, indent=1)) + "\n")
    partial.replace(path)


_PATHS = re.compile(rf"{re.escape(str(ROOT))}/|/[^\s\"']*/(?:site|dist)-packages/|/[^\s\"']*/lib/python3\.\d+/")
"""Where this repository, and other packages, lie on the machine that measured: no part of a receipt."""


def command_line(module: str | None = None) -> str:
    """Returns this process's command as a reader can repeat it: directories of this machine are left out."""
    if module is None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return f"python -m {module} {shlex.join(words)}".strip()


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the distributions that a step runs through."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def device() -> dict[str, Any]:
    """Returns the GPU, its driver, and what the host contributes to a step: its processor and thread count."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": None,
        "driver": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_mib"] = properties.total_memory // 2**20
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _driver()
    return found


def source_hashes() -> dict[str, str]:
    """Returns the SHA-256 of every source file of the package, by its path in the repository."""
    files = sorted((ROOT / "lightning_replay").rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def revision() -> str | None:
    """Returns the commit, with "+" where the package differs from it.

    A copy without history says which commit it is in LIGHTNING_REPLAY_REVISION; the hashes of the sources tell whether
    that is true. None where neither is known.
    """
    stated = os.environ.get("LIGHTNING_REPLAY_REVISION")
    if stated:
        return stated
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "lightning_replay")
    return None if commit is None else commit + ("+" if changed else "")


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
