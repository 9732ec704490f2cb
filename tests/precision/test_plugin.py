# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clipping by norm inside a fit: ReplayPrecision by itself, and what ReplayStrategy does to the Trainer's plugin."""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_replay import ReplayPrecision, ReplayStrategy, ReplayWarning
from lightning_replay.norm import COPY_CALLS, NormClipper
from lightning_replay.precision import ReplayClipMixin, attach, detach
from lightning_replay.reasons import Reason
from tests.helpers.bits import assert_same
from tests.helpers.models import MLPModule, cycled, feature_batches
from tests.helpers.trace import compare, run_fit

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(
        not hasattr(torch.nn.utils, "get_total_norm"), reason="this torch has no torch.nn.utils.get_total_norm"
    ),
]

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
CLASSES = {
    "32-true": Precision,
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": HalfPrecision,
    "16-true": HalfPrecision,
    "64-true": DoublePrecision,
}
STEPS = 12
ON_COPIES = STEPS - COPY_CALLS - 1  # what is replayed of them where gradients are new tensors in every step


def make_module(**options):
    return MLPModule(width=8, features=4, **options)


def make_data(steps=STEPS):
    return cycled(feature_batches(4, 4), steps)


def make_plugin(precision="32-true", **options):
    if "mixed" in precision:
        options["device"] = "cpu"
    return ReplayPrecision(precision, backend="tape", **options)


def make_strategy(**options):
    return ReplayStrategy(backend="tape", warmup_steps=1, **options)


def fit(strategy="auto", plugin=None, *, precision="32-true", module=make_module, data=make_data, **options):
    options.setdefault("max_steps", STEPS)
    if plugin is None and precision == "16-mixed":  # by its name, Lightning makes it bf16-mixed on a CPU
        plugin = MixedPrecision("16-mixed", "cpu")
    if plugin is not None:
        return run_fit(module, data, strategy, None, plugins=[plugin], **options)
    return run_fit(module, data, strategy, precision, **options)


class Reader(Callback):
    """Keeps what a callback sees of the plugin while a fit runs."""

    def __init__(self):
        self.norms, self.plugin, self.kind = [], None, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.plugin, self.kind = trainer.precision_plugin, type(trainer.precision_plugin)
        self.norms.append(self.plugin.last_gradient_norm)


# -- the plugin by itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plugin_alone_equals_native(precision):
    plugin = make_plugin(precision)
    compare(fit(precision=precision), fit(plugin=plugin))
    assert plugin.norm_replays == ON_COPIES
    assert plugin.norm_native == {Reason.WARM_UP: COPY_CALLS, Reason.RECORDING: 1}


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-true"])
def test_it_is_lightnings_own_to_everybody_else(precision):
    native, plugin = CLASSES[precision], ReplayPrecision(precision)
    assert isinstance(plugin, native)
    assert isinstance(plugin, ReplayPrecision)
    assert type(plugin).__qualname__ == native.__qualname__
    assert type(plugin).__module__ == native.__module__
    assert plugin.precision == precision
    assert type(plugin) is type(ReplayPrecision(precision))
    assert repr(plugin) == f"ReplayPrecision({precision!r})"
    assert (plugin.last_gradient_norm, plugin.norm_replays, plugin.norm_native) == (None, 0, {})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_never_carry_a_recording(copied):
    plugin = make_plugin("16-mixed")
    reader = Reader()
    copies = []
    reader.on_train_batch_end = lambda *args: copies.append(copied(plugin))
    fit(plugin=plugin, callbacks=[reader])
    assert plugin.norm_replays == ON_COPIES
    for other in (copied(plugin), copies[-1]):
        assert type(other) is type(plugin)
        assert other.norm_replays == 0
        assert other.scaler.get_scale() == plugin.scaler.get_scale()
    compare(fit(precision="16-mixed"), fit(plugin=copied(make_plugin("16-mixed"))))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="'bf16-mixed'"):
        ReplayPrecision("bf16")
    with pytest.raises(ValueError, match="'tape'"):
        ReplayPrecision("32-true", backend="gpu")


