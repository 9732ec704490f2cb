# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The errors and the warning that this package raises itself. Everything else is a builtin one."""

from lightning_replay.reasons import Finding


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
