# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Inspect Lightning releases: write their contracts and say what changed. Run with ``nox -s inspect -- 2.6.6``.

The wheel of a release is downloaded without its dependencies and read, never imported.
"""

import argparse
import ast
import datetime
import difflib
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from packaging.version import Version

from lightning_replay.compat.fingerprint import FunctionNode, decorator_name, fingerprint, normalise

ROOM = Path(__file__).parent
Definitions = dict[str, list[FunctionNode]]


def main(arguments: list[str] | None = None) -> int:
    """Inspect the releases named on the command line.

    Args:
        arguments: Command-line words; None takes them from the process.

    Returns:
        0, or 1 where a pinned function does not exist in a release (with ``--strict`` also where one changed).
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", help="releases on the package index, for example 2.6.6")
    parser.add_argument("--wheels", type=Path, help="folder of wheels already downloaded")
    parser.add_argument("--strict", action="store_true", help="fail where a pinned function changed")
    options = parser.parse_args(arguments)
    pins = read_pins()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        wheels = options.wheels or Path(folder)
        for version in sorted(options.versions, key=Version):
            definitions = read_release(fetch(version, wheels), pins)
            previous = previous_release(version)
            old = read_release(fetch(previous, wheels), pins) if previous else {}
            missing = write_contract(version, definitions, pins)
            changed = changes(old, definitions)
            print("\n".join(report(version, definitions, previous, old, pins)))
            failed |= bool(missing) or (options.strict and bool(changed))
    return int(failed)


def read_pins() -> dict[str, str]:
    """Return the dotted name of every pinned function with the reason why we lean on it."""
    with (ROOM / "pins.toml").open("rb") as file:
        groups = tomllib.load(file)["pins"]
    return {f"{group['module']}.{name}": group["why"] for group in groups for name in group["functions"]}


def fetch(version: str, folder: Path) -> Path:
    """Return the wheel of a release, downloaded into ``folder`` unless it lies there."""
    wheel = folder / f"lightning-{version}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, f"lightning=={version}"], check=True)
    return wheel


def read_release(wheel: Path, pins: dict[str, str]) -> Definitions:
    """Return the definitions of the pinned functions that a wheel holds, by dotted name."""
    found: Definitions = {}
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        trees: dict[str, ast.Module] = {}
        for name in pins:
            module, path = split(name, files)
            if module and module not in trees:
                trees[module] = ast.parse(archive.read(module))
            nodes = definitions_of(trees[module], path) if module else []
            if nodes:
                found[name] = nodes
    return found


def split(name: str, files: set[str]) -> tuple[str, list[str]]:
    """Split a dotted name into the longest module file that exists and the names inside that module."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        for file in ("/".join(parts[:cut]) + ".py", "/".join(parts[:cut]) + "/__init__.py"):
            if file in files:
                return file, parts[cut:]
    return "", []


def definitions_of(tree: ast.Module, path: list[str]) -> list[FunctionNode]:
    """Return what a name stands for: one function, or all parts of a property."""
    body = tree.body
    for name in path[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    nodes = [node for node in body if isinstance(node, FunctionNode) and node.name == path[-1]]
    nodes = [node for node in nodes if "overload" not in map(decorator_name, node.decorator_list)]
    is_property = bool(nodes) and "property" in map(decorator_name, nodes[0].decorator_list)
    return nodes if is_property else nodes[-1:]


def facts_of(definitions: Definitions) -> dict[str, bool]:
    """Derive from the source what differs between releases and matters to us."""
    autocast = definitions["lightning.pytorch.plugins.precision.amp.MixedPrecision.autocast_context_manager"][0]
    load = definitions["lightning.pytorch.strategies.strategy.Strategy.load_checkpoint"][0]
    cache_off = any(
        keyword.arg == "cache_enabled" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for node in ast.walk(autocast)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )
    arguments = [*load.args.args, *load.args.kwonlyargs]
    return {
        "autocast_weight_cache": not cache_off,
        "load_checkpoint_weights_only": any(argument.arg == "weights_only" for argument in arguments),
    }


def write_contract(version: str, definitions: Definitions, pins: dict[str, str]) -> list[str]:
    """Write the contract of a release; an inspection that finds nothing new keeps its date.

    Returns:
        The pinned functions that the release does not have.
    """
    path = ROOM / "contracts" / f"lightning-{version}.json"
    contract: dict[str, Any] = {
        "version": version,
        "inspected": datetime.date.today().isoformat(),
        "facts": facts_of(definitions),
        "functions": {name: fingerprint(nodes) for name, nodes in definitions.items()},
    }
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if {**old, "inspected": ""} == {**contract, "inspected": ""}:
            contract["inspected"] = old["inspected"]
    path.write_text(json.dumps(contract, indent=2) + "\n", encoding="utf-8")
    return [name for name in pins if name not in definitions]


def previous_release(version: str) -> str | None:
    """Return the inspected release before this one."""
    names = [path.stem.removeprefix("lightning-") for path in (ROOM / "contracts").glob("lightning-*.json")]
    older = [name for name in names if Version(name) < Version(version)]
    return max(older, key=Version, default=None)


def report(version: str, new: Definitions, previous: str | None, old: Definitions, pins: dict[str, str]) -> list[str]:
    """Say in words what changed against the previous release, with the changed lines of each function."""
    lines = [f"Lightning {version}: {len(new)} of {len(pins)} pinned functions found."]
    lines += [f"- {name} does not exist. We lean on it for {pins[name]}." for name in pins if name not in new]
    if previous is None:
        return [*lines, "There is no earlier contract to compare with."]
    changed = changes(old, new)
    lines.append(f"Against {previous}: {len(changed)} changed." if changed else f"Against {previous}: nothing changed.")
    for name in changed:
        lines += ["", f"- {name} changed. We lean on it for {pins[name]}.", *difference(old[name], new[name])]
    before, after = facts_of(old), facts_of(new)
    lines += [f"- fact {name}: {before[name]} became {after[name]}" for name in after if before[name] != after[name]]
    return lines


def changes(old: Definitions, new: Definitions) -> list[str]:
    """Return the functions that both releases have and that differ."""
    return [name for name in new if name in old and fingerprint(new[name]) != fingerprint(old[name])]


def difference(old: list[FunctionNode], new: list[FunctionNode]) -> list[str]:
    """Return the changed lines with two lines around them, indented."""
    before, after = ("\n".join(ast.unparse(normalise(node)) for node in nodes).splitlines() for nodes in (old, new))
    return [f"    {line}" for line in list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]]


if __name__ == "__main__":
    sys.exit(main())