def test_a_subclass_of_ones_own():
    class Mine(ReplayPrecision):
        pass

    plugin = Mine("bf16-mixed", device="cpu", backend="tape")
    assert isinstance(plugin, Mine)
    assert type(plugin).__qualname__ == "MixedPrecision"
    assert repr(plugin) == "Mine('bf16-mixed')"
    fit(plugin=plugin)
    assert plugin.norm_replays == ON_COPIES


@pytest.mark.filterwarnings("ignore")
def test_command_line_can_make_it():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False)
    written = {"class_path": "lightning_replay.ReplayPrecision", "init_args": {"precision": "bf16-mixed"}}
    config = parser.parse_object({"trainer": {"plugins": [written], "accelerator": "cpu", "logger": False}})
    trainer = parser.instantiate_classes(config).trainer
    assert isinstance(trainer.precision_plugin, ReplayPrecision)
    assert isinstance(trainer.precision_plugin, MixedPrecision)


def test_checkpoints_are_interchangeable(tmp_path):
    """Scaler state included, which is kept under the name of the plugin's class."""

    def train(**options):
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, gradient_clip_val=1.0, **options,
        )  # fmt: skip
        return trainer

    torch.manual_seed(0)
    plugin = make_plugin("16-mixed")
    plugin.scaler.load_state_dict({**plugin.scaler.state_dict(), "scale": 8.0})
    first = train(max_steps=8, plugins=[plugin])
    first.fit(make_module(), make_data()[0])
    first.save_checkpoint(tmp_path / "replay.ckpt")
    assert plugin.norm_replays == 8 - COPY_CALLS - 1
    second = train(max_steps=10, plugins=[MixedPrecision("16-mixed", "cpu")])
    second.fit(make_module(), make_data()[0], ckpt_path=tmp_path / "replay.ckpt")
    assert second.precision_plugin.scaler.get_scale() == 8.0
    second.save_checkpoint(tmp_path / "native.ckpt")
    kept = torch.load(tmp_path / "native.ckpt", weights_only=False)
    assert set(kept) == set(torch.load(tmp_path / "replay.ckpt", weights_only=False))
    plugin = make_plugin("16-mixed")
    third = train(max_steps=20, plugins=[plugin])
    third.fit(make_module(), make_data()[0], ckpt_path=tmp_path / "native.ckpt")
    assert plugin.scaler.get_scale() == 8.0
    assert plugin.norm_replays > 0


# -- the strategy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_strategy_clips_in_place_and_equals_native(precision):
    replay = fit(make_strategy, precision=precision)
    compare(fit(precision=precision), replay)
    report = replay.report
    assert report.steps_replayed == STEPS - 2
    assert (report.norm_replays, report.norm_copied) == (STEPS - 5, 0)
    assert report.norm_native == {Reason.WARM_UP: 4, Reason.RECORDING: 1}
    assert f"gradient norm: {STEPS - 5} replayed" in str(report)
    assert report.as_dict()["norm_native"] == {"warm_up": 4, "recording": 1}
    assert report.gradients_published == STEPS - 2


def test_strategy_with_nothing_replayed_clips_on_copies():
    replay = fit(lambda: make_strategy(modules=["net.0"]), max_steps=16, module=Hooked, data=many)
    compare(fit(max_steps=16, module=Hooked, data=many), replay)
    assert replay.report.steps_replayed == 0
    assert replay.report.norm_replays == replay.report.norm_copied == 16 - 7


def many():
    return make_data(16)


class Hooked(MLPModule):
    """Has a hook on its first layer, so that a replay would miss it."""

    def __init__(self):
        super().__init__(width=8, features=4)
        self.net[0].register_forward_hook(lambda *args: None)


def test_false_is_the_native_route():
    reader = Reader()
    reader.on_train_batch_end = lambda trainer, *args: setattr(reader, "kind", type(trainer.precision_plugin))
    replay = fit(lambda: make_strategy(capture_gradient_norm=False), precision="bf16-mixed", callbacks=[reader])
    assert reader.kind is MixedPrecision
    assert (replay.report.norm_replays, replay.report.norm_native) == (0, {})
    assert replay.report.steps_replayed == STEPS - 2


