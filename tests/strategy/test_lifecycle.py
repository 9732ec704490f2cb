# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Second fits, other models, other Trainers, exceptions, checkpoints, copies."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_replay import Reason, ReplayStrategy
from tests.helpers.bits import assert_same
from tests.helpers.models import Cycled
from tests.helpers.trace import rng_states
from tests.parity.harness import (
    FEATURES,
    Learner,
    batches,
    check_replayed,
    classify,
    loader,
    mlp,
    names_on,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
    "num_sanity_val_steps": 0,
}


def trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(strategy=strategy, **{"max_epochs": 1, "enable_checkpointing": False, **QUIET, **options})


def state_of(module: Any) -> dict[str, Any]:
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": {name: p.grad for name, p in module.named_parameters()},
        "names": names_on(module),
        "rng": rng_states(),
    }


def both(scenario: Any) -> tuple[Any, Any]:
    """Runs a scenario natively and with replay, and compares what it returns."""
    results = []
    for make in (lambda: "auto", tape):
        seed_everything(3, verbose=False)
        results.append(scenario(make))
    assert_same(results[0], results[1])
    return results[0], results[1]


def test_two_fits_of_one_model() -> None:
    def scenario(make: Any) -> Any:
        strategy, module = make(), Learner(mlp())
        first = trainer(strategy)
        first.fit(module, *loader(batches(), 6))
        first.fit_loop.max_epochs = 3
        first.fit(module, *loader(batches(), 6))
        if strategy != "auto":
            assert strategy.report().steps_replayed == 3 + 9  # 3 of 6, then 9 of 12
            assert len(strategy.report().recordings) == 2
        return state_of(module)

    both(scenario)


def test_another_trainer_and_another_model_with_the_same_strategy() -> None:
    def scenario(make: Any) -> Any:
        strategy, modules = make(), [Learner(mlp()), Learner(nn.Linear(FEATURES, 3))]
        for module in modules:
            trainer(strategy, precision="bf16-mixed" if module is modules[0] else "32-true").fit(
                module, *loader(batches(), 6)
            )
        if strategy != "auto":
            assert strategy.report().steps_replayed == 6
            assert {recording.region for recording in strategy.report().recordings} == {"net"}
        return [state_of(module) for module in modules]

    both(scenario)


def test_fit_after_an_exception() -> None:
    class Stop(RuntimeError):
        pass

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = classify(module, batch, batch_idx)
        if module.fail and batch_idx == 4:
            raise Stop
        return loss

    def scenario(make: Any) -> Any:
        strategy, module = make(), Learner(mlp(), step)
        module.fail = True
        with pytest.raises(Stop):
            trainer(strategy).fit(module, *loader(batches(), 6))
        assert all("forward" not in child.__dict__ for child in module.modules())
        module.fail = False
        before = state_of(module)
        trainer(strategy).fit(module, *loader(batches(), 6))
        return before, state_of(module)

    both(scenario)


def test_copies_after_fit() -> None:
    def scenario(make: Any) -> Any:
        strategy, module = make(), Learner(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3)))
        module.step = module.make_optimizer = None
        module.training_step = None
        del module.training_step
        Learner.training_step.__get__(module)
        module.step, module.make_optimizer = classify, torch.optim.SGD
        trainer(strategy).fit(module, *loader(batches(), 6))
        module.trainer = None
        copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        for other in (copied, pickled):
            assert names_on(other) == names_on(module)
            assert_same(dict(module.state_dict()), dict(other.state_dict()))
            assert torch.equal(other.net(torch.ones(2, FEATURES)), module.net(torch.ones(2, FEATURES)))
        return state_of(copied), list(module.state_dict())

    both(scenario)


def test_copies_in_the_middle_of_a_fit() -> None:
    copies: list[Any] = []

    def keep(module: Any) -> None:
        copies.append(copy.deepcopy(module.net))

    check_replayed(lambda: Learner(mlp(), events={3: keep, 5: keep}))
    assert_same(copies[0].state_dict(), copies[2].state_dict())
    assert_same(copies[1].state_dict(), copies[3].state_dict())
    assert all("forward" not in child.__dict__ for child in copies[3].modules())


