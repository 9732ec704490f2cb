# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Contracts: what was inspected in each Lightning release, read from the data room ``compat/``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from packaging.version import InvalidVersion, Version

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, eq=False)
class Contract:
    """One inspected Lightning release. There is one object a release, so identity is equality.

    Attributes:
        version: The release.
        inspected: The day of the inspection, as YYYY-MM-DD.
        facts: What differs between releases and matters to us.
        functions: Dotted name of each pinned function and its fingerprint.
    """

    version: str
    inspected: str
    facts: Mapping[str, bool]
    functions: Mapping[str, str]


def data_room() -> Path:
    """Return the folder of the contracts: in an installed wheel beside the code, in a checkout at its top."""
    shipped = _PACKAGE / "_contracts"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "compat"


def known_versions() -> tuple[str, ...]:
    """Return the inspected releases, oldest first."""
    names = (path.stem.removeprefix("lightning-") for path in (data_room() / "contracts").glob("lightning-*.json"))
    return tuple(sorted(names, key=Version))


@cache
def load_contract(version: str) -> Contract | None:
    """Return the contract of a release, or None where that release was never inspected.

    Args:
        version: As the release states it, for example ``2.5.0.post0``.
    """
    try:
        name = str(Version(version))
    except InvalidVersion:
        return None
    path = data_room() / "contracts" / f"lightning-{name}.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Contract(
        version=data["version"],
        inspected=data["inspected"],
        facts=MappingProxyType(data["facts"]),
        functions=MappingProxyType(data["functions"]),
    )
