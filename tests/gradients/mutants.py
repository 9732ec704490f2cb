# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The protections of gradients, and how to take each away: a test that cannot see the damage then proves nothing."""

from typing import Any

import pytest

from lightning_replay.gradients import GradientBuffers, Publication


def _bind_pool(publication: Publication) -> None:
    """The backward graph's own memory becomes `.grad`, as AccumulateGrad makes it when handed a static buffer."""
    for position, source in zip(publication.positions, publication.sources, strict=True):
        publication.buffers.parameters[position].grad = source


def _ignore_live(publication: Publication) -> bool:
    """Publishes over a live `.grad`."""
    return True


def _ignore_kept(buffers: GradientBuffers, positions: Any) -> bool:
    """Takes every buffer whose `.grad` is None for free, whoever keeps it."""
    return False


_WAYS = {
    "gradients outside of the pool": (Publication, "publish", _bind_pool),
    "adding to what lives": (Publication, "is_possible", _ignore_live),
    "leaving what is kept": (GradientBuffers, "held", _ignore_kept),
}


def take_away(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes one protection away until the monkeypatch is undone."""
    monkeypatch.setattr(*_WAYS[protection])
