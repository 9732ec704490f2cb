# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One fresh process of one arm: fits each workload once and writes raw numbers. Started by step_time."""

import argparse
import contextlib
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from tests.benchmarks import full_iteration
from tests.benchmarks.arms import ARMS, FULL_ITERATION, NAMES, UNCLIPPED_ARMS, ClipFused
from tests.benchmarks.clock import HostTimes, StepClock, fence, time_host
from tests.benchmarks.spans import Spans
from tests.benchmarks.workloads import USUAL, WORKLOADS
from tests.helpers.digest import sha256
from tests.helpers.models import cycled
from tests.helpers.parity import plain


def main(words: Sequence[str]) -> None:
    options = parser().parse_args(words)
    if cores := os.environ.get("LIGHTNING_REPLAY_CORES"):
        own = [*map(int, cores.split(","))]
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))
    # Advice at every fit would only bury errors.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cudnn.benchmark = False
    if options.device == "cuda":
        torch.zeros(1, device="cuda")  # context creation is the process's, not the first workload's
    runs = [_attempt(options, model) for model in options.models]
    Path(options.out).write_text(json.dumps(runs))


def parser() -> argparse.ArgumentParser:
    """The options that step_time hands on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=NAMES, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--epochs",
        type=int,
        default=0,
        help="of a complete fit: strictly deterministic, validated after each epoch, a checkpoint at its end; 0: one"
        " epoch of steps and nothing else",
    )
    parser.add_argument("--spans", choices=["none", "all"], default="none", help="clocks around the parts of a step")
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(USUAL))
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--skip", type=int, default=15, help="steps before the first window")
    parser.add_argument("--window", type=int, default=20, help="steps a window")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches an update")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm to clip to; 0 clips nothing")
    parser.add_argument("--update", choices=["fused", "foreach"], default="foreach", help="AdamW implementation")
    parser.add_argument(
        "--log", nargs="?", choices=["nothing", "loss"], const="loss", default="nothing", help="what each step logs"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["auto", "cuda", "tape"], default="auto", help="of the replay arm")


def _attempt(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """One workload that fails must not cost the others of its process."""
    try:
        return {"model": model, **_fit(options, model)}
    except Exception as error:
        traceback.print_exc()
        return {"model": model, "error": f"{type(error).__name__}: {error}"}


def _logging(module: LightningModule) -> None:
    """Makes each step of a module log its loss."""

    class Logging(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    module.__class__ = Logging


def _norm_replays(trainer: Trainer) -> int:
    if plugin := getattr(trainer.precision_plugin, "norm_replays", 0):
        return int(plugin)
    report = getattr(trainer.strategy, "report", None)
    return int(report().norm_replays) if callable(report) else 0


def _fit(options: argparse.Namespace, model: str) -> dict[str, Any]:
    device = torch.device(options.device)
    workload = WORKLOADS[model]
    seed_everything(options.seed, workers=True, verbose=False)
    gc.collect()
    module = workload.make_module(options.update == "fused")
    loader, _ = cycled(workload.make_batches(), options.steps, device)
    validation = workload.make_validation() if options.epochs else ()
    held_out, _ = cycled(validation, len(validation), device)
    memory: dict[str, int] = {}
    if device.type == "cuda":
        # Peaks are counted from here: batches on the device, the module not yet.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        memory = {
            "allocated_before_bytes": torch.cuda.memory_allocated(),
            "reserved_before_bytes": torch.cuda.memory_reserved(),
        }
    fence(device)
    started = time.perf_counter()
    clock = StepClock(options.skip, options.window)
    if options.arm == FULL_ITERATION:
        full_iteration.train(module, loader, options.precision, options.clip, clock)
        of_lightning = {}
    else:
        of_lightning = _fit_lightning(options, module, loader, held_out, clock)
    fence(device)
    seconds = time.perf_counter() - started
    parameters = list(module.parameters())
    return {
        "windows_ms": clock.windows_ms,
        "timed_actions": clock.timed_actions,
        "fit_seconds": seconds,
        "last_loss": float(clock.losses[-1]).hex() if clock.losses else None,
        "losses_sha256": sha256(torch.stack(clock.losses)) if clock.losses else None,
        "weights_sha256": sha256(torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])),
        "parameters": len(parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        **memory,
        **clock.peaks,
        **of_lightning,
    }


def _fit_lightning(
    options: argparse.Namespace, module: LightningModule, loader: DataLoader, held_out: DataLoader, clock: StepClock
) -> dict[str, Any]:
    """Fits with a Trainer and returns what only such a fit can tell."""
    if options.log == "loss":
        _logging(module)
    times = time_host(module)
    spans = Spans()
    strategy, callbacks, plugins = ARMS[options.arm](options.backend, options.precision)
    if options.update == "fused":
        callbacks = [*callbacks, ClipFused()]
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        precision=None if plugins else options.precision,
        plugins=plugins or None,
        max_epochs=options.epochs or 1,
        deterministic=bool(options.epochs),
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=None if options.arm in UNCLIPPED_ARMS else options.clip or None,
        benchmark=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, clock, *([spans] if options.spans == "all" else [])],
    )
    with spans.measuring() if options.spans == "all" else contextlib.nullcontext():
        trainer.fit(module, loader, held_out if len(held_out) else None)
    if options.epochs:
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder) / "last.ckpt")
    report = getattr(trainer.strategy, "report", None)
    return {
        **_host(times, options.skip),
        "spans_us": spans.medians_us(options.skip) if spans.steps else None,
        "norm_replays": _norm_replays(trainer),
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "report": plain(report().as_dict()) if callable(report) else None,
    }


def _host(times: HostTimes, skip: int) -> dict[str, float | None]:
    """Medians of what clipping and update cost the host, the first ones left out."""
    kept = {"clip_host_ms": times.clip[skip:], "update_host_ms": times.update[skip:]}
    return {name: statistics.median(values) if values else None for name, values in kept.items()}
