# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One fresh process of one arm: fits each workload once and writes raw numbers. Started by step_time."""

import argparse
import gc
import json
import logging
import statistics
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from tests.benchmarks.arms import ARMS, UNCLIPPED_ARMS
from tests.benchmarks.clock import StepClock, fence, time_clipping
from tests.benchmarks.workloads import USUAL, WORKLOADS
from tests.helpers.digest import sha256
from tests.helpers.models import cycled
from tests.helpers.parity import plain


def main() -> None:
    options = parser().parse_args()
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
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--out", required=True)
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


def _clip_for_fused(
    module: LightningModule,
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """What a user writes to clip with a fused optimizer under bf16-mixed, which Lightning refuses to do itself."""
    if gradient_clip_val:
        torch.nn.utils.clip_grad_norm_(module.parameters(), gradient_clip_val)


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
    if options.update == "fused" and options.precision == "bf16-mixed":
        module.configure_gradient_clipping = partial(_clip_for_fused, module)  # type: ignore[method-assign]
    clippings = time_clipping(module)
    loader, _ = cycled(workload.make_batches(), options.steps, device)
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
    strategy, callbacks, plugins = ARMS[options.arm](options.backend, options.precision)
    clock = StepClock(options.skip, options.window)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision=None if plugins else options.precision,
        plugins=plugins or None,
        max_epochs=1,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=None if options.arm in UNCLIPPED_ARMS else options.clip or None,
        benchmark=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, clock],
    )
    trainer.fit(module, loader)
    fence(device)
    seconds = time.perf_counter() - started
    report = getattr(trainer.strategy, "report", None)
    parameters = list(module.parameters())
    return {
        "windows_ms": clock.windows_ms,
        "timed_actions": clock.timed_actions,
        "clip_host_ms": statistics.median(clippings[options.skip :]) if clippings[options.skip :] else None,
        "norm_replays": _norm_replays(trainer),
        "fit_seconds": seconds,
        "last_loss": float(clock.losses[-1]).hex() if clock.losses else None,
        "losses_sha256": sha256(torch.stack(clock.losses)) if clock.losses else None,
        "weights_sha256": sha256(torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])),
        "parameters": len(parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        **memory,
        **clock.peaks,
        "report": plain(report().as_dict()) if callable(report) else None,
    }


if __name__ == "__main__":
    main()