@pytest.mark.parametrize("fail", [False, True])
def test_a_plugin_is_given_back_as_it_was(fail):
    class Failing(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if fail and batch_idx == STEPS - 3:
                raise KeyError("mine")

    plugin, strategy, reader = MixedPrecision("bf16-mixed", "cpu"), make_strategy(), Reader()
    before = dict(vars(plugin))
    with pytest.raises(KeyError, match="mine") if fail else contextlib.nullcontext():
        fit(strategy, plugin, callbacks=[reader, Failing()])
    assert reader.kind is not MixedPrecision
    assert issubclass(reader.kind, MixedPrecision)
    assert (type(plugin), vars(plugin)) == (MixedPrecision, before)
    assert strategy.report().norm_replays > 0
    assert not strategy._clipper.is_engaged


def test_norms_can_be_read_and_kept():
    reader = Reader()
    strategy = make_strategy()
    fit(strategy, callbacks=[reader])
    native = Norms()
    fit(callbacks=[native])
    assert_same(native.norms, reader.norms)
    assert_same(native.norms[-1], strategy.last_gradient_norm)
    assert strategy.report().norm_replays > 0


class Norms(Callback):
    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]))


def test_a_copy_of_an_attached_plugin_is_native():
    plugin, clipper = MixedPrecision("bf16-mixed", "cpu"), NormClipper("tape")
    assert attach(plugin, clipper) is None
    assert isinstance(plugin, ReplayClipMixin)
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert type(other) is MixedPrecision
        assert set(vars(other)) == {"precision", "device", "scaler"}
    detach(plugin)
    detach(plugin)
    assert type(plugin) is MixedPrecision


def test_a_plugin_of_ours_under_the_strategy():
    plugin = make_plugin("bf16-mixed")
    replay = fit(make_strategy, plugin)
    compare(fit(precision="bf16-mixed"), replay)
    assert replay.report.norm_replays == plugin.norm_replays == STEPS - 5
    assert replay.report.norm_copied == 0


def test_a_plugin_of_ours_counts_each_fit_of_a_strategy_once():
    class WithoutOptimizer(MLPModule):
        def configure_optimizers(self):
            raise ValueError("an error of the user's own")

    plugin, strategy = make_plugin(), make_strategy()
    for _ in range(2):
        fit(strategy, plugin)
    fit(strategy, plugin, gradient_clip_val=None)
    with pytest.raises(ValueError, match="the user's own"):
        fit(strategy, plugin, module=lambda: WithoutOptimizer(width=8, features=4))
    report = strategy.report()
    assert plugin.norm_replays == report.norm_replays == 2 * (STEPS - 5)
    assert plugin.norm_native == report.norm_native
    assert report.norm_native == {Reason.WARM_UP: 2 * 4, Reason.RECORDING: 2, Reason.NORM_NO_LIMIT: STEPS}


def test_a_copy_of_a_plugin_of_ours_under_the_strategy_has_its_own_options():
    plugin, clipper = ReplayPrecision(backend="auto"), NormClipper("tape", patience=COPY_CALLS + 1)
    attach(plugin, clipper)
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert other._replay_clipper.backend == "auto"
        assert other._replay_clipper.patience == COPY_CALLS
    assert plugin._replay_clipper is clipper


def test_recordings_are_released():
    references = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            recordings = trainer.precision_plugin._replay_clipper._recordings.values()
            references.extend(weakref.ref(recording.owner) for recording in recordings)

    strategy, plugin = make_strategy(), make_plugin()
    fit(strategy, callbacks=[Watch()])
    fit(plugin=plugin, callbacks=[Watch()])
    gc.collect()
    assert len(references) >= STEPS - 5 + ON_COPIES
    assert all(reference() is None for reference in references)


