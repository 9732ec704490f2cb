# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One traced ``Trainer.fit``: what every step did and what the run left behind, for comparison as bits.

``run_fit`` trains once, ``compare`` holds a native run against a replayed one. A trace also knows what each step *was*
(native, record or replay), so that no comparison can pass with replay silently off.
"""

import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.bits import differences, same_bits
from tests.helpers.digest import Fingerprint, sha256

GradientMode = Literal["sha256", "fingerprint", "copy", "off"]
Loaders = tuple[DataLoader, DataLoader | None]

# What two equal runs have in common. Actions, reports and times are what they differ in.
COMPARED = (
    "outputs",
    "gradients",
    "gradients_at_zero",
    "parameters",
    "buffers",
    "last_gradients",
    "optimizers",
    "schedulers",
    "scaler",
    "metrics",
    "rng",
)


@dataclass
class TraceResult:
    """Everything a traced fit has seen. Tensors stay on the device they were on."""

    actions: list[str | None] = field(default_factory=list)
    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    gradients_at_zero: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    last_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    changed_after_the_step: list[str] = field(default_factory=list)
    nondeterministic: list[str] = field(default_factory=list)
    report: Any = None
    seconds: float = 0.0

    @property
    def losses(self) -> list[Tensor | None]:
        """The loss of each step, as ``on_train_batch_end`` was given it."""
        return [step.get("loss") for step in self.outputs]

    @property
    def full_size_steps(self) -> list[int]:
        """The steps whose batch had the most frequent shapes: all but a ragged last batch."""
        if not self.shapes:
            return []
        (usual, _), *_ = Counter(self.shapes).most_common(1)
        return [step for step, shapes in enumerate(self.shapes) if shapes == usual]

    @property
    def full_size_actions(self) -> list[str | None]:
        """The action script of the full-size steps alone."""
        return [self.actions[step] for step in self.full_size_steps]


class Trace(Callback):
    """Fills a ``TraceResult`` while a Trainer fits.

    Args:
        gradients: how the gradients seen by ``on_before_optimizer_step`` are kept. "copy" (CPU clones) names the first
            differing element; "sha256" keeps 32 bytes a tensor; "fingerprint" hashes on the device and reads nothing
            back before the run ends; "off" looks at none.
    """

    def __init__(self, gradients: GradientMode = "sha256") -> None:
        self.result = TraceResult()
        self._mode = gradients
        self._gradients = _GradientLog(gradients)
        self._held: list[tuple[str, Tensor, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._gradients.add(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = len(self.result.actions)
        action = getattr(trainer.strategy, "last_action", None)
        self.result.actions.append(None if action is None else str(getattr(action, "value", action)))
        self.result.shapes.append(tuple(tuple(tensor.shape) for tensor in _tensors_in(batch)))
        seen = dict(outputs) if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
        self.result.outputs.append(snapshot(seen))
        # The originals are held as a user would hold them: later steps must not write into them.
        for name, value in seen.items():
            if isinstance(value, Tensor):
                self._held.append((f"outputs.{step}.{name}", value, value.detach().clone()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        result = self.result
        result.gradients = self._gradients.resolve()
        result.parameters = snapshot(dict(pl_module.named_parameters()))
        result.buffers = snapshot(dict(pl_module.named_buffers()))
        if self._mode != "off":
            result.last_gradients = snapshot({name: p.grad for name, p in pl_module.named_parameters()})
        result.optimizers = [snapshot(optimizer.state_dict()) for optimizer in trainer.optimizers]
        result.schedulers = [snapshot(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        result.scaler = None if scaler is None else snapshot(scaler.state_dict())
        result.metrics = snapshot({**trainer.logged_metrics, **trainer.callback_metrics})
        result.changed_after_the_step = [path for path, held, then in self._held if not same_bits(held, then)]
        self._held.clear()


class ZeroGradTrace(Trace):
    """A trace that also reads every gradient in ``on_before_zero_grad``.

    Lightning calls that hook after the forward of a step, while ``.grad`` still holds the gradients of the step before:
    a forward replay that writes over live gradients shows here and nowhere else. Overriding the hook is what makes a
    callback an observer, hence a class of its own.
    """

    def __init__(self, gradients: GradientMode = "sha256") -> None:
        super().__init__(gradients)
        self._at_zero = _GradientLog(gradients)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._at_zero.add(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.result.gradients_at_zero = self._at_zero.resolve()


class _GradientLog:
    """Keeps the gradients of each step: absent, or dtype, layout and content."""

    def __init__(self, mode: GradientMode) -> None:
        self._mode = mode
        self._fingerprint = Fingerprint()
        self._steps: list[dict[str, Any]] = []
        self._words: list[Tensor] = []

    def add(self, module: LightningModule) -> None:
        if self._mode == "off":
            return
        named = {name: parameter.grad for name, parameter in module.named_parameters()}
        step: dict[str, Any] = {}
        for name, grad in named.items():
            step[name] = None if grad is None else {"is": f"{grad.dtype} {tuple(grad.shape)} {_layout(grad)}"}
            if grad is not None and self._mode == "copy":
                step[name]["values"] = grad.detach().cpu().clone()
            elif grad is not None and self._mode == "sha256":
                step[name]["sha256"] = sha256(grad)
        if self._mode == "fingerprint":
            self._words.append(self._fingerprint([grad for grad in named.values() if grad is not None]))
        self._steps.append(step)

    def resolve(self) -> list[dict[str, Any]]:
        for step, words in zip(self._steps, self._words, strict=False):
            present = [entry for entry in step.values() if entry is not None]
            for entry, (low, high) in zip(present, words.tolist(), strict=True):
                entry["fingerprint"] = f"{low & (1 << 64) - 1:016x}{high & (1 << 64) - 1:016x}"
        self._words.clear()
        return self._steps


def run_fit(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Loaders],
    strategy: str | Strategy | Callable[[], Strategy] = "auto",
    precision: str = "32-true",
    *,
    accelerator: str = "cpu",
    max_steps: int = -1,
    max_epochs: int | None = None,
    seed: int = 7,
    gradient_clip_val: float | None = 1.0,
    accumulate_grad_batches: int = 1,
    trace: Trace | None = None,
    gradients: GradientMode = "sha256",
    callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> TraceResult:
    """Seeds everything, fits a fresh module deterministically and returns its trace.

    Args:
        make_module: called after seeding; gives the module to train.
        make_data: called after seeding; gives the training loader and the validation loader or None.
        strategy: a strategy, its name, or a callable that gives one. "auto" on one device is Lightning's own
            ``SingleDeviceStrategy``, the native arm.
        precision: as the Trainer takes it.
        accelerator: "cpu" or "gpu"; always one device.
        max_steps: optimizer steps to train.
        max_epochs: epochs to train; without it ``max_steps`` alone ends the run.
        seed: for torch, CUDA, NumPy and Python.
        gradient_clip_val: norm to clip to, or None.
        accumulate_grad_batches: batches an optimizer step.
        trace: a trace of the caller's own; else a ``Trace(gradients)``.
        gradients: see ``Trace``.
        callbacks: further callbacks; they run before the trace.
        trainer_options: anything else the Trainer takes.
    """
    trace = Trace(gradients) if trace is None else trace
    with deterministic(), recorded_warnings() as nondeterministic:
        seed_everything(seed, workers=True, verbose=False)
        module = make_module()
        train, validation = make_data()
        options: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **trainer_options,
        }
        trainer = Trainer(
            strategy=strategy if isinstance(strategy, str | Strategy) else strategy(),
            precision=precision,  # type: ignore[arg-type]
            accelerator=accelerator,
            devices=1,
            max_steps=max_steps,
            max_epochs=-1 if max_epochs is None else max_epochs,
            gradient_clip_val=gradient_clip_val,
            accumulate_grad_batches=accumulate_grad_batches,
            deterministic="warn",
            benchmark=False,
            callbacks=[*callbacks, trace],
            **options,
        )
        started = time.perf_counter()
        trainer.fit(module, train, validation)
        # The end of fit moved the module to the host, which waited for the device: no fence is needed.
        trace.result.seconds = time.perf_counter() - started
        trace.result.rng = rng_states()
    report = getattr(trainer.strategy, "report", None)
    trace.result.report = report() if callable(report) else None
    trace.result.nondeterministic = nondeterministic
    return trace.result


def compare(native: TraceResult, replay: TraceResult, sections: Sequence[str] = COMPARED) -> None:
    """Asserts that two runs are equal as bits and that nothing a user held changed after its step.

    Raises:
        AssertionError: with the first difference of every section that has one.
    """
    found = unequal(native, replay, sections)
    if found:
        raise AssertionError("the replayed run is not the native run:\n  " + "\n  ".join(found))


def unequal(native: TraceResult, replay: TraceResult, sections: Sequence[str] = COMPARED) -> list[str]:
    """Returns the first difference of each section that has one; an empty list for equal runs."""
    found = []
    for section in sections:
        first = next(differences(getattr(native, section), getattr(replay, section), section), None)
        if first is not None:
            found.append(first)
    found += [f"{path}: changed after its step" for path in replay.changed_after_the_step]
    return found


def rng_states() -> dict[str, Any]:
    """Returns the state of every global random generator: torch on CPU and CUDA, NumPy and Python."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def snapshot(value: Any) -> Any:
    """Copies a nested structure; tensors are cloned on their device."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms with warnings, no cuDNN benchmark; what was set before is put back."""
    # cuBLAS reads this once, when its first handle is made: a suite on a GPU sets it before CUDA starts as well.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, cudnn_deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn_deterministic


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yields a list that names, at exit, the operations that torch declared nondeterministic.

    These alerts decide how a difference is read, and a run repeats them at every step. Lightning's advice about workers
    and loggers, and a deprecation inside it, are dropped; every other warning is given again, once, after the run.
    """
    alerts: list[str] = []
    others: dict[tuple[type[Warning], str], warnings.WarningMessage] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield alerts
        finally:
            for warning in caught:
                text = str(warning.message)
                if "deterministic" in text:
                    # "NAME does not have a deterministic implementation, ..." or a sentence of the operation's own.
                    operation = text.split(" does not have a deterministic", 1)[0].split(". ", 1)[0]
                    if operation not in alerts:
                        alerts.append(operation)
                elif not (issubclass(warning.category, PossibleUserWarning) or "treespec, LeafSpec" in text):
                    others.setdefault((warning.category, text), warning)
    for warning in others.values():
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides, without those of dimensions of size one, which address nothing."""
    return tuple(stride if size != 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_sections() -> None:
    """A renamed field must not drop out of the comparison unseen."""
    missing = set(COMPARED) - {item.name for item in fields(TraceResult)}
    if missing:
        raise TypeError(f"compared sections that a TraceResult does not have: {sorted(missing)}")


_check_sections()
