# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What differs between Lightning releases, or must not: hook order, gradients in reach, autocast cache, checkpoints."""

import inspect
from functools import partial

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayStrategy
from lightning_replay.compat import load_contract
from tests.helpers.bits import assert_same, bits, same_bits
from tests.helpers.trace import compare, run_fit

pytestmark = pytest.mark.matrix

FACTS = load_contract(lightning.__version__).facts
BATCHES = 8


def make_data():
    return DataLoader(TensorDataset(torch.randn(4 * BATCHES, 6)), batch_size=4), None


def make_strategy():
    return ReplayStrategy(backend="tape", warmup_steps=2)


class Net(LightningModule):
    """A network whose middle layer is used several times, so that its gradient is a sum."""

    def __init__(self, uses=1):
        super().__init__()
        self.uses = uses
        self.cache_flags = []
        self.first, self.tied, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.net = Body(self)

    def training_step(self, batch, batch_idx):
        self.cache_flags.append(torch.is_autocast_cache_enabled())
        loss = self.net(batch[0]).float().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Body(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.uses, self.first, self.tied, self.last = owner.uses, owner.first, owner.tied, owner.last

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        for _ in range(self.uses):
            hidden = self.tied(hidden).tanh()
        return self.last(hidden)


# -- hooks

HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
]


def watch(log, who, hook, module):
    grads = [parameter.grad for parameter in module.parameters()]
    sums = [None if grad is None else bits(grad.sum()).item() for grad in grads]
    log.append((who, hook, sums))


class WatchedNet(Net):
    """Writes down each of its hooks with the gradients in reach at that moment, as bits."""

    def __init__(self, log):
        super().__init__(uses=2)
        self.watched = log

    def configure_gradient_clipping(self, *args, **kwargs):
        watch(self.watched, "module", "configure_gradient_clipping", self)
        super().configure_gradient_clipping(*args, **kwargs)

    def optimizer_zero_grad(self, *args):
        watch(self.watched, "module", "optimizer_zero_grad", self)
        super().optimizer_zero_grad(*args)


class WatchingCallback(Callback):
    """The same for the hooks of a callback."""

    def __init__(self, log):
        self.watched = log


def add_hooks():
    def hook_of(name, who):
        def hook(self, *args):
            watch(self.watched, who, name, self if who == "module" else args[1])

        return hook

    for name in HOOKS:
        setattr(WatchedNet, name, hook_of(name, "module"))
        setattr(WatchingCallback, name, hook_of(name, "callback"))


add_hooks()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_hooks_run_in_native_order_and_see_native_gradients(accumulate, precision):
    logs = {}

    def fit(arm, strategy):
        logs[arm] = []
        make_module = partial(WatchedNet, logs[arm])
        options = {"accumulate_grad_batches": accumulate, "callbacks": [WatchingCallback(logs[arm])]}
        return run_fit(make_module, make_data, strategy, precision, max_epochs=1, **options)

    native, ours = fit("native", "auto"), fit("replay", make_strategy)
    assert "replay" in ours.actions
    compare(native, ours)
    assert logs["replay"] == logs["native"]
    names = [hook for who, hook, _ in logs["native"] if who == "callback"]
    assert names.count("on_before_zero_grad") == BATCHES // accumulate
    assert names.count("on_before_backward") == BATCHES
    # Gradients of the step before are alive until zero_grad, and gone right after.
    alive = [sums for who, hook, sums in logs["native"] if (who, hook) == ("callback", "on_before_zero_grad")]
    assert set(alive[0]) == {None}
    assert all(None not in sums for sums in alive[1:])


# -- the autocast cache


def cached_gradients(cache):
    """The gradients of one step outside Lightning, with the weight cache on or off."""
    seed_everything(7, workers=True, verbose=False)
    module = Net(uses=3)
    (batch,) = next(iter(make_data()[0]))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        loss = module.net(batch).float().square().mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_tied_weights_get_the_gradients_of_this_releases_autocast_cache():
    cache = FACTS["autocast_weight_cache"]
    assert not same_bits(cached_gradients(True), cached_gradients(False)), "the cache makes no difference here"

    modules = []

    def make_module():
        modules.append(Net(uses=3))
        return modules[-1]

    def fit(strategy):
        return run_fit(
            make_module, make_data, strategy, "bf16-mixed", max_epochs=1, gradient_clip_val=None, gradients="copy"
        )

    native, ours = fit("auto"), fit(make_strategy)
    assert set(modules[0].cache_flags) == set(modules[1].cache_flags) == {cache}
    seen = {name: grad["values"] for name, grad in native.gradients[0].items()}
    assert_same(cached_gradients(cache), seen)
    assert ours.actions.count("replay") >= BATCHES - 4
    compare(native, ours)


# -- checkpoints


def mixed_fp16():
    """Half-precision autocast with a gradient scaler, on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3))


def train(folder, strategy, steps, resume=None, scaler=False):
    """Train to a number of steps and return the checkpoint then and the strategy."""
    seed_everything(7, workers=True, verbose=False)
    module, (data, _) = Net(uses=2), make_data()
    strategy = strategy() if callable(strategy) else strategy
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        plugins=[mixed_fp16()] if scaler else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=resume)
    path = folder / f"{len(list(folder.iterdir()))}.ckpt"
    trainer.save_checkpoint(path)
    return path, torch.load(path, weights_only=False), strategy


@pytest.mark.filterwarnings("ignore:.*mid-epoch.*")
@pytest.mark.parametrize("scaler", [False, True], ids=["32-true", "16-mixed"])
@pytest.mark.parametrize(("first", "second"), [("native", "replay"), ("replay", "native"), ("replay", "replay")])
def test_checkpoints_are_exchanged_with_native(first, second, scaler, tmp_path):
    arms = {"native": "auto", "replay": make_strategy}
    path, middle, _ = train(tmp_path, arms[first], BATCHES, scaler=scaler)
    native_path, native_middle, _ = train(tmp_path, "auto", BATCHES, scaler=scaler)
    assert list(middle) == list(native_middle)
    assert ("MixedPrecision" in middle) is scaler
    assert_same(native_middle, middle, "checkpoint")

    _, end, strategy = train(tmp_path, arms[second], 2 * BATCHES, resume=path, scaler=scaler)
    _, native_end, _ = train(tmp_path, "auto", 2 * BATCHES, resume=native_path, scaler=scaler)
    assert_same(native_end, end, "checkpoint")
    if scaler:
        assert end["MixedPrecision"]["scale"] != 256.0
    if second == "replay":
        assert strategy.report().steps_replayed > 0


def test_loading_takes_weights_only_where_this_release_has_it():
    parameters = inspect.signature(Strategy.load_checkpoint).parameters
    assert ("weights_only" in parameters) is FACTS["load_checkpoint_weights_only"]
