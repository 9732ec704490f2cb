# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Why gradients do not stay where a backward graph makes them: the next forward replay alone would change them."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_replay import ReplayStrategy
from tests.gradients.mutants import take_away
from tests.helpers.bits import same_bits
from tests.helpers.models import DigitsCNN, GPTModule, cycled, digits_data, token_batches
from tests.helpers.trace import Loaders, Trace, run_fit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

STEPS = 12

NETWORKS: dict[str, tuple[Callable[[], LightningModule], Callable[[], Loaders]]] = {
    "convolutions": (DigitsCNN, lambda: digits_data(ragged=False, validation=False)),
    "transformer": (
        lambda: GPTModule(layers=2, width=64, heads=2, context=32, vocabulary=128, attention="plain"),
        lambda: cycled(token_batches(4, 32, 128), STEPS),
    ),
}


class ChangedByForward(Callback):
    """Counts the gradients that differ between the end of a step and the end of the next forward replay.

    `on_before_zero_grad` runs right after that forward: no other recorded work lies between the two.
    """

    def __init__(self) -> None:
        self.changed: list[int] = []
        self.total = 0
        self._then: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.last_action == "replay":
            self._then = [(p.grad, p.grad.clone()) for p in pl_module.parameters() if p.grad is not None]

    def on_before_zero_grad(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        if self._then:
            self.total = len(self._then)
            self.changed.append(sum(not same_bits(gradient, then) for gradient, then in self._then))
        self._then = []


@pytest.mark.parametrize("protected", [True, False], ids=["our layout", "gradients left in the pool"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("network", NETWORKS)
def test_one_forward_replay(
    network: str, precision: str, protected: bool, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    if not protected:
        take_away("gradients outside of the pool", monkeypatch)
    make_module, make_data = NETWORKS[network]
    count = ChangedByForward()

    trace = run_fit(
        make_module,
        make_data,
        lambda: ReplayStrategy(on_native="ignore"),
        precision,
        accelerator="gpu",
        max_steps=STEPS,
        gradient_clip_val=None,
        trace=Trace("off"),
        callbacks=[count],
    )

    assert trace.actions[4:] == ["replay"] * (STEPS - 4)
    assert len(count.changed) == STEPS - 5
    record_property("changed", f"{count.changed} of {count.total}")
    print(f"{network}, {precision}: a forward replay changed {count.changed} of {count.total} gradients")
    if protected:
        assert count.changed == [0] * len(count.changed)
    else:
        assert min(count.changed) > 0
