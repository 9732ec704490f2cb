# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""D. Normalisation layers, buffers, and what a warm-up leaves behind."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.helpers.bits import assert_same
from tests.parity.harness import CLASSES, FEATURES, WARM_UP, Learner, batches, loader

pytestmark = pytest.mark.filterwarnings("ignore")


class Counter(nn.Module):
    """Counts its calls in a buffer, in place or by a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("n", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.in_place:
            self.n += 1
        else:
            self.n = self.n + 1
        return inputs


def net(in_place: bool = True) -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Linear(FEATURES, 8)), nn.BatchNorm1d(8), nn.ReLU(), Counter(in_place), nn.Linear(8, CLASSES)
    )


class Buffers(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: buffer.cpu().clone() for name, buffer in module.named_buffers()})


def watch_buffers() -> tuple[list[Buffers], Any]:
    made: list[Buffers] = []

    def callbacks() -> list[Callback]:
        made.append(Buffers())
        return [made[-1]]

    return made, callbacks


def test_f10_buffers_move_once_a_step(field: Field) -> None:
    made, callbacks = watch_buffers()
    trace = field.replayed(lambda: Learner(net()), callbacks=callbacks)

    native, replay = (buffers.seen for buffers in made)
    assert_same(native[0], replay[0], "after the first step")
    assert_same(native[WARM_UP], replay[WARM_UP], "after the step that was recorded")
    assert_same(native, replay)
    assert int(replay[-1]["net.3.n"]) == len(trace.actions)


def test_f10_a_buffer_replaced_by_the_forward_is_native(field: Field) -> None:
    made, callbacks = watch_buffers()
    field.native(lambda: Learner(net(in_place=False)), Reason.BUFFER_REBOUND, callbacks=callbacks)

    assert_same(made[0].seen, made[1].seen)


def test_f11_synchronized_normalization_on_one_device(field: Field) -> None:
    """There is nothing to synchronize on one device: a clear answer, before anything runs."""
    with pytest.raises(ValueError, match="sync_batchnorm") as error:
        Trainer(
            accelerator=field.accelerator,
            devices=1,
            sync_batchnorm=True,
            strategy=field.strategy(),
            logger=False,
            enable_checkpointing=False,
            max_steps=1,
        )

    assert "to do:" in str(error.value)


def test_f11_a_synchronized_layer_put_there_by_hand(gpu_field: Field) -> None:
    def make() -> Learner:
        return Learner(nn.SyncBatchNorm.convert_sync_batchnorm(net()))

    gpu_field.both(make, lambda: loader(batches(), 6))
