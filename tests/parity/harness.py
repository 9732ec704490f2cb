# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Train a small module natively and with replay, and hold the two against each other.

Every replayed run here uses a poisoned tape: whatever a forward graph may write is filled with NaN before each replay.

A scenario is run with each scope (see the fixture `scope`). What it asserts beyond equality is about the scope
"network"; with the others, that it is replayed at all where it should be.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_replay import Reason, ReplayStrategy
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.guards.parameters import find_use
from tests.helpers.models import Cycled
from tests.helpers.trace import COMPARED, Loaders, TraceResult, ZeroGradTrace, compare, run_fit

WARM_UP = 2
STEPS = 7
FEATURES = 6
CLASSES = 3

SCOPE = "network"
"""The scope of every strategy made here, unless one is asked for; the fixture `scope` sets it."""

compared = 0
"""How many pairs of runs were compared in the current test."""

Step = Callable[[Any, Any, int], Any]
Event = Callable[[Any], None]


class NotEqualError(AssertionError):
    """A replayed run that is not the native one, or was not replayed: the failure of a scenario in any scope."""


class PoisonedStrategy(ReplayStrategy):
    """Replays tapes whose memory is worthless between two replays."""

    def _make_backend(self) -> GraphBackend:
        return TapeBackend(self.root_device, poison=True)


def tape(**options: Any) -> PoisonedStrategy:
    """Makes a strategy that records early and says nothing."""
    return PoisonedStrategy(
        **{"backend": "tape", "scope": SCOPE, "warmup_steps": WARM_UP, "on_native": "ignore", **options}
    )


def classify(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """A plain training step."""
    inputs, labels = batch
    return F.cross_entropy(module.net(inputs), labels)


class Learner(LightningModule):
    """Trains `net` with whatever training step is given.

    Args:
        net: The network.
        step: The body of `training_step`.
        optimizer: Takes the parameters.
        in_place: Zero gradients in place.
        events: What to do to the module after a batch, by batch index.
    """

    def __init__(
        self,
        net: nn.Module,
        step: Step = classify,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        in_place: bool = False,
        events: dict[int, Event] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.step = step
        code = getattr(step, "__code__", None)
        # A step that uses the index is not replayed as a whole; this one should be where the index is only handed on.
        self.uses_index = code is None or find_use(Learner, step, 2) is not None
        self.make_optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01))
        self.in_place = in_place
        self.events = events or {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, self.trainer.fit_loop.epoch_loop.batch_idx if self.uses_index else 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.events:
            self.events[batch_idx](self)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.in_place)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def mlp(dropout: float = 0.1) -> nn.Sequential:
    """A network with a bias, a norm with buffers, and dropout."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    )


class TwoResults(nn.Module):
    """Gives a result that another result is made from, as networks with `hidden_states` do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.head(hidden), hidden


class UsesTwice(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.net = nn.Linear(FEATURES, FEATURES), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.shared(torch.tanh(self.shared(inputs))))


