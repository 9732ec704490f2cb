# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""A. Gradient accumulation and the life of gradient buffers."""

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.field.conftest import Field
from tests.helpers.bits import assert_same
from tests.parity.harness import Learner, batches, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


def test_f01_two_batches_a_step_are_summed(field: Field) -> None:
    trace = field.replayed(lambda: Learner(mlp()), steps=20, accumulate_grad_batches=2)

    assert trace.report.gradients_added > 0


def test_f02_accumulation_that_begins_when_graphs_exist(field: Field) -> None:
    trace = field.both(
        lambda: Learner(mlp()),
        batches(count=4),
        steps=4,
        max_epochs=4,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 2: 4})],
    )

    assert trace.actions[4:] == ["replay"] * 12


class Keep(Callback):
    """Keeps the gradients of a step, without copying them, and reads them one step later."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.kept: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.kept.append([parameter.grad for parameter in module.parameters()])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.kept) > 1:
            self.seen.append([gradient.clone() for gradient in self.kept[-2]])


@pytest.mark.parametrize("window", [1, 2])
def test_f03_kept_gradients_stay_as_they_were(field: Field, window: int) -> None:
    keepers: list[Keep] = []

    def callbacks() -> list[Callback]:
        keepers.append(Keep())
        return [keepers[-1]]

    field.replayed(lambda: Learner(mlp()), steps=8, accumulate_grad_batches=window, callbacks=callbacks)

    assert_same([k.cpu() for s in keepers[0].seen for k in s], [k.cpu() for s in keepers[1].seen for k in s])
    assert_same([k.cpu() for s in keepers[0].kept for k in s], [k.cpu() for s in keepers[1].kept for k in s])
