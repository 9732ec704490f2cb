# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""`training_step` as one region.

Note [a step as a region]
    The region's arguments are the batch, its results what `training_step` returned and the values it logged. Its run
    enters the precision plugin's context, so autocast lies inside of the recording. Of what else a step can reach:

    the module        is guarded, as any region's module is
    the batch's index must not be used (decided from the code)
    the Trainer       is replaced by a stand-in that notices reads, while a step is observed
    metrics           are updated by a replay too (metrics.py)
    self.log          is learnt while a step is observed, part of the trace, and done again on each replay with the
                      values of the replay
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_replay.dispatch import Region
from lightning_replay.effects import user_line
from lightning_replay.engine.interposition import Shadowed, Standing
from lightning_replay.errors import CaptureError
from lightning_replay.guards.module import is_moving
from lightning_replay.guards.parameters import find_use
from lightning_replay.inspection import handing_out
from lightning_replay.metrics import Outcome, StepMetrics
from lightning_replay.reasons import Finding, Reason
from lightning_replay.runner import Runner
from lightning_replay.runner.modules import is_compiled

NAME = "training_step"

PATIENCE = 5
"""New signatures in a row after which steps are left to their networks: names or ids in a batch never repeat."""

_OWN = frozenset({"_trainer", "_fabric", "_current_fx_name", "_metric_attributes"})
"""Attributes by which Lightning connects a module to the Trainer and to its log."""

_FIXED = frozenset(
    {"global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes", "is_global_zero"}
    | {"training", "evaluating", "validating", "testing", "predicting", "sanity_checking"}
)
"""What a Trainer never changes during a fit, and what is the same in all of its training steps."""


class WholeStep:
    """Runs training steps as one region.

    Args:
        module: The LightningModule.
        runner: Records and replays.
        native: The strategy's own training step: takes the arguments of `training_step`.
        on_finding: Called when a step cannot be recorded as a whole.
    """

    def __init__(
        self,
        module: LightningModule,
        runner: Runner,
        native: Callable[..., Any],
        on_finding: Callable[[Finding], None],
    ) -> None:
        self._module = module
        self._runner = runner
        self._native = native
        self._on_finding = on_finding
        self._modules = [child for child in module.modules() if isinstance(child, LightningModule)]
        self._metrics = StepMetrics(module)
        self._log_calls: list[LogCall] = []
        self._others: tuple[Any, ...] = ()
        self._ran = False
        self._live = True
        self._inside = False
        self.region = Region(
            NAME,
            module,
            self._run,
            path="",
            entry=_plain_function(module),
            again=self._run_again,
            max_new_signatures=PATIENCE,
            ignored={**dict.fromkeys(map(id, self._modules), _OWN), **self._metrics.ignored()},
            find_read=self._metrics.find_read,
        )
        runner.regions.append(self.region)
        self._reason = self._find_reason()

    def _find_reason(self) -> Finding | None:
        """Finds what can be told before any step."""
        function = _plain_function(self._module)
        if function is None:
            actual = f"{type(self._module).training_step!r}, or one set on the object"
            return Finding(Reason.REPLACED_FORWARD, NAME, "a method of the class", actual)
        if (line := find_use(type(self._module), function, 2)) is not None:
            return Finding(Reason.BATCH_INDEX, line, "a step that depends on its batch alone", "its index is used")
        if is_compiled(self._module):
            return Finding(Reason.COMPILED_MODULE, NAME, "operations that can be watched", "a compiled module")
        return None

    def _find_replaced(self) -> Finding | None:
        """Finds another training step than the one whose code was looked at, on the object or on its class."""
        if _plain_function(self._module) is self.region.entry:
            return None
        actual = f"{self._module.training_step!r}"
        return Finding(Reason.REPLACED_FORWARD, NAME, "the method of the class, as in the first step", actual)

    def run_step(self, args: tuple[Any, ...], counts: bool, otherwise: Callable[[], Any]) -> tuple[bool, Any]:
        """Runs a training step.

        Args:
            args: The arguments of `training_step`: the batch, then its index where the method takes one.
            counts: Whether the step counts towards a new recording.
            otherwise: Runs the step if it is not to be recorded as a whole.

        Returns:
            Whether the step ran as a whole, and what `training_step` returned.
        """
        if (reason := self._reason or self._find_replaced()) is not None:
            self._on_finding(reason)
            return False, otherwise()
        batch, self._others = args[0], args[1:]
        self._ran = False
        whole, outcome = self._runner.run_call(self.region, (batch, self._metrics.states()), counts, otherwise)
        if not whole:
            return False, outcome
        result, logged, metrics = outcome
        if not self._ran:
            for position, value in logged:
                self._log_calls[position].again(value)
            self._metrics.adopt(metrics)
        return True, result

    def _run(self, batch: Any, states: list[Tensor]) -> tuple[Any, list[tuple[int, Any]], Outcome]:
        """Runs the step natively: it trains, logs, and updates the metrics' own states."""
        self._live = self._ran = True
        self._metrics.lend(states)
        self._metrics.begin()
        counts = self._metrics.counts()
        result, logged = self._run_watched(batch)
        metrics = self._metrics.outcome(counts)
        if (finding := self._metrics.end()) is not None:
            self._refuse(finding)
        return result, logged, metrics

    def _run_again(self, batch: Any, states: list[Tensor]) -> tuple[Any, list[tuple[int, Any]], Outcome]:
        """Runs the step for a recording, which must leave no trace."""
        self._live = False
        saved = self._metrics.lend(states)
        try:
            counts = self._metrics.counts()
            result, logged = self._run_watched(batch)
            return result, logged, self._metrics.outcome(counts)
        finally:
            self._metrics.give_back(saved)

    def _run_watched(self, batch: Any) -> tuple[Any, list[tuple[int, Any]]]:
        """Runs the step with stand-ins for the Trainer and for `self.log`.

        Returns:
            What it returned, and for each call of `self.log` its number and value.
        """
        logged: list[tuple[int, Any]] = []
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                log = partial(self._log, module, module.log, logged)
                stack.enter_context(Shadowed(module, "log", Standing(module, "log", log, vars(module).get("log"))))
            stack.enter_context(watched_trainer(self._module, self._note_read))
            self._inside = True
            try:
                result = self._native(batch, *self._others)
            finally:
                self._inside = False
        return result, logged

    def _log(
        self,
        module: LightningModule,
        log: Callable[..., None],
        logged: list[tuple[int, Any]],
        name: str,
        value: Any,
        *others: Any,
        **options: Any,
    ) -> None:
        if not self._inside:  # someone has kept this function beyond the step
            log(name, value, *others, **options)
            return
        metric = value if isinstance(value, Metric) else None
        plain = (metric is None and value, *others, *options.values())
        with handing_out(f"self.log({name!r})", *plain), _with_real_trainer(module):
            if options.get("enable_graph") or any(isinstance(given, Tensor) for given in plain[1:]):
                self._refuse(Finding(Reason.LOGGED_VALUE, f"self.log({name!r})", "plain arguments", f"{options}"))
            if self._live:
                log(name, value, *others, **options)
        call = LogCall(module, name, others, options, metric)
        if call not in self._log_calls:
            self._log_calls.append(call)
        # Lightning keeps a copy too. Without one, a loss and the same loss detached would be two results in one memory.
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        if metric is not None:
            kept = self._metrics.result_of(metric)
        logged.append((self._log_calls.index(call), kept))

    def _note_read(self, finding: Finding) -> None:
        if self._inside:
            self._refuse(finding)

    def _refuse(self, finding: Finding) -> None:
        if not self._live:
            raise CaptureError(finding)
        if self.region.refusal is None:
            self._runner.refuse(self.region, finding)


