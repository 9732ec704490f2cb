# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One fresh process of the zoo: fits one model natively and with replay, and judges the runs. Started by zoo."""

import argparse
import gc
import importlib.util
import itertools
import json
import logging
import os
import statistics
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_replay import ReplayStrategy
from lightning_replay.reasons import Reason
from tests.benchmarks.clock import fence
from tests.benchmarks.zoo_models import ZOO
from tests.helpers.models import Cycled
from tests.helpers.trace import TraceResult, recorded_warnings, rng_states, snapshot, unequal

STEPS = 20
TIMED = 10
"""The last steps of a run, whose median time is compared."""

CONTROLS = 4
"""Native runs with deterministic algorithms, at most, that may show native to differ from itself."""

SEED = 7
COMPARED = ("outputs", "last_gradients", "parameters", "buffers", "rng")
HARMLESS = {reason.value for reason in Reason if reason.is_harmless}


def main() -> None:
    options = _parser().parse_args()
    # Advice at every fit would only bury errors.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # cuBLAS reads it once, and the runs with deterministic algorithms come first.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rows: list[dict[str, Any]] = []
    for precision in options.precision:
        rows.append({"model": options.model, "precision": precision, **_attempt(options, precision)})
        # After each: a precision that ends the process must not cost the others.
        Path(options.out).write_text(json.dumps(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=ZOO, required=True)
    parser.add_argument("--out", required=True)
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", nargs="+", default=["bf16-mixed", "32-true"])
    parser.add_argument("--pixels", type=int, default=64, help="size of images")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["auto", "cuda", "tape"], default="auto", help="of the replay arm")


def _attempt(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    package = ZOO[options.model].package
    if package is not None and importlib.util.find_spec(package) is None:
        return {"not_run": f"{package} is not installed"}
    started = time.perf_counter()
    try:
        row = _judge(options, precision)
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def _judge(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Runs all arms of one model and precision."""

    def fit(replay: bool, deterministic: bool | str) -> "Watch":
        return _fit(options, precision, replay, deterministic)

    deterministic: bool | str = True
    try:
        native = fit(False, deterministic)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        deterministic = "warn"
        native = fit(False, deterministic)
    replay = fit(True, deterministic)
    # What repeats itself by construction is tried again only if replay differs; several times, as torch knows of no
    # deterministic way for some operations, and they may come out alike.
    control = None
    if unequal(native.result, replay.result, COMPARED):
        controls = (fit(False, deterministic) for _ in range(CONTROLS))
        control = next((c for c in controls if unequal(native.result, c.result, COMPARED)), native)
    strict = _compared(native, replay, control)
    free_native, free_replay = fit(False, False), fit(True, False)
    free = _compared(free_native, free_replay, fit(False, False))
    report = free_replay.result.report.as_dict()
    replayed = {recording["region"] for recording in report["recordings"] if recording["replays"]}
    needing_cure = {reason: count for reason, count in report["reasons"].items() if reason not in HARMLESS}
    return {
        "replayed": "whole network" if "net" in replayed else "some regions" if replayed else "nothing",
        "regions": sorted(replayed),
        "reasons": report["reasons"],
        "reasons_needing_cure": needing_cure,
        "messages": {reason: report["messages"][reason] for reason in needing_cure},
        "deterministic": {"mode": deterministic, "alerts": native.result.nondeterministic, **strict},
        "free": free,
        "native_ms": free_native.median_ms,
        "replay_ms": free_replay.median_ms,
        "speed_up": free_native.median_ms / free_replay.median_ms,
    }


def _compared(native: "Watch", replay: "Watch", control: "Watch | None") -> dict[str, Any]:
    """Holds replay against native, and native against itself if there is a second native run."""
    differences = unequal(native.result, replay.result, COMPARED)
    control_differences = unequal(native.result, control.result, COMPARED) if control is not None else []
    recordings = replay.result.report.as_dict()["recordings"]
    nondeterministic = sorted({r["region"] for r in recordings if r["certified"] == "nondeterministic"})
    if not differences:
        verdict = "equal"
    elif control_differences:
        verdict = "native differs from itself"
    elif nondeterministic:
        verdict = "reported as exact up to native nondeterminism"
    else:
        verdict = "different"
    return {
        "verdict": verdict,
        "native_repeats_itself": None if control is None else not control_differences,
        "differences": differences,
        "reported_nondeterministic": nondeterministic,
        "steps": len(replay.result.actions),
        "steps_replayed": replay.result.actions.count("replay"),
        "actions": replay.result.actions,
    }


def _fit(options: argparse.Namespace, precision: str, replay: bool, deterministic: Any) -> "Watch":
    device = torch.device(options.device)
    gc.collect()
    seed_everything(SEED, workers=True, verbose=False)
    model = ZOO[options.model]
    module = model.module(options.pixels)
    batches = move_data_to_device(model.batches(options.pixels), device)
    watch = Watch(device)
    strategy = ReplayStrategy(scope="network", backend=options.backend, on_native="ignore") if replay else "auto"
    with recorded_warnings() as alerts:
        trainer = Trainer(
            strategy=strategy,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision=precision,  # type: ignore[arg-type]
            max_epochs=1,
            deterministic=deterministic,
            benchmark=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[watch],
        )
        trainer.fit(module, DataLoader(Cycled(batches, STEPS), batch_size=None, collate_fn=_as_it_is))
    watch.result.rng = rng_states()
    watch.result.nondeterministic = alerts
    if replay:
        watch.result.report = trainer.strategy.report()
    return watch


def _as_it_is(batch: Any) -> Any:
    return batch


class Watch(Callback):
    """Keeps what is compared, and the time from the end of each step to the end of the next, fenced.

    Args:
        device: where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self.result = TraceResult()
        self._device = device
        self._ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fence(self._device)
        self._ends.append(time.perf_counter())
        self.result.actions.append(getattr(trainer.strategy, "last_action", None))
        self.result.outputs.append({"loss": outputs["loss"].detach().clone()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = dict(pl_module.named_parameters())
        self.result.parameters = snapshot(named)
        self.result.buffers = snapshot(dict(pl_module.named_buffers()))
        self.result.last_gradients = snapshot({name: parameter.grad for name, parameter in named.items()})

    @property
    def median_ms(self) -> float:
        """The median time of the last steps."""
        last = self._ends[-TIMED - 1 :]
        return statistics.median((end - start) * 1e3 for start, end in itertools.pairwise(last))


if __name__ == "__main__":
    main()
