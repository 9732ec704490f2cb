# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""J. Weights replaced or restored: checkpoints, averages, tuners, adapters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.helpers.bits import assert_same
from tests.parity.harness import WARM_UP, Learner, batches, classify, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_f33_resumed_runs_end_where_uninterrupted_ones_do(field: Field, tmp_path: Path) -> None:
    ends = []
    for replays in (False, True):
        for resumed in (False, True):
            seed_everything(3, verbose=False)
            module = Learner(mlp(0.0))
            data = batches(count=4)
            path = tmp_path / f"{replays}.ckpt"

            def trainer(epochs: int, replays: bool = replays) -> Trainer:
                strategy: Any = field.strategy() if replays else "auto"
                return Trainer(accelerator=field.accelerator, devices=1, max_epochs=epochs, strategy=strategy, **QUIET)

            if resumed:
                first = trainer(1)
                first.fit(module, loader(data, 10)[0])
                first.save_checkpoint(path)
                module = Learner(mlp(0.0))
            last = trainer(2)
            last.fit(module, loader(data, 10)[0], ckpt_path=path if resumed else None)
            if replays:
                assert last.strategy.report().steps_replayed == (10 if resumed else 20) - WARM_UP - 1
            ends.append({name: value.cpu() for name, value in module.state_dict().items()})

    assert list(ends[0]) == list(Learner(mlp()).state_dict())
    for other in ends[1:]:
        assert_same(ends[0], other)


class Average(Callback):
    """Keeps an average of the weights and swaps it in for validation: by copying, or by new memory."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.average: list[Tensor] = []
        self.live: list[Tensor] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.shadow = copy.deepcopy(module.net)
        self.average = [p.detach().clone() for p in module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.average, module.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self.average:
            self.live = [p.detach().clone() if self.copies else p.data for p in module.parameters()]
            self._set(module, self.average)

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.average:
            self._set(module, self.live)

    def _set(self, module: Any, values: list[Tensor]) -> None:
        for parameter, value in zip(module.parameters(), values, strict=True):
            if self.copies:
                parameter.copy_(value)
            else:
                parameter.data = value


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", classify(self, batch, batch_idx))


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "swapped"])
def test_f34_averaged_weights_in_validation(field: Field, copies: bool) -> None:
    made: list[Average] = []

    def callbacks() -> list[Callback]:
        made.append(Average(copies))
        return [made[-1]]

    trace = field.both(
        lambda: Validated(mlp()),
        lambda: (loader(batches(), 10)[0], loader(batches(seed=1), 2)[0]),
        callbacks=callbacks,
        val_check_interval=5,
        max_epochs=2,
    )

    assert_same([t.cpu() for t in made[0].average], [t.cpu() for t in made[1].average])
    assert trace.actions[3:] == ["replay"] * 17  # the memory that was recorded is back after each validation


def test_f34_lightnings_own_averaging(field: Field) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")

    trace = field.both(
        lambda: Validated(mlp()),
        lambda: (loader(batches(), 10)[0], loader(batches(seed=1), 2)[0]),
        callbacks=lambda: [callbacks.EMAWeightAveraging(decay=0.9)],
        val_check_interval=5,
        max_epochs=2,
    )

    assert "replay" in trace.actions


class Swap(Callback):
    def __init__(self, copies: bool) -> None:
        self.copies = copies

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        weight = module.net[4].weight
        new = weight * 0.5
        if self.copies:
            weight.copy_(new)
        else:
            weight.data = new


@pytest.mark.parametrize(("copies", "recordings"), [(True, 1), (False, 3)], ids=["in place", "new tensors"])
def test_f35_adapters_swapped_each_epoch(field: Field, copies: bool, recordings: int) -> None:
    trace = field.both(lambda: Learner(mlp()), steps=6, max_epochs=3, callbacks=lambda: [Swap(copies)])

    assert len(trace.report.recordings) == recordings
    assert (Reason.MODULE_CHANGED in trace.report.reasons) == (not copies)


class Tunable(Learner):
    def __init__(self) -> None:
        super().__init__(mlp(0.0))
        self.lr = 0.01
        self.batch_size = 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(batches(size=self.batch_size), 6)[0]


def test_f36_tuners_before_the_fit(field: Field, tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    found = []
    for replays in (False, True):
        seed_everything(5, verbose=False)
        module = Tunable()
        strategy: Any = field.strategy() if replays else "auto"
        trainer = Trainer(
            accelerator=field.accelerator,
            devices=1,
            max_epochs=1,
            strategy=strategy,
            default_root_dir=tmp_path / str(replays),
            **QUIET,
        )
        tuner = Tuner(trainer)
        finder = tuner.lr_find(module, num_training=12, update_attr=True)
        size = tuner.scale_batch_size(module, mode="power", max_trials=2, steps_per_trial=2, init_val=2)
        trainer.fit(module)
        found.append((finder.results, size, {k: v.cpu() for k, v in module.state_dict().items()}))
        if replays:
            assert strategy.report().steps_replayed > 0

    assert_same(found[0], found[1])