class Picklable(LightningModule):
    """A module without anything that pickle cannot find again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return classify(self, batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def cycled(steps: int) -> DataLoader:
    return DataLoader(Cycled(batches(), steps), batch_size=None)


class CopyingStrategy(Callback):
    def __init__(self, copied_by: Any) -> None:
        self.copied_by, self.copies = copied_by, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 4):
            self.copies.append(self.copied_by(trainer.strategy))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@pytest.mark.parametrize("scope", ["network", "step"])
def test_copies_of_the_strategy_begin_anew(copied_by: Any, scope: str) -> None:
    def scenario(make: Any) -> Any:
        strategy, module, copying = make(), Picklable(), CopyingStrategy(copied_by)
        trainer(strategy, callbacks=[copying], gradient_clip_val=0.1).fit(module, cycled(7))
        assert len(copying.copies) == 2
        if strategy == "auto":
            return state_of(module)
        assert strategy.report().steps_replayed == 4
        later = copied_by(strategy)
        for copied in (*copying.copies, later):
            assert copied.recordings == ()
            assert copied.report().steps_total == 0
            assert copied.last_gradient_norm is None
        trainer(later, gradient_clip_val=0.1).fit(copy.deepcopy(module), cycled(7))
        assert later.report().steps_replayed == 4
        assert later.report().norm_replays > 0
        assert strategy.report().steps_total == 7
        return state_of(module)

    results = []
    for make in (lambda: "auto", lambda: ReplayStrategy(scope=scope, warmup_steps=2, backend="tape")):
        seed_everything(3, verbose=False)
        results.append(scenario(make))
    assert_same(results[0]["state"], results[1]["state"])


def test_a_strategy_that_has_not_trained_can_be_copied() -> None:
    strategy = ReplayStrategy(capture_gradient_norm=False, backend="tape", on_native="error")

    for copied in (copy.copy(strategy), copy.deepcopy(strategy), pickled(strategy)):
        trainer(copied).fit(Learner(mlp()), *loader(batches(), 6))
        assert copied.report().steps_replayed == 2
    assert strategy.report().steps_total == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpoint_and_resume(precision: str, tmp_path: Path) -> None:
    def scenario(make: Any) -> Any:
        name = "native" if make() == "auto" else "replay"
        saved = ModelCheckpoint(tmp_path / name, every_n_train_steps=5, save_top_k=-1)
        options = {"precision": precision, "gradient_clip_val": 1.0}
        first = Learner(mlp())
        trainer(make(), enable_checkpointing=True, callbacks=[saved], **options).fit(first, *loader(batches(), 10))
        path = tmp_path / name / "epoch=0-step=5.ckpt"
        checkpoint = torch.load(path, weights_only=False)
        for callback in checkpoint["callbacks"].values():
            callback.clear()
        resumed = Learner(mlp())
        strategy = make()
        trainer(strategy, **{**options, "max_epochs": 2}).fit(resumed, *loader(batches(), 10), ckpt_path=path)
        if strategy != "auto":
            assert strategy.report().steps_replayed > 5
        return checkpoint, state_of(first), state_of(resumed)

    (native, *_), (replay, *_) = both(scenario)
    assert list(native) == list(replay)


def test_checkpoints_are_read_by_either(tmp_path: Path) -> None:
    results = []
    for writer, reader in (("auto", tape), (tape, "auto"), ("auto", "auto")):
        seed_everything(3, verbose=False)
        first = trainer(writer if writer == "auto" else writer())
        first.fit(Learner(mlp()), *loader(batches(), 6))
        first.save_checkpoint(tmp_path / "model.ckpt")
        module = Learner(mlp())
        second = trainer(reader if reader == "auto" else reader(), max_epochs=2)
        second.fit(module, *loader(batches(), 6), ckpt_path=tmp_path / "model.ckpt")
        results.append(state_of(module))

    assert_same(results[2], results[0])
    assert_same(results[2], results[1])


def test_validation_test_and_predict_are_native() -> None:
    class All(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", classify(self, batch, batch_idx))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", classify(self, batch, batch_idx))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    def scenario(make: Any) -> Any:
        strategy, module = make(), All(mlp())
        one = trainer(strategy, max_epochs=2)
        one.fit(module, loader(batches(), 6)[0], loader(batches(seed=1), 2)[0])
        logged = dict(one.callback_metrics)
        tested = one.test(module, loader(batches(seed=2), 2)[0], verbose=False)
        predicted = one.predict(module, loader(batches(seed=2), 2)[0])
        if strategy != "auto":
            assert strategy.report().steps_total == 12
        return logged, tested, predicted, state_of(module)

    both(scenario)


def test_recordings_are_given_back() -> None:
    strategy = tape()
    module = Learner(mlp())

    trainer(strategy).fit(module, *loader(batches(), 6))

    assert strategy._runner is None
    assert len(strategy.recordings) == 1  # what is known of it stays
    assert strategy.report().reasons == {Reason.WARM_UP: 2, Reason.RECORDING: 1}


class HookedAtFirst(Learner):
    """Cannot be recorded as a whole before the fourth batch."""

    def on_fit_start(self) -> None:
        self.hook = self.register_forward_pre_hook(lambda *_: None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.hook.remove()


def test_recordings_keep_their_places() -> None:
    strategy = tape(scope="auto")
    seen: list[tuple[str, ...]] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            seen.append(tuple(recording.region for recording in strategy.recordings))

    trainer(strategy, callbacks=[Notes()]).fit(HookedAtFirst(mlp()), *loader(batches(), 10))

    network, step = "net", "training_step"
    assert list(dict.fromkeys(seen)) == [(), (network,), (network, step)]
    assert [recording.replays for recording in strategy.recordings] == [1, 3]


def test_fast_dev_run_and_overfit_batches() -> None:
    def scenario(make: Any) -> Any:
        modules = [Learner(mlp()), Learner(mlp())]
        trainer(make(), fast_dev_run=5).fit(modules[0], *loader(batches(), 9))
        trainer(make(), overfit_batches=1, max_epochs=6).fit(modules[1], *loader(batches(), 9))
        return [state_of(module) for module in modules]

    both(scenario)


def test_last_action_of_each_step() -> None:
    trace = check_replayed(lambda: Learner(mlp()), max_epochs=2, actions=[*script(), *["replay"] * 7])

    assert trace.report.steps_total == 14
