# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A long fit in which much changes, natively and with replay side by side: equal in the end, and no memory is lost.

    python -m tests.benchmarks.soak --steps 20000 --out docs/evidence/soak.json

A network with BatchNorm and dropout is given images of three sizes in turn, validated and saved now and then, and its
first layers are frozen in every other epoch: six recordings. Without a GPU, ``--device cpu --backend tape --steps 400
--epoch 60`` tries it; memory is not measured then.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_replay import Reason, ReplayStrategy
from tests.benchmarks.receipt import ROOT, command_line, receipt, write
from tests.helpers.digest import sha256
from tests.helpers.models import cycled, image_batches
from tests.helpers.parity import plain
from tests.helpers.trace import rng_states

ARMS = ("native", "replay")
SIZES = (8, 12, 16)
CLASSES = 10
EVERY = 101
"""Steps between two samples of the memory: prime to the number of sizes, so that each size has its turn."""

LEAST_REPLAYED = 0.95


class Net(nn.Module):
    """Some thirty kernels a step, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)).mean(dim=(2, 3)))


class Learner(LightningModule):
    """Freezes the first layers in every other epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def on_train_epoch_start(self) -> None:
        self.net.first.requires_grad_(self.current_epoch % 2 == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Samples(Callback):
    """Keeps the losses, and samples the memory once a while.

    Args:
        steps: of the whole run; the losses have their place from the start, so that keeping them takes no memory.
        device: whose memory is sampled.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.losses = torch.zeros(steps, device=device)
        self.actions: list[str | None] = []
        self.memory: list[dict[str, Any]] = []
        self.validations = 0
        self._device = device

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = len(self.actions)
        self.actions.append(getattr(trainer.strategy, "last_action", None))
        self.losses[step] = outputs["loss"].detach()
        if self._device.type == "cuda" and step % EVERY == 0:
            self.memory.append(
                {
                    "step": step,
                    "recordings": _recordings(trainer),
                    "kind": f"{batch[0].shape[2]} px, epoch {'odd' if trainer.current_epoch % 2 else 'even'}",
                    "allocated_bytes": torch.cuda.memory_allocated(self._device),
                    "reserved_bytes": torch.cuda.memory_reserved(self._device),
                }
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations += 1


def _recordings(trainer: Trainer) -> int:
    """Returns how many recordings were made so far, those of the gradient norm included."""
    if not isinstance(trainer.strategy, ReplayStrategy):
        return 0
    report = trainer.strategy.report()
    return len(report.recordings) + report.norm_native.get(Reason.RECORDING, 0)


def fit(options: argparse.Namespace) -> dict[str, Any]:
    """Runs one arm in this process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    seed_everything(7, workers=True, verbose=False)
    module = Learner()
    # Two batches of each size in turn, different ones, so that a stale input shows.
    batches = [image_batches(8, size, CLASSES, count=1, seed=seed)[0] for seed in range(2) for size in SIZES]
    training, _ = cycled(batches, options.epoch, device)
    validation, _ = cycled(batches[::-1], 3, device)
    samples = Samples(options.steps, device)
    replays = options.arm == "replay"
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, every_n_train_steps=max(1, options.epoch // 2), save_top_k=-1)
        trainer = Trainer(
            strategy=ReplayStrategy(backend=options.backend, on_native="ignore") if replays else "auto",
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_steps=options.steps,
            max_epochs=-1,
            val_check_interval=max(1, options.epoch // 4),
            gradient_clip_val=1.0,
            deterministic=True,
            benchmark=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[saving, samples],
        )
        started = time.perf_counter()
        trainer.fit(module, training, validation)
        seconds = time.perf_counter() - started
        checkpoints = len(list(Path(folder).glob("*.ckpt")))
    state = [tensor.detach().double().flatten().cpu() for tensor in module.state_dict().values()]
    moments = [entry[key].cpu() for entry in trainer.optimizers[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    random = rng_states()
    return {
        "arm": options.arm,
        "steps": len(samples.actions),
        "actions": dict(Counter(str(action) for action in samples.actions)),
        "epochs": trainer.current_epoch,
        "validations": samples.validations,
        "checkpoints": checkpoints,
        "seconds": round(seconds, 1),
        "memory": samples.memory,
        "losses_sha256": sha256(samples.losses),
        "weights_sha256": sha256(torch.cat(state)),
        "moments_sha256": sha256(torch.cat([moment.flatten() for moment in moments])),
        "random_sha256": [sha256(random[name]) for name in ("torch", "cuda") if random[name] is not None],
        "report": plain(trainer.strategy.report().as_dict()) if replays else None,
    }


def settled(run: dict[str, Any]) -> int:
    """Returns the step of the first sample after the last recording."""
    made = max((sample["recordings"] for sample in run["memory"]), default=0)
    return next((sample["step"] for sample in run["memory"] if sample["recordings"] == made), 0)


def growth(run: dict[str, Any], since: int) -> dict[str, int] | None:
    """Returns by how many bytes memory grew from a step on; None without samples.

    What is allocated is compared with the first sample of the same kind. What the allocator reserves is no matter of
    kinds: it is what the largest needed, and is compared with the most that was reserved until each had its turn.
    """
    samples = [sample for sample in run["memory"] if sample["step"] >= since]
    if not samples:
        return None
    first: dict[str, dict[str, int]] = {}
    for sample in samples:
        first.setdefault(sample["kind"], sample)
    allocated = max(sample["allocated_bytes"] - first[sample["kind"]]["allocated_bytes"] for sample in samples)
    all_seen = max(sample["step"] for sample in first.values())
    highest = max(sample["reserved_bytes"] for sample in samples if sample["step"] <= all_seen)
    reserved = max(sample["reserved_bytes"] for sample in samples) - highest
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each arm."""
    done = {run["arm"]: run for run in runs if "error" not in run}
    since = max(map(settled, done.values()), default=0)
    rows = []
    for run in done.values():
        grown = growth(run, since) or {}
        compared = {key for key in run if key.endswith("sha256")}
        equal = len(done) == len(ARMS) and all(run[key] == done["native"][key] for key in compared)
        report = run["report"]
        rows.append(
            {
                "arm": run["arm"],
                "steps": run["steps"],
                "replayed": run["actions"].get("replay", 0),
                "recordings": len(report["recordings"]) if report else 0,
                "validations": run["validations"],
                "checkpoints": run["checkpoints"],
                "memory compared since step": since if run["memory"] else "not measured",
                "allocated grew by, bytes": grown.get("allocated_bytes", "not measured"),
                "reserved grew by, bytes": grown.get("reserved_bytes", "not measured"),
                "seconds": run["seconds"],
                "equal to native": "yes" if equal else "no",
            }
        )
    return rows


def problems(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """Returns what is not as it has to be."""
    found = [f"{run['arm']}: {run['error']}" for run in runs if "error" in run]
    for row in rows:
        if row["equal to native"] != "yes":
            found.append(f"{row['arm']}: not equal to native")
        if row["arm"] == "replay":
            if row["replayed"] < LEAST_REPLAYED * row["steps"]:
                found.append(f"replay: {row['replayed']} of {row['steps']} steps were replayed")
            found += [
                f"replay: {what} {row[what]}"
                for what in ("allocated grew by, bytes", "reserved grew by, bytes")
                if row[what] not in (0, "not measured")
            ]
    return found


def main() -> int:
    options = _parser().parse_args()
    if options.arm:
        Path(options.out).write_text(json.dumps(fit(options)))
        return 0
    with ThreadPoolExecutor(len(ARMS)) as pool:
        runs = list(pool.map(lambda arm: _process(options, arm), ARMS))
    rows = summarise(runs)
    found = problems(runs, rows)
    given = {name: value for name, value in vars(options).items() if name not in ("out", "arm")}
    settings = {
        **given,
        "what": "One long fit with BatchNorm, dropout, images of three sizes in turn, validation, checkpoints, and the"
        " first layers frozen in every other epoch; both arms side by side. Compared as bits: all losses, weights,"
        " buffers, moments of the optimizer, random generators. Memory after the last recording (of the"
        " network, or of the gradient norm, whose tensors change with freezing): the most by which what is"
        " allocated exceeds the first sample of the same size and kind of epoch, and what is reserved the most that was"
        " reserved until each kind had its turn. Not as it has to be:"
        f" {'; '.join(found) or 'nothing'}.",
        "workloads": {},
        "sizes": SIZES,
        "sampled_every": EVERY,
    }
    results = {"runs": runs, "summary": rows, "problems": found}
    write(options.out, receipt("soak", settings, results, command_line("tests.benchmarks.soak")))
    for row in rows:
        print(row)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the receipt to write")
    parser.add_argument("--arm", choices=ARMS, help="run this one here, and write what came of it")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--epoch", type=int, default=1000, help="steps an epoch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["auto", "cuda", "tape"], default="auto", help="of the replay arm")
    return parser


def _process(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "tests.benchmarks.soak", "--arm", arm, "--out", str(out)]
        for name in ("steps", "epoch", "device", "backend"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not out.exists():
            return {"arm": arm, "error": f"the process ended with {done.returncode}"}
        run: dict[str, Any] = json.loads(out.read_text())
        return run


if __name__ == "__main__":
    sys.exit(main())
