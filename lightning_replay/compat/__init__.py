# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The only place that touches non-public Lightning: contracts, their check, and the seams."""

from lightning_replay.compat.contract import Contract, known_versions, load_contract
from lightning_replay.compat.verdict import Verdict, check

__all__ = ["Contract", "Verdict", "check", "known_versions", "load_contract"]
