# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Handwritten digits for three epochs: a ragged last batch and validation in each, AdamW, gradients clipped."""

import pytest

from tests.helpers.models import DigitsCNN, digits_data
from tests.helpers.trace import ZeroGradTrace, compare, run_fit
from tests.parity.harness import tape

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS = 3
FULL = 11  # batches of 128 among 1,437 images, and one of 29
WARM_UP = 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_equals_native(precision: str) -> None:
    native, replay = (
        run_fit(
            lambda: DigitsCNN(width=8),
            lambda: digits_data(128),
            strategy,
            precision,
            max_epochs=EPOCHS,
            gradient_clip_val=1.0,
            trace=ZeroGradTrace("copy"),
        )
        for strategy in ("auto", lambda: tape(warmup_steps=WARM_UP))
    )

    compare(native, replay)
    first = ["native"] * WARM_UP + ["record"] + ["replay"] * (FULL - WARM_UP - 1) + ["native"]
    assert replay.actions == first + (["replay"] * FULL + ["native"]) * (EPOCHS - 1)
    replayed, possible = replay.full_size_actions.count("replay"), EPOCHS * FULL - WARM_UP
    assert replayed >= 0.9 * possible
    assert len(native.gradients) == len(native.gradients_at_zero) == EPOCHS * (FULL + 1)
    assert (replay.report.steps_total, replay.report.steps_replayed) == (EPOCHS * (FULL + 1), replayed)
    assert [recording.certified for recording in replay.report.recordings] == ["bitwise"]
    # Validation logged the same numbers, and something was learned.
    assert native.metrics["val_accuracy"] > 0.5
