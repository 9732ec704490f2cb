# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""B. Outputs and inputs that share memory with what a replay writes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from tests.field.conftest import Field
from tests.helpers.bits import assert_same
from tests.parity.harness import CLASSES, FEATURES, WARM_UP, Learner, batches, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


class Epoch(Learner):
    """Collects its losses as Lightning's migration guide tells to."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.collected: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.collected.append(loss.detach())
        return {"loss": loss, "logits": logits}

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.collected).mean())


class Collect(Callback):
    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logits.append(outputs["logits"].detach())


def test_f04_collected_losses_and_logits_stay_as_they_were(field: Field) -> None:
    made: list[Epoch] = []
    collected: list[Collect] = []

    def make() -> Epoch:
        made.append(Epoch())
        return made[-1]

    def callbacks() -> list[Callback]:
        collected.append(Collect())
        return [collected[-1]]

    field.replayed(make, callbacks=callbacks)

    assert_same([loss.cpu() for loss in made[0].collected], [loss.cpu() for loss in made[1].collected])
    assert_same([t.cpu() for t in collected[0].logits], [t.cpu() for t in collected[1].logits])
    assert len({float(loss) for loss in made[1].collected}) == len(made[1].collected)


def test_f04_losses_collected_with_their_graphs(field: Field) -> None:
    """An undetached loss keeps its step's call pending: native while it lives, never wrong."""

    class Undetached(Epoch):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.collected.append(loss)
            return loss

    made: list[Epoch] = []

    def make() -> Epoch:
        made.append(Undetached())
        return made[-1]

    trace = field.both(make, steps=10)

    assert "replay" in trace.actions
    assert_same(
        [loss.detach().cpu() for loss in made[0].collected], [loss.detach().cpu() for loss in made[1].collected]
    )


class Late(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = 2


def test_f05_a_setting_changed_when_the_fit_starts(field: Field) -> None:
    class Logging(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    trace = field.replayed(lambda: Logging(mlp()), steps=8, callbacks=lambda: [Late()], enable_progress_bar=True)

    assert trace.report.gradients_added > 0
    assert {"loss", "loss_step", "loss_epoch"} <= set(trace.metrics)


def sliced(device: torch.device, kind: str) -> tuple[Tensor, list[Any]]:
    """A data set on the device, and batches that are views of it."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(20, FEATURES, generator=generator).to(device)
    labels = torch.randint(CLASSES, (20,), generator=generator).to(device)
    if kind == "slices":
        return data, [(data[i : i + 4], labels[i : i + 4]) for i in range(0, 20, 4)]
    if kind == "every other":
        return data, [(data[i::5], labels[i::5]) for i in range(5)]
    if kind == "expanded":
        return data, [(data[i : i + 1].expand(4, FEATURES), labels[i : i + 4]) for i in range(5)]
    buffers = [torch.empty(4, FEATURES, device=device) for _ in range(2)]
    return data, [(buffers[i % 2], labels[i : i + 4]) for i in range(4)]


@pytest.mark.parametrize("kind", ["slices", "every other", "expanded"])
def test_f06_views_of_a_data_set_on_the_device(field: Field, kind: str) -> None:
    before: list[Tensor] = []
    sets: list[Tensor] = []

    def data() -> Any:
        whole, views = sliced(field.device, kind)
        sets.append(whole)
        before.append(whole.clone())
        return loader(views, 10)

    # Slices of 24 floats lie 96 bytes apart, a multiple of every alignment that a kernel looks at.
    trace = field.both(lambda: Learner(mlp()), data, strategy={"max_recordings": 8})

    assert "replay" in trace.actions
    assert_same([t.cpu() for t in before], [t.cpu() for t in sets])


def test_f06_two_buffers_in_turn(field: Field) -> None:
    class Prefetched(Learner):
        """Copies each batch into one of two buffers before it is used."""

        def on_fit_start(self) -> None:
            self.buffers_in_turn = [torch.zeros(5, FEATURES, device=self.device) for _ in range(2)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            buffer = self.buffers_in_turn[batch_idx % 2]
            buffer.copy_(batch[0])
            return F.cross_entropy(self.net(buffer), batch[1])

    trace = field.replayed(lambda: Prefetched(mlp()), batches(count=5), steps=10)

    assert trace.actions.count("replay") == 10 - WARM_UP - 1
