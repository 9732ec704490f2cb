# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Print the rows of the CI workflow from ``matrix.toml``, as outputs of a workflow step.

Each release either side of a change runs on the Python of the developers' environment; oldest and newest Lightning also
meet oldest and newest Python.
"""

import json
import tomllib
from pathlib import Path

MATRIX = tomllib.loads((Path(__file__).parent / "matrix.toml").read_text(encoding="utf-8"))


def rows() -> list[dict[str, str]]:
    """Return the combinations of Lightning and Python that CI runs."""
    lightning, python = MATRIX["lightning"]["representatives"], MATRIX["python"]
    combinations = [(release, python["developed"]) for release in lightning]
    combinations += [(lightning[0], python["oldest"]), (lightning[-1], python["oldest"])]
    combinations += [(lightning[-1], python["newest"])]
    return [{"lightning": release, "python": version} for release, version in combinations]


if __name__ == "__main__":
    print(f"rows={json.dumps(rows())}")
    print(f"newest-python={MATRIX['python']['newest']}")
