# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Callbacks and calls that change weights, optimizers or the whole run under way, and what a fit leaves behind."""

import copy
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import Reason
from tests.gradients.counting import check_counts, expected_counts
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    Arm,
    Learner,
    batches,
    check_replayed,
    classify,
    loader,
    mlp,
    run_both,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Scheduled(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


# -- averages of weights


@pytest.mark.parametrize("window", [1, 2])
def test_swa_renews_batch_statistics_while_gradients_live(window: int) -> None:
    """The last epoch of SWA runs forward passes alone; the gradients of the last update are still there."""
    trace = check_replayed(
        lambda: Scheduled(mlp()),
        # SWA gives BatchNorm new buffers for its last epoch, without a momentum: that waits for the device. Then its
        # parts are tried, and nothing is differentiated.
        actions=[*script(24), "native", "native", "record", "native", "native", "record"],
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, device=None)],
        steps=6,
        max_epochs=4,
        accumulate_grad_batches=window,
    )

    check_counts(trace, expected_counts(24, window))
    assert trace.last_gradients["net.0.weight"] is not None


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["WeightAveraging", "EMAWeightAveraging"])
def test_averages_that_are_swapped_in(kind: str, in_place: bool) -> None:
    if not hasattr(lightning_callbacks, kind):
        pytest.skip(f"this Lightning has no {kind}")

    class Validated(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", classify(self, batch, batch_idx))

    trace = check_replayed(
        lambda: Validated(mlp(), in_place=in_place),
        lambda: (loader(batches(), 5)[0], loader(batches(seed=1), 2)[0]),
        callbacks=lambda: [getattr(lightning_callbacks, kind)()],
        max_epochs=3,
    )

    # Before each validation Lightning itself sets gradients to None.
    check_counts(trace, (2, 10, 0) if in_place else (12, 0, 0))


class Copies(Callback):
    """Keeps deep copies of the module, gradients included, and trains one of them a little."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        twin = copy.deepcopy(pl_module.net)
        twin(batch[0]).sum().backward()


def test_deep_copies() -> None:
    check_counts(check_replayed(lambda: Learner(mlp()), callbacks=lambda: [Copies()]), expected_counts(7))


# -- finetuning and finders


class Finetuned(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize("window", [1, 2])
def test_backbone_finetuning(window: int) -> None:
    _, replay = run_both(
        Finetuned,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5)],
        steps=6,
        max_epochs=4,
        accumulate_grad_batches=window,
    )

    assert replay.error is None
    assert replay.trace is not None
    epochs = [replay.trace.actions[start : start + 6] for start in range(0, 24, 6)]
    assert epochs[1] == epochs[3] == ["replay"] * 6
    assert replay.trace.gradients[0]["backbone.0.weight"] is None
    assert replay.trace.gradients[-1]["backbone.0.weight"] is not None


class Tunable(LightningModule):
    """Has what the finders look for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.01, 2
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return classify(self, batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        inputs, labels = batches(size=96, count=1)[0]
        return DataLoader(TensorDataset(inputs, labels), self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    "make_finder",
    [
        lambda: LearningRateFinder(num_training_steps=8, early_stop_threshold=None),
        lambda: BatchSizeFinder(max_trials=3, steps_per_trial=6, init_val=4),
    ],
    ids=["learning rate", "batch size"],
)
def test_finders(make_finder: Any, tmp_path: Any) -> None:
    native, replay = run_both(
        Tunable,
        lambda: (None, None),
        callbacks=lambda: [make_finder()],
        default_root_dir=tmp_path,
        limit_train_batches=8,
    )

    assert native.error is None
    assert replay.trace is not None
    found = [(arm.modules[0].lr, arm.modules[0].batch_size) for arm in (native, replay)]
    assert found[0] == found[1]
    assert replay.trace.report.steps_replayed > 0


# -- weights and groups that change


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_are_assigned(in_place: bool) -> None:
    """The optimizer still steps the old parameters; nobody zeroes the gradients of the new ones."""

    def assign(module: Any) -> None:
        module.net.load_state_dict({k: v.clone() for k, v in module.net.state_dict().items()}, assign=True)

    trace = check_replayed(
        lambda: Learner(mlp(), events={4: assign}, in_place=in_place),
        actions=[*script(5), *script(6)],
        steps=11,
    )

    assert trace.report.reasons[Reason.MODULE_CHANGED] == 1
    first = expected_counts(5, in_place=in_place)
    check_counts(trace, (first[0], first[1] + 3, 0))


def test_weights_that_are_assigned_to_a_new_optimizer() -> None:
    def assign(module: Any) -> None:
        module.net.load_state_dict({k: v.clone() for k, v in module.net.state_dict().items()}, assign=True)
        module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

    trace = check_replayed(lambda: Learner(mlp(), events={4: assign}), actions=[*script(5), *script(6)], steps=11)

    check_counts(trace, (2 + 3, 0, 0))


@pytest.mark.parametrize("window", [1, 2])
def test_a_group_that_is_added(window: int) -> None:
    def add(module: Any) -> None:
        module.optimizers().add_param_group({"params": module.net[4].parameters(), "lr": 0.5})

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return classify(module, batch, batch_idx)

    # Until then nobody zeroes the gradients of the last layer: they grow.
    trace = check_replayed(
        lambda: Learner(mlp(), step, events={5: add}, optimizer=lambda p: torch.optim.SGD(list(p)[:4], lr=0.1)),
        steps=12,
        accumulate_grad_batches=window,
    )

    check_counts(trace, (6, 3, 0) if window == 1 else (3, 6, 0))


# -- what is left behind


def _names(trainer: Trainer, module: LightningModule) -> dict[str, list[str]]:
    """The attributes of every object of a fit that a recording could have been tempted to change."""
    loop = trainer.fit_loop
    objects = {
        "trainer": trainer,
        "fit loop": loop,
        "epoch loop": loop.epoch_loop,
        "automatic optimization": loop.epoch_loop.automatic_optimization,
        "profiler": trainer.profiler,
        "precision plugin": trainer.precision_plugin,
        **{f"optimizer {i}": optimizer for i, optimizer in enumerate(trainer.optimizers)},
        **{f"callback {i}": callback for i, callback in enumerate(trainer.callbacks)},
        **{f"module {path}": child for path, child in module.named_modules()},
        **{f"parameter {path}": parameter for path, parameter in module.named_parameters()},
    }
    return {name: [f"{type(value)}", *sorted(vars(value))] for name, value in objects.items()}


class Remember(Callback):
    trainer: Trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer


@pytest.mark.parametrize("fails", [None, "forward", "backward", "zero_grad", "step"])
def test_no_callback_and_no_attribute_stays_behind(fails: str | None) -> None:
    """After a fit that succeeded and after one that failed; a later fit of another module knows nothing of it."""

    class Failing(Learner):
        def _fail(self, place: str, batch_idx: int) -> None:
            if place == fails and batch_idx == 5:
                raise RuntimeError(f"failed in {place}")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self._fail("forward", batch_idx)
            if batch_idx == 5:
                loss.register_hook(lambda _: self._fail("backward", batch_idx))
            return loss

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self._fail("zero_grad", batch_idx)
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self._fail("step", batch_idx)

    left = []
    strategy = tape()
    for given in ("auto", strategy):
        remember = Remember()
        arm = Arm(lambda: Failing(mlp()), batches(), given, callbacks=[remember], gradient_clip_val=0.5)
        assert str(arm.error) == (f"failed in {fails}" if fails else "None")
        left.append(_names(remember.trainer, arm.modules[0]))
    assert strategy.report().steps_replayed > 1
    assert left[0] == left[1]

    _, later = run_both(lambda: Learner(mlp(0.0)), strategy=strategy)
    assert later.trace is not None
    assert later.trace.actions == script()
