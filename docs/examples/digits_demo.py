# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Trains on handwritten digits twice, natively and with ReplayStrategy, and compares the two runs as bits.

    python -m nox -s demo                        on a CUDA device if there is one, else with the tape on the CPU
    python docs/examples/digits_demo.py --help   the same without nox, after python -m pip install . scikit-learn

The exit status is 0 if both runs are equal to the last bit and steps were replayed, and 1 otherwise.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import ReplayReport, ReplayStrategy

TAPE_NOTE = (
    "The tape backend stands in for CUDA graphs where there is no CUDA device. It is slower than native training:\n"
    "what it proves is that both runs are equal, and its times say nothing about CUDA graphs."
)


class DigitsCNN(LightningModule):
    """A small network with BatchNorm (buffers) and dropout (random numbers): both have to be replayed exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)  # the call of self.net is what is recorded and replayed
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def make_loaders() -> tuple[DataLoader, DataLoader]:
    """Returns four fifths of the 1,797 images to train on, and one fifth to validate."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels))
    train, held_out = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=128),
    )


class Watch(Callback):
    """Keeps the loss of every step, how long the step took, and whether it was replayed."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.actions: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = self._now(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seconds.append(self._now(trainer) - self._started)
        self.losses.append(outputs["loss"].detach().clone())
        self.actions.append(getattr(trainer.strategy, "last_action", "native"))

    def _now(self, trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # or we would time how fast work is queued, not how fast it is done
        return time.perf_counter()


@dataclass
class Result:
    """What one training left behind."""

    watch: Watch
    accuracy: float
    tensors: dict[str, dict[str, Any]]


def train(strategy: Any, accelerator: str, epochs: int) -> Result:
    """Trains a fresh network from the same seed as every other call."""
    seed_everything(7, verbose=False)
    model, watch = DigitsCNN(), Watch()
    trainer = Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        deterministic=True,  # without it some CUDA kernels do not even repeat themselves
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, *make_loaders())
    tensors = {
        "losses": dict(enumerate(watch.losses)),
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "optimizer state": flatten(trainer.optimizers[0].state_dict()),
    }
    return Result(watch, float(trainer.callback_metrics["accuracy"]), tensors)


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Lays nested dicts and lists out flat, by dotted path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, item in items for key, leaf in flatten(item, f"{path}.{name}").items()}
    return {path: value}


def same_bits(left: Any, right: Any) -> bool:
    """Compares memory, not values: 0.0 is not -0.0, and a NaN equals the same NaN."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.detach().contiguous().view(integer), right.detach().contiguous().view(integer))


def count_unequal(native: dict[str, Any], replay: dict[str, Any]) -> int:
    """Counts the entries that differ, missing ones included."""
    return sum(
        name not in native or name not in replay or not same_bits(native[name], replay[name])
        for name in native.keys() | replay.keys()
    )


def make_rows(native: Result, replay: Result, report: ReplayReport) -> tuple[list[tuple[str, str]], bool]:
    """Returns the rows of the table, and whether everything is equal."""
    rows = []
    equal = True
    for what, expected in native.tensors.items():
        unequal = count_unequal(expected, replay.tensors[what])
        equal = equal and not unequal
        verdict = f"NOT EQUAL: {unequal} of {len(expected)} differ" if unequal else f"all {len(expected)} equal as bits"
        rows.append((what, verdict))
    rows.append(("accuracy, held-out images", f"native {native.accuracy:.1%}, replay {replay.accuracy:.1%}"))
    rows.append(("steps replayed", f"{report.steps_replayed} of {report.steps_total}"))
    reasons = [f"{count} x {reason.value}: {reason.cause}" for reason, count in report.reasons.items()]
    rows.append(("steps native", "\n".join([str(report.steps_native), *reasons])))
    clippings = f"{report.norm_replays} replayed, {sum(report.norm_native.values())} native"
    rows.append(("gradient clipping", clippings))
    # The same steps in both runs; the first replays are left out, as caches may still be cold.
    steady = [step for step, action in enumerate(replay.watch.actions) if action == "replay"][3:]
    for name, result in (("native", native), ("replay", replay)):
        times = [1000 * result.watch.seconds[step] for step in steady]
        shown = (
            f"{statistics.median(times):.2f} (median of {len(times)} steps)" if times else "no replayed steps to time"
        )
        rows.append((f"ms a step, {name}", shown))
    return rows, equal


def show(title: str, rows: list[tuple[str, str]]) -> None:
    """Prints a table, with rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        width = max(len(name) for name, _ in rows)
        print(f"\n{title}\n")
        for name, text in rows:
            print(f"{name:<{width}}  {text}".replace("\n", "\n" + " " * (width + 2)))
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    Console().print("", table)


def be_quiet() -> None:
    """Leaves the progress bar and this package's own warnings, and hides Lightning's advice."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for advice in (".*does not have many workers", ".*is smaller than the logging interval", ".*LeafSpec"):
        warnings.filterwarnings("ignore", message=advice)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--backend",
        choices=["cuda", "tape", "native"],
        default="cuda" if torch.cuda.is_available() else "tape",
        help="cuda: CUDA graphs; tape: the stand-in on the CPU; native: replay nothing, to see this script fail",
    )
    options = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)  # so small a network gains nothing from more
    accelerator = "gpu" if options.backend == "cuda" else "cpu"
    # On a CPU, backend="auto" leaves everything native.
    strategy = ReplayStrategy(backend="auto" if options.backend == "native" else options.backend)

    print(f"Training natively, {options.epochs} epochs")
    native = train("auto", accelerator, options.epochs)
    print(f"Training the same with ReplayStrategy, {options.epochs} epochs")
    replay = train(strategy, accelerator, options.epochs)

    report = strategy.report()
    rows, equal = make_rows(native, replay, report)
    show(f"Native and replayed training, backend {options.backend}", rows)
    if options.backend == "tape":
        print(TAPE_NOTE)
    if equal and report.steps_replayed:
        print("Equal to the last bit.")
        return 0
    print("FAILED: the runs differ." if not equal else "FAILED: nothing was replayed.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