# -- a life with changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_a_limit_changed_in_mid_run(arm):
    class Changing(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainer.gradient_clip_val = [0.5, 0.01, 3][batch_idx % 3]

    plugin = make_plugin() if arm == "plugin" else None
    replay = fit(make_strategy if plugin is None else "auto", plugin, callbacks=[Changing()])
    compare(fit(callbacks=[Changing()]), replay)
    assert (plugin.norm_replays if plugin else replay.report.norm_replays) == (ON_COPIES if plugin else STEPS - 5)


def test_two_fits_with_different_limits():
    strategy, plugin = make_strategy(), make_plugin()
    for number, limit in enumerate((1.0, 0.05), 1):
        native = fit(gradient_clip_val=limit)
        compare(native, fit(strategy, gradient_clip_val=limit))
        compare(native, fit(plugin=plugin, gradient_clip_val=limit))
        assert plugin.norm_replays == number * ON_COPIES
        assert strategy.report().norm_replays == number * (STEPS - 5)


def test_a_trainer_can_fit_again_and_save_afterwards(tmp_path):
    strategy = make_strategy()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=8, gradient_clip_val=1.0,
        plugins=[MixedPrecision("16-mixed", "cpu")], **options,
    )  # fmt: skip
    trainer.fit(make_module(), make_data()[0])
    assert type(trainer.precision_plugin) is MixedPrecision
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert "MixedPrecision" in torch.load(tmp_path / "after.ckpt", weights_only=False)
    trainer.fit_loop.epoch_loop.max_steps = 16
    trainer.fit(make_module(), make_data()[0])
    assert strategy.report().steps_total == 16
    assert strategy.report().norm_replays == 2 * 3
    other = Trainer(strategy=strategy, accelerator="cpu", precision="64-true", max_steps=4, **options)
    other.fit(make_module(), make_data()[0])
    assert strategy.precision_plugin is other.precision_plugin
    assert type(other.precision_plugin) is DoublePrecision


@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_accumulation_clips_on_stepping_batches_alone(arm):
    plugin = make_plugin() if arm == "plugin" else None
    options = {"accumulate_grad_batches": 2, "max_steps": 10, "data": lambda: make_data(20)}
    replay = fit(make_strategy if plugin is None else "auto", plugin, **options)
    compare(fit(**options), replay)
    replays, native = (
        (plugin.norm_replays, plugin.norm_native) if plugin else (replay.report.norm_replays, replay.report.norm_native)
    )
    assert replays >= 3
    assert replays + sum(native.values()) == 10