@dataclass(frozen=True)
class LogCall:
    """One call of `self.log`, without its value unless that is a metric."""

    module: LightningModule
    name: str
    others: tuple[Any, ...]
    options: dict[str, Any]
    metric: Metric | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogCall) or self.module is not other.module or self.metric is not other.metric:
            return False
        return (self.name, self.others, self.options) == (other.name, other.others, other.options)

    def again(self, value: Any) -> None:
        """Logs another value in the same way."""
        if self.metric is None:
            self.module.log(self.name, value, *self.others, **self.options)
            return
        with contextlib.ExitStack() as stack:
            for result in value:
                stack.enter_context(Shadowed(self.metric, "_forward_cache", result))
            self.module.log(self.name, self.metric, *self.others, **self.options)


class WatchedTrainer:
    """Stands for a Trainer and tells which of its attributes are read or set."""

    __slots__ = ("_note", "_trainer")

    def __init__(self, trainer: Any, note: Callable[[Finding], None]) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_note", note)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._trainer)

    def __getattr__(self, name: str) -> Any:
        if name not in _FIXED:
            self._note(_trainer_read(name))
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._note(_trainer_read(name))
        setattr(self._trainer, name, value)


def _trainer_read(attribute: str) -> Finding:
    expected = "code that depends on its arguments and its modules"
    return Finding(Reason.TRAINER_READ, f"self.trainer.{attribute}", expected, f"used at {user_line()}")


def is_outsider(owner: Any, value: Any) -> bool:
    """Tells whether an object, held by another, is one that a fit changes from step to step."""
    if isinstance(value, Trainer):  # in its own places it is watched, or of no interest
        return not isinstance(owner, (LightningModule, LightningDataModule))
    return isinstance(value, Callback) or is_moving(owner, value)


@contextlib.contextmanager
def watched_trainer(root: Module, note: Callable[[Finding], None]) -> Iterator[None]:
    """Puts stand-ins for the Trainer into the LightningModules of a tree.

    Args:
        root: The tree.
        note: Called for each read or write of something that changes from step to step.
    """
    with contextlib.ExitStack() as stack:
        for module in root.modules():
            if isinstance(module, LightningModule) and module._trainer is not None:
                stack.enter_context(Shadowed(module, "_trainer", WatchedTrainer(module._trainer, note)))
        yield


@contextlib.contextmanager
def _with_real_trainer(module: LightningModule) -> Iterator[None]:
    """Lets Lightning itself see its Trainer."""
    attributes: Mapping[str, Any] = module.__dict__
    stand_in = attributes["_trainer"]
    trainer = object.__getattribute__(stand_in, "_trainer") if type(stand_in) is WatchedTrainer else stand_in
    with Shadowed(module, "_trainer", trainer):
        yield


def _plain_function(module: LightningModule) -> FunctionType | None:
    """Returns the function behind `training_step`, if it is a plain method of the module's class."""
    function = getattr(module.training_step, "__func__", None)
    own = "training_step" in module.__dict__
    return function if isinstance(function, FunctionType) and not own else None
