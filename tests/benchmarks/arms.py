# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The arms of a comparison: the same fit, run natively, replayed, compiled, or graphed by hand."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy

Arm = tuple["str | Strategy", list[Callback], list[Precision]]


def native(backend: str, precision: str) -> Arm:
    """Lightning as it is."""
    return "auto", [], []


def replay(backend: str, precision: str) -> Arm:
    """One argument: the strategy."""
    from lightning_replay import ReplayStrategy

    return ReplayStrategy(backend=backend, on_native="ignore"), [], []


def replay_step(backend: str, precision: str) -> Arm:
    """The whole of ``training_step`` is recorded, the loss included."""
    from lightning_replay import ReplayStrategy

    return ReplayStrategy(scope="step", backend=backend, on_native="ignore"), [], []


def replay_no_norm(backend: str, precision: str) -> Arm:
    """Steps are replayed, clipping is native."""
    from lightning_replay import ReplayStrategy

    return ReplayStrategy(backend=backend, on_native="ignore", capture_gradient_norm=False), [], []


def replay_cloned(backend: str, precision: str) -> Arm:
    """Steps are replayed, and every live gradient is copied away before each forward pass, which nothing needs."""
    strategy, callbacks, plugins = replay(backend, precision)
    return strategy, [*callbacks, CloneGradients()], plugins


def norm_only(backend: str, precision: str) -> Arm:
    """Steps are native, clipping is replayed."""
    from lightning_replay import ReplayPrecision

    return "auto", [], [ReplayPrecision(precision, backend=backend)]


def graphed_callables(backend: str, precision: str) -> Arm:
    """What a user can do by hand with torch alone: wrap the network in ``make_graphed_callables``."""
    return "auto", [GraphedCallables()], []


def compile_default(backend: str, precision: str) -> Arm:
    """The network compiled, no graphs."""
    return "auto", [Compiled()], []


def compile_reduce_overhead(backend: str, precision: str) -> Arm:
    """The network compiled, its kernels launched by the graphs of torch.compile."""
    return "auto", [Compiled(mode="reduce-overhead")], []


def compile_cudagraphs(backend: str, precision: str) -> Arm:
    """The network's own kernels, launched by the graphs of torch.compile."""
    return "auto", [Compiled(backend="cudagraphs")], []


ARMS: dict[str, Callable[[str, str], Arm]] = {
    "native": native,
    "replay": replay,
    "graphed_callables": graphed_callables,
    "replay_no_norm": replay_no_norm,
    "replay_no_clip": replay,
    "norm_only": norm_only,
    "replay_cloned": replay_cloned,
    "replay_step": replay_step,
    "compile_default": compile_default,
    "compile_reduce_overhead": compile_reduce_overhead,
    "compile_cudagraphs": compile_cudagraphs,
}
FULL_ITERATION = "full_iteration"
"""The one arm without a Trainer: tests.benchmarks.full_iteration."""
NAMES = (*ARMS, FULL_ITERATION)
USUAL_ARMS = ("native", "replay", "graphed_callables")
NETWORK_ARMS = frozenset({"graphed_callables", "compile_default", "compile_reduce_overhead", "compile_cudagraphs"})
UNCLIPPED_ARMS = frozenset({"replay_no_clip"})
NORM_ARMS = frozenset({"replay", "replay_step", "replay_cloned", "norm_only"})


class CloneGradients(Callback):
    """Moves each live gradient into a tensor of its own, one by one."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


class Compiled(Callback):
    """Compiles ``module.net`` in place, with the arguments of torch.compile."""

    def __init__(self, **how: Any) -> None:
        self.how = how

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.net.compile(**self.how)


class ClipFused(Callback):
    """Lets Lightning clip what a fused optimizer updates.

    ``MixedPrecision`` refuses any optimizer that says it can unscale gradients itself. Without a gradient scaler
    nothing else asks, so an optimizer that denies it trains as before, and every arm clips in its own way.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise RuntimeError("with a gradient scaler a fused optimizer unscales by itself, after clipping")
        for optimizer in trainer.optimizers:
            optimizer._step_supports_amp_scaling = False


class GraphedCallables(Callback):
    """Graphs ``module.net`` in place once it is on its device."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type != "cuda":
            raise RuntimeError("torch.cuda.make_graphed_callables needs a CUDA device")
        inputs, _ = trainer.train_dataloader.dataset[0]
        sample = inputs.to(pl_module.device).clone()
        with _autocast(trainer.precision):
            torch.cuda.make_graphed_callables(pl_module.net, (sample,))


def _autocast(precision: Any) -> AbstractContextManager[Any]:
    """Capture under autocast must do without the weight cache: cached casts would be read from outside the graph."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype, cache_enabled=False)