class Overflowing(Callback):
    """Makes the gradients of one step infinite, as a scale that is too large does."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.fit_loop.epoch_loop.batch_idx == 9:
            next(pl_module.parameters()).grad[0, 0] = float("inf")


@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_an_overflow_skips_the_update_as_native(arm):
    plugin = make_plugin("16-mixed") if arm == "plugin" else None
    options = {"accumulate_grad_batches": 1, "callbacks": [Overflowing()]}
    native = fit(precision="16-mixed", **options)
    replay = fit(make_strategy if plugin is None else "auto", plugin, precision="16-mixed", **options)
    compare(native, replay)
    assert native.scaler["scale"] < fit(precision="16-mixed").scaler["scale"]
    assert (plugin.norm_replays if plugin else replay.report.norm_replays) == (ON_COPIES if plugin else STEPS - 5)


@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_a_later_model_with_an_optimizer_of_its_own(arm):
    class Other(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    plugin, strategy = make_plugin(), make_strategy()
    given = {"plugin": plugin} if arm == "plugin" else {"strategy": strategy}
    fit(**given)
    compare(fit(module=Other), fit(module=Other, **given))
    assert (plugin.norm_replays if arm == "plugin" else strategy.report().norm_replays) == 2 * (
        ON_COPIES if arm == "plugin" else STEPS - 5
    )


# -- native routes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_clipping_by_value_is_native(arm):
    plugin = make_plugin() if arm == "plugin" else None
    options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}
    native = fit(**options)
    if plugin is not None:
        with pytest.warns(ReplayWarning, match="norm_value"):
            replay = fit(plugin=plugin, **options)
    else:
        replay = fit(make_strategy, **options)
    compare(native, replay)
    counts = plugin.norm_native if plugin else replay.report.norm_native
    assert counts == {Reason.NORM_VALUE: STEPS}


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_without_a_limit_there_is_nothing_to_clip_or_say(limit):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        replay = fit(make_strategy, gradient_clip_val=limit)
    compare(fit(gradient_clip_val=limit), replay)
    assert (replay.report.norm_replays, replay.report.norm_native) == (0, {Reason.NORM_NO_LIMIT: STEPS})
    assert "gradient norm" not in str(replay.report)
    assert replay.report.steps_replayed == STEPS - 2


def test_a_plugin_without_a_limit_says_so_once():
    plugin = make_plugin()
    with pytest.warns(ReplayWarning, match="norm_no_limit") as caught:
        fit(plugin=plugin, gradient_clip_val=None)
    assert [str(warning.message).count("all 12 clippings") for warning in caught] == [1]
    assert plugin.norm_native == {Reason.NORM_NO_LIMIT: STEPS}


def test_a_ragged_batch_between_replays_is_harmless():
    def ragged():
        batches = [(x[:2], y[:2]) if i == 5 else (x, y) for i, (x, y) in enumerate(feature_batches(4, 4, count=6))]
        return cycled(batches, 6)

    options = {"data": ragged, "max_steps": 18, "max_epochs": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        replay = fit(make_strategy, **options)
    compare(fit(**options), replay)
    report = replay.report
    assert report.reasons[Reason.LAST_BATCH] == 3
    assert report.norm_native[Reason.NORM_MOVED] == 3
    assert Reason.NORM_DRIFT not in report.norm_native
    assert "to do:    Nothing" in report.norm_messages[Reason.NORM_MOVED]
    assert report.norm_replays > 0
    assert report.norm_copied == 0


def test_another_set_of_gradients_is_drift_with_a_message():
    class Freezing(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.net[0].weight.requires_grad_(batch_idx not in (7, 8))

    plugin = make_plugin()
    options = {"callbacks": [Freezing()], "max_steps": 16, "data": many}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)  # the run did engage
        replay = fit(plugin=plugin, **options)
    compare(fit(**options), replay)
    assert plugin.norm_native == {Reason.WARM_UP: COPY_CALLS, Reason.RECORDING: 1, Reason.NORM_DRIFT: 2}
    assert f"expected: {len(list(make_module().parameters()))} gradients" in plugin.norm_messages[Reason.NORM_DRIFT]
    assert plugin.norm_replays == 16 - COPY_CALLS - 3


class ClipsItself(MLPModule):
    def __init__(self):
        super().__init__(width=8, features=4)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


class HandsOn(ClipsItself):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("arm", ["plugin", "strategy"])
def test_an_override_that_clips_by_itself_is_native_and_counted_in_every_step(arm, accumulate):
    plugin = make_plugin() if arm == "plugin" else None
    options = {
        "module": ClipsItself,
        "max_steps": 4,
        "accumulate_grad_batches": accumulate,
        "data": lambda: make_data(4 * accumulate),
    }
    with pytest.warns(ReplayWarning, match=r"norm_overridden[^$]*ClipsItself.configure_gradient_clipping") as caught:
        replay = fit("auto" if plugin else make_strategy, plugin, **options)
    assert len(caught) == 1
    compare(fit(**options), replay)
    counts = plugin.norm_native if plugin else replay.report.norm_native
    assert counts == {Reason.NORM_OVERRIDDEN: 4}


class ClipsNowAndThen(ClipsItself):
    """Hands every other clipping on."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step % 2:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_an_override_that_hands_on_now_and_then_is_counted_where_it_does_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)  # the run did engage
        replay = fit(make_strategy, module=ClipsNowAndThen)
    compare(fit(module=ClipsNowAndThen), replay)
    assert replay.report.norm_native[Reason.NORM_OVERRIDDEN] == STEPS // 2
    assert replay.report.norm_replays + sum(replay.report.norm_native.values()) == STEPS
    assert replay.report.norm_replays > 0
    assert "ClipsNowAndThen" in replay.report.norm_messages[Reason.NORM_OVERRIDDEN]


