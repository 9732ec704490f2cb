# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""H. Checkpointing, gradients of gradients, and modules without parameters."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, Learner, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


class Switchable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.use_checkpoint = False
        self.first, self.second = mlp(), nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        run = (lambda x: checkpoint(self.first, x, use_reentrant=False)) if self.use_checkpoint else self.first
        return self.second(run(inputs))


class SwitchOn(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net.use_checkpoint = trainer.current_epoch >= 1


def test_f27_checkpointing_switched_on_later(field: Field) -> None:
    trace = field.both(lambda: Learner(Switchable()), steps=6, max_epochs=3, callbacks=lambda: [SwitchOn()])

    assert trace.actions[:6] == ["native", "native", "record", "replay", "replay", "replay"]
    assert trace.report.reasons[Reason.MODULE_CHANGED] == 1


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        return self.net(positions)


def forces(module: Any, batch: Any, batch_idx: int) -> Tensor:
    positions = batch[0].clone().requires_grad_()
    energy = module.net(positions)
    (force,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return energy.square().mean() + (force - 0.1).square().mean()


def penalty(module: Any, batch: Any, batch_idx: int) -> Tensor:
    real, fake = batch[0], batch[0].flip(0) * 0.5
    mixed = (real * 0.3 + fake * 0.7).requires_grad_()
    (gradient,) = torch.autograd.grad(module.net(mixed).sum(), mixed, create_graph=True)
    return module.net(fake).mean() - module.net(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("step", [forces, penalty])
def test_f28_gradients_of_gradients(field: Field, step: Any) -> None:
    trace = field.native(lambda: Learner(Energy(), step), Reason.HIGHER_ORDER)

    assert trace.report.steps_replayed == 0


class Frozen(nn.Module):
    """A feature extractor that trains nothing and also gives an integer result, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(0.0)
        self.requires_grad_(False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.net(inputs)
        return features, features.argmax(1), features * 2


class OnTop(Learner):
    def __init__(self) -> None:
        super().__init__(mlp(), optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1))
        self.backbone = Frozen()
        self.net = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, best, _ = self.backbone(batch[0])
        assert not best.is_floating_point()
        return F.cross_entropy(self.net(features), batch[1]) + 0.0 * best.sum()


def test_f29_a_frozen_extractor_with_integer_and_unused_results(field: Field) -> None:
    trace = field.replayed(OnTop)

    assert {"backbone", "net"} == {recording.region for recording in trace.report.recordings if recording.replays}
