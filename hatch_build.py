# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Build hook: the data room ``compat/`` travels in the wheel as ``lightning_replay/_contracts``."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = (".json", ".md", ".toml", ".txt")


class ContractsHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    """Adds the contracts to a wheel under a name that only the package knows."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map each data file into the package.

        An editable install reads the checkout instead: a copied folder there would shadow the package itself.
        """
        if version != "standard":
            return
        room = Path(self.root, "compat")
        for path in sorted(room.rglob("*")):
            if path.suffix in DATA:
                build_data["force_include"][str(path)] = f"lightning_replay/_contracts/{path.relative_to(room)}"