def batches(*shape: int, size: int = 5, count: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Different batches of features and labels, so that a stale input shows."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (FEATURES,)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def tokens(vocabulary: int = 7, length: int = 4, size: int = 5, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Different batches of token sequences and labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(vocabulary, (size, length), generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loader(data: Sequence[Any], steps: int = STEPS) -> Loaders:
    """A loader that gives ready batches in turn."""
    return DataLoader(Cycled(data, steps), batch_size=None, collate_fn=lambda batch: batch), None


def script(steps: int = STEPS, warm_up: int = WARM_UP) -> list[str]:
    """The actions of a run in which all goes well."""
    return ["native"] * warm_up + ["record"] + ["replay"] * (steps - warm_up - 1)


def names_on(module: nn.Module) -> dict[str, list[str]]:
    """Returns the names of all instance attributes in a module tree."""
    return {path: sorted(child.__dict__) for path, child in module.named_modules()}


class Arm:
    """One run of a module: its trace, or the error that ended it."""

    def __init__(self, make: Callable[[], LightningModule], data: Any, strategy: Any, **options: Any) -> None:
        self.modules: list[LightningModule] = []
        self.error: Exception | None = None
        self.trace: TraceResult | None = None
        self.strategy = strategy

        def made() -> LightningModule:
            self.modules.append(make())
            return self.modules[-1]

        trace = ZeroGradTrace("copy")
        steps = options.pop("steps", STEPS)
        make_data = data if callable(data) else lambda: loader(copy.deepcopy(data), steps)
        options = {"max_epochs": 1, "gradient_clip_val": None, **options}
        try:
            self.trace = run_fit(made, make_data, strategy, trace=trace, **options)
        except Exception as error:  # compared with the other arm's
            self.error = error
        self.partial = trace.result


def run_both(
    make: Callable[[], LightningModule],
    data: Any = None,
    *,
    strategy: ReplayStrategy | None = None,
    callbacks: Callable[[], list[Callback]] = list,
    **options: Any,
) -> tuple[Arm, Arm]:
    """Runs native and replay, and compares everything, an error included."""
    global compared
    compared += 1
    data = batches() if data is None else data
    native = Arm(make, data, "auto", callbacks=callbacks(), **options)
    replay = Arm(make, data, strategy or tape(), callbacks=callbacks(), **options)
    if native.error is not None or replay.error is not None:
        same = (type(native.error), str(native.error)) == (type(replay.error), str(replay.error))
        if not same:
            found = f"native {native.error!r}, replay {replay.error!r}"
            raise NotEqualError(found + _trace_of(replay.error or native.error))
        return native, replay
    assert native.trace is not None
    assert replay.trace is not None
    try:
        compare(native.trace, replay.trace, COMPARED)
    except AssertionError as error:
        raise NotEqualError(f"{error}\n{replay.trace.actions}\n{replay.trace.report}") from None
    if names_on(native.modules[0]) != names_on(replay.modules[0]):
        raise NotEqualError("an attribute was left on a module")
    return native, replay


def _trace_of(error: BaseException | None) -> str:
    import traceback

    return "\n" + "".join(traceback.format_exception(error)) if error is not None else ""


def check_replayed(
    make: Callable[[], LightningModule], data: Any = None, actions: Sequence[str] | None = None, **options: Any
) -> TraceResult:
    """Asserts that a run equals native and takes these actions; by default all that can be replayed is."""
    _, replay = run_both(make, data, **options)
    assert replay.error is None, replay.error
    assert replay.trace is not None
    if "replay" not in replay.trace.actions:
        raise NotEqualError(f"nothing was replayed: {replay.trace.actions}\n{_messages(replay.trace)}")
    expected = list(actions) if actions is not None else script(len(replay.trace.actions))
    assert replay.trace.actions == expected, f"{replay.trace.actions}\n{_messages(replay.trace)}"
    return replay.trace


def check_native(
    make: Callable[[], LightningModule],
    reason: Reason,
    data: Any = None,
    where: str = "",
    whole: str = "net",
    **options: Any,
) -> TraceResult:
    """Asserts that a run equals native, that the network as a whole is not recorded, and that the report says why.

    Parts of a refused network may be recorded in its place.
    """
    _, replay = run_both(make, data, **options)
    assert replay.error is None, replay.error
    assert replay.trace is not None
    report = replay.trace.report
    recorded = {recording.region for recording in report.recordings if recording.replays}
    assert whole not in recorded, f"{replay.trace.actions}\n{_messages(replay.trace)}"
    assert reason in report.reasons, _messages(replay.trace)
    assert where in report.messages[reason], report.messages[reason]
    return replay.trace


def _messages(trace: TraceResult) -> str:
    return "\n".join([*trace.report.messages.values()])


__all__ = [
    "CLASSES",
    "FEATURES",
    "STEPS",
    "WARM_UP",
    "Arm",
    "Learner",
    "PoisonedStrategy",
    "Trainer",
    "TwoResults",
    "UsesTwice",
    "batches",
    "check_native",
    "check_replayed",
    "classify",
    "loader",
    "mlp",
    "names_on",
    "run_both",
    "script",
    "tape",
    "tokens",
]
