# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Each change of the table in docs/limits.md, made in the middle of a run and taken back: what it leads to."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_replay import Reason, ReplayStrategy
from lightning_replay.guards.changes import Change
from lightning_replay.reasons import Effect
from tests.parity.harness import FEATURES, Learner, check_replayed, mlp, script

pytestmark = pytest.mark.filterwarnings("ignore")

FROM, TO, STEPS = 5, 9, 14
"""The batch at which a change is made, the one at which it is taken back, and the end."""

BEFORE = script(FROM)
EXPECTED = {
    # The recording is used again afterwards.
    Effect.NATIVE: [*BEFORE, *["native"] * (TO - FROM), *["replay"] * (STEPS - TO)],
    # So it is, and between the two steps there is a recording of its own.
    Effect.ANOTHER: [*BEFORE, *script(TO - FROM), *["replay"] * (STEPS - TO)],
    # What has changed back is recorded anew.
    Effect.RETIRED: [*BEFORE, *script(TO - FROM), *script(STEPS - TO)],
}
RECORDINGS = {Effect.NATIVE: 1, Effect.ANOTHER: 2, Effect.RETIRED: 3}

shift = 0.1
unwatched = np.zeros(100_000)  # too large to be compared


class Net(nn.Module):
    """Has everything that may change."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(dropout=0.0)
        self.scale = 1.5
        self.options = {"power": 2}
        self.config = SimpleNamespace(offset=0.1)
        self.register_buffer("offset", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor, sign: Any = 1) -> Tensor:
        inputs = sign * (inputs + self.offset) * self.scale + self.config.offset + shift
        return self.body(inputs) * self.rate * self.options["power"] + float(unwatched[0])


@dataclass
class Event:
    """A change: what is done at `FROM` and undone at `TO`, or what is different about the calls between the two."""

    do: Callable[["Changing"], Any] = lambda module: None
    undo: Callable[["Changing"], Any] = lambda module: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    call: Callable[[Net, Tensor], Tensor] = lambda net, inputs: net(inputs)


class Changing(Learner):
    def __init__(self, event: Event) -> None:
        super().__init__(Net(), optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
        self.event = event
        self.kept: Any = None
        self.gain = nn.Parameter(torch.ones(()))  # something to train, whatever the network gives

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == FROM:
            self.event.do(self)
        if batch_idx == TO:
            self.event.undo(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        event = self.event if FROM <= batch_idx < TO else Event()
        with event.around():
            logits = event.call(self.net, inputs)
        return F.cross_entropy(logits * self.gain, labels)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OtherGELU(nn.GELU):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.clamp(0, 1)


class One:
    """No plain value."""

    def __mul__(self, other: Tensor) -> Tensor:
        return other


def hook(module: Changing) -> None:
    module.kept = module.net.body[0].register_forward_hook(lambda module, args, output: output * 1.5)


def replace_forward(module: Changing) -> None:
    module.net.forward = lambda inputs: module.net.body(inputs) * 0.5


def swap_layer(module: Changing) -> None:
    layer = nn.Linear(*module.net.body[4].weight.shape[::-1])
    layer.load_state_dict(module.net.body[4].state_dict())
    module.net.body[4] = layer


def move(module: Changing) -> None:
    module.net.body[0].weight.data = module.net.body[0].weight.data.clone()


def set_shift(value: float) -> Callable[[Changing], None]:
    return lambda module: globals().update(shift=value)


def set_unwatched(value: float) -> Callable[[Changing], None]:
    def change(module: Changing) -> None:
        unwatched[0] = value
        if isinstance(module.trainer.strategy, ReplayStrategy):
            module.trainer.strategy.audit()

    return change


def set_on(path: str, name: str, value: Any) -> Callable[[Changing], None]:
    return lambda module: setattr(module.get_submodule(path), name, value)


EVENTS: dict[str, tuple[Change, Event]] = {
    "hook": (Change.HOOKS, Event(hook, lambda m: m.kept.remove())),
    "eval": (Change.EVALUATION, Event(lambda m: m.net.eval(), lambda m: m.net.train())),
    "no_grad": (Change.GRADIENTS_OFF, Event(around=torch.no_grad)),
    "anomaly": (Change.WATCHED, Event(around=torch.autograd.detect_anomaly)),
    "function mode": (Change.WATCHED, Event(around=Passing)),
    "checkpoint": (Change.WATCHED, Event(call=lambda net, x: checkpoint(net, x, use_reentrant=False))),
    "argument": (Change.ARGUMENTS, Event(call=lambda net, x: net(x, One()))),
    "forward": (
        Change.FORWARD,
        Event(replace_forward, lambda m: delattr(m.net, "forward")),
    ),
    "stride": (Change.TENSORS, Event(call=lambda net, x: net(x.t().contiguous().t()))),
    "trainable": (Change.TENSORS, Event(call=lambda net, x: net(x.clone().requires_grad_()))),
    "value": (Change.VALUES, Event(call=lambda net, x: net(x, -1))),
    "keyword": (Change.VALUES, Event(call=lambda net, x: net(inputs=x))),
    "autocast": (Change.SWITCHES, Event(around=lambda: torch.autocast("cpu", torch.bfloat16))),
    "deterministic": (
        Change.SWITCHES,
        Event(
            lambda m: torch.use_deterministic_algorithms(False),
            lambda m: torch.use_deterministic_algorithms(True, warn_only=True),
        ),
    ),
    "part in eval": (Change.FLAGS, Event(lambda m: m.net.body[1].eval(), lambda m: m.net.body[1].train())),
    "frozen": (
        Change.FLAGS,
        Event(lambda m: m.net.body[0].requires_grad_(False), lambda m: m.net.body[0].requires_grad_(True)),
    ),
    "layer": (Change.MEMBERS, Event(swap_layer, swap_layer)),
    "buffer": (
        Change.MEMBERS,
        Event(set_on("net", "offset", torch.ones(FEATURES)), set_on("net", "offset", torch.zeros(FEATURES))),
    ),
    "memory": (Change.MEMORY, Event(move, move)),
    "class": (
        Change.CODE,
        Event(set_on("net.body.2", "__class__", OtherGELU), set_on("net.body.2", "__class__", nn.GELU)),
    ),
    "attribute": (Change.ATTRIBUTE, Event(set_on("net", "scale", 0.5), set_on("net", "scale", 1.5))),
    "global": (Change.VARIABLE, Event(set_shift(0.3), set_shift(0.1))),
    "class attribute": (
        Change.VARIABLE,
        Event(lambda m: setattr(Net, "rate", 0.5), lambda m: setattr(Net, "rate", 1.0)),
    ),
    "item": (
        Change.CONTENTS,
        Event(lambda m: m.net.options.update(power=3), lambda m: m.net.options.update(power=2)),
    ),
    "object": (
        Change.CONTENTS,
        Event(lambda m: setattr(m.net.config, "offset", 0.4), lambda m: setattr(m.net.config, "offset", 0.1)),
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_effect(name: str) -> None:
    change, event = EVENTS[name]

    trace = check_replayed(lambda: Changing(event), actions=EXPECTED[change.effect], steps=STEPS)

    used = [recording for recording in trace.report.recordings if recording.region == "net"]
    assert len(used) == RECORDINGS[change.effect]
    assert (Reason.MODULE_CHANGED in trace.report.reasons) == (change.effect is Effect.RETIRED)


def test_effect_of_an_audit() -> None:
    """The audit is a native step of its own, and the change is there in it already."""
    audited = ["native", *script(3)]

    trace = check_replayed(
        lambda: Changing(Event(set_unwatched(0.25), set_unwatched(0.0))),
        actions=[*BEFORE, *audited, *audited, "replay"],
        steps=STEPS,
    )

    assert Change.OPERATIONS.effect is Effect.RETIRED
    assert trace.report.reasons[Reason.PYTHON_VALUE] == 2
    assert len(trace.report.recordings) == RECORDINGS[Effect.RETIRED]


def test_effect_of_a_call_that_waits() -> None:
    """Its step is a replay still; those after it are native until its result is dropped."""

    class Keeping(Changing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == TO:
                self.kept = None
            if batch_idx == FROM:
                self.kept = self.net(batch[0])
                return None
            return super().training_step(batch, batch_idx)

    assert Change.PENDING.effect is Effect.NATIVE
    expected = EXPECTED[Effect.NATIVE]
    trace = check_replayed(
        lambda: Keeping(Event()), actions=[*expected[:FROM], "replay", *expected[FROM + 1 :]], steps=STEPS
    )
    assert len(trace.report.recordings) == RECORDINGS[Effect.NATIVE]
    assert trace.report.reasons[Reason.PENDING] == TO - FROM - 1


def test_every_change_is_made() -> None:
    assert {change for change, _ in EVENTS.values()} == set(Change) - {Change.OPERATIONS, Change.PENDING}