def test_an_override_that_hands_on_is_replayed():
    replay = fit(make_strategy, module=HandsOn)
    compare(fit(module=HandsOn), replay)
    assert replay.report.norm_replays == STEPS - 5


class OwnClipping(MixedPrecision):
    def clip_grad_by_norm(self, optimizer, clip_val):
        super().clip_grad_by_norm(optimizer, clip_val / 3)


def test_a_plugin_that_clips_its_own_way_is_left_alone():
    plugin, reader = OwnClipping("bf16-mixed", "cpu"), Reader()
    reader.on_train_batch_end = lambda trainer, *args: setattr(reader, "kind", type(trainer.precision_plugin))
    with pytest.warns(ReplayWarning, match="norm_precision"):
        replay = fit(make_strategy, plugin, callbacks=[reader])
    compare(fit(plugin=OwnClipping("bf16-mixed", "cpu")), replay)
    assert reader.kind is OwnClipping
    assert replay.report.norm_native == {Reason.NORM_PRECISION: STEPS}


class WithMore(MixedPrecision):
    """A plugin of the user's own that does not touch clipping."""

    def connect(self, model, optimizers, lr_schedulers):
        self.connected = True
        return super().connect(model, optimizers, lr_schedulers)


def test_a_plugin_that_adds_other_things_is_served():
    plugin = WithMore("bf16-mixed", "cpu")
    replay = fit(make_strategy, plugin)
    assert plugin.connected
    assert type(plugin) is WithMore
    assert replay.report.norm_replays == STEPS - 5


def test_an_unknown_lightning_is_native(monkeypatch):
    monkeypatch.setattr("lightning_replay.compat.seams.installed_version", lambda: "99.0")
    plugin = make_plugin()
    with pytest.warns(ReplayWarning, match="unknown_contract") as caught:
        replay = fit(plugin=plugin)
    assert len(caught) == 1
    compare(fit(), replay)
    assert plugin.norm_native == {Reason.UNKNOWN_CONTRACT: STEPS}


def test_an_unknown_lightning_is_said_once_by_the_strategy(monkeypatch):
    monkeypatch.setattr("lightning_replay.compat.seams.installed_version", lambda: "99.0")
    with pytest.warns(ReplayWarning, match="unknown_contract") as caught:
        replay = fit(make_strategy)
    assert len(caught) == 1
    assert replay.report.norm_native == {Reason.UNKNOWN_CONTRACT: STEPS}


def test_a_fused_optimizer_raises_as_native():
    def module():
        return make_module(fused=True)

    for options in ({"precision": "16-mixed"}, {"plugin": make_plugin("16-mixed")}):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(module=module, **options)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(make_strategy, precision="16-mixed", module=module)


def test_conflicting_limits_raise_as_native():
    class Conflict(ClipsItself):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 0.123, gradient_clip_algorithm)

    for given in ({}, {"plugin": make_plugin()}, {"strategy": make_strategy()}):
        with pytest.raises(MisconfigurationException, match="gradient_clip_val"):
            fit(module=Conflict, gradient_clip_val=1.0, **given)


def test_a_cpu_without_a_tape_is_native_and_says_so_once():
    with pytest.warns(ReplayWarning, match="no_cuda") as caught:
        replay = fit(ReplayStrategy)
    assert len(caught) == 1
    plugin = ReplayPrecision("32-true")
    with pytest.warns(ReplayWarning, match="no_cuda") as caught:
        fit(plugin=plugin)
    assert len(caught) == 1
    assert replay.report.norm_native == {Reason.NO_CUDA: STEPS}
    assert plugin.norm_native == {Reason.NO_CUDA: STEPS}


def test_a_strategy_that_ignores_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        replay = fit(lambda: make_strategy(on_native="ignore"), module=ClipsItself)
    assert replay.report.norm_native == {Reason.NORM_OVERRIDDEN: STEPS}
    assert "norm_overridden" in replay.report.as_dict()["norm_messages"]
