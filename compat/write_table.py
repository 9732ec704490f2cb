# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Write the outcome of ``nox -s matrix_full`` into the documentation, between the marks of docs/compatibility.md."""

import json
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

ROOM = Path(__file__).parent
PAGE = ROOM.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix: written by nox -s matrix_full -->", "<!-- end of matrix -->"


def main(results: Path) -> None:
    """Rewrite the table.

    Args:
        results: Folder of one JUnit file a release.
    """
    matrix = tomllib.loads((ROOM / "matrix.toml").read_text(encoding="utf-8"))
    rows = [row(release, results / f"{release}.xml") for release in matrix["lightning"]["releases"]]
    head = "| Lightning | inspected | autocast weight cache | tests |\n|---|---|---|---|"
    torch, python = matrix["torch"]["tested"], ".".join(map(str, sys.version_info[:3]))
    caption = f"With torch {torch} and Python {python}, on a CPU."
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join([head, *rows, "", caption]) + f"\n{END}{after}", encoding="utf-8")


def row(release: str, results: Path) -> str:
    """Return the table's row of a release."""
    contract = json.loads((ROOM / "contracts" / f"lightning-{release}.json").read_text(encoding="utf-8"))
    cache = "on" if contract["facts"]["autocast_weight_cache"] else "off"
    return f"| {release} | {contract['inspected']} | {cache} | {outcome(results)} |"


def outcome(results: Path) -> str:
    """Say in words how the tests of a release went."""
    if not results.exists():
        return "not run"
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    words = [f"{count['tests'] - bad - count['skipped']} passed"]
    words += [f"{bad} failed"] if bad else []
    words += [f"{count['skipped']} skipped"] if count["skipped"] else []
    return ", ".join(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
