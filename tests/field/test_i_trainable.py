# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""I. The set of trainable parameters changes during the run."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.helpers.bits import assert_same
from tests.parity.harness import CLASSES, FEATURES, Learner, classify, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


class WithBackbone(Learner):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, CLASSES))
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class EachEpoch(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append({name: value.cpu().clone() for name, value in module.state_dict().items()})


def test_f30_a_backbone_that_thaws(field: Field) -> None:
    made: list[EachEpoch] = []

    def callbacks() -> list[Callback]:
        made.append(EachEpoch())
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False), made[-1]]

    trace = field.both(WithBackbone, steps=4, max_epochs=4, callbacks=callbacks)

    assert_same(made[0].seen, made[1].seen)
    moved = [
        not torch.equal(before["backbone.0.weight"], after["backbone.0.weight"])
        for before, after in zip(made[1].seen, made[1].seen[1:], strict=False)
    ]
    assert moved == [False, True, True]
    assert trace.actions[-4:] == ["replay"] * 4


class Toggling(Learner):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.other = nn.Linear(CLASSES, CLASSES)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.other(self.net(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.1)]


def test_f31_toggled_optimizers_are_native_with_one_message(field: Field) -> None:
    trace = field.native(Toggling, Reason.MANUAL_OPTIMIZATION)

    assert set(trace.report.reasons) == {Reason.MANUAL_OPTIMIZATION}
    assert list(trace.report.messages) == [Reason.MANUAL_OPTIMIZATION]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that can be merged into it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        self.drop = nn.Dropout(0.1)
        self.merged = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) if self.merged else self.base(inputs) + self.b(self.a(self.drop(inputs)))

    @torch.no_grad()
    def merge(self, sign: int) -> None:
        self.base.weight += sign * (self.b.weight @ self.a.weight)
        self.merged = sign > 0


class Merge(Callback):
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._all(module, 1)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._all(module, -1)

    def _all(self, module: Any, sign: int) -> None:
        for layer in module.modules():
            if isinstance(layer, Adapted):
                layer.merge(sign)


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", classify(self, batch, batch_idx))


def test_f32_adapters_that_are_merged_for_validation(field: Field) -> None:
    from tests.parity.harness import batches, loader

    def make() -> Learner:
        net = nn.Sequential(Adapted(FEATURES, 8), nn.GELU(), Adapted(8, CLASSES))
        return Validated(net, optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.05))

    trace = field.both(
        make,
        lambda: (loader(batches(), 5)[0], loader(batches(seed=1), 2)[0]),
        max_epochs=3,
        callbacks=lambda: [Merge()],
    )

    assert trace.last_gradients["net.0.base.weight"] is None
    assert trace.actions[5:] == ["replay"] * 10
