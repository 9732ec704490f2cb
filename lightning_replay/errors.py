# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The errors and the warning that this package raises itself. Everything else is a builtin one."""

import sys
import warnings
from types import FrameType

from lightning_replay.reasons import Finding

_NOT_THE_USERS = sys.stdlib_module_names | {"lightning_replay", "lightning", "torch"}


class _FindingError(RuntimeError):
    """An error that carries the finding behind it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[type, tuple[Finding]]:
        return type(self), (self.finding,)


class CaptureError(_FindingError):
    """A region could not be recorded. Never leaves the runner: the region runs natively instead."""


class NotReplayedError(_FindingError):
    """A step could not be replayed and `on_native="error"` was asked for, or native numbers could not be had."""


class ContractError(_FindingError):
    """The installed Lightning is unknown and `on_native="error"` was asked for."""


class ReplayWarning(UserWarning):
    """Something runs natively: a step, a whole fit or the clipping of gradients. The message says why."""


def warn(finding: Finding | str) -> None:
    """Warns of a finding, or of something else, at the innermost line that is the user's own."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(str(finding), ReplayWarning, stacklevel=level)
