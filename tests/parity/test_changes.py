# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What is changed between two steps of a run: a recording never outlives what it depends on."""

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_replay import Reason
from tests.parity.harness import CLASSES, FEATURES, Learner, check_native, check_replayed, mlp, run_both, script

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12
AT = 5  # the batch after which things change: three steps have been replayed
AGAIN = [*script(AT + 1), "native", "native", "record", "replay", "replay", "replay"]
ON = script(STEPS)


class Scaled(nn.Module):
    """An MLP with everything that may be changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = 1.5
        self.options = {"shift": 0.1, "more": [1]}
        self.unread = 0
        self.register_buffer("offset", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs + self.offset) * self.scale + self.options["shift"] + self.options["more"][0]


def assign(module: Any) -> None:
    state = module.net.state_dict()
    for name, value in state.items():
        state[name] = (value * 0.9).to(value.dtype)
    module.net.load_state_dict(state, assign=True)


def load(module: Any) -> None:
    module.net.load_state_dict({name: value.clone() for name, value in module.net.state_dict().items()})


def set_data(module: Any) -> None:
    for parameter in module.net.parameters():
        parameter.data = parameter.data * 0.9


def replace_layer(module: Any) -> None:
    layer = nn.Linear(8, CLASSES)
    with torch.no_grad():
        layer.weight.fill_(0.1)
        layer.bias.fill_(0.2)
    module.net.inner[4] = layer


def replace_net(module: Any) -> None:
    replacement = Scaled()
    replacement.load_state_dict(module.net.state_dict())
    module.net = replacement


def add_hook(module: Any) -> None:
    module.net.inner[0].register_forward_hook(lambda module, args, output: output * 1.5)


def add_tensor_hook(module: Any) -> None:
    module.net.inner[0].weight.register_hook(lambda gradient: gradient * 0.5)


def rebind_buffer(module: Any) -> None:
    module.net.offset = torch.full((FEATURES,), 0.3)


def reseed(module: Any) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def change_class(module: Any) -> None:
    class Other(nn.GELU):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.clamp(0, 1)

    module.net.inner[2].__class__ = Other


def clear_container(module: Any) -> None:
    module.net.options["shift"] = 0.4


CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    # What matters: recorded again, or native for as long as it lasts.
    "load_state_dict(assign=True)": (assign, AGAIN),
    "p.data =": (set_data, AGAIN),
    "frozen": (lambda m: m.net.inner[0].requires_grad_(False), AGAIN),
    "part in evaluation mode": (lambda m: m.net.inner[3].eval(), AGAIN),
    "norm in evaluation mode": (lambda m: m.net.inner[1].eval(), AGAIN),
    "attribute": (lambda m: setattr(m.net, "scale", 0.5), AGAIN),
    "dropout rate": (lambda m: setattr(m.net.inner[3], "p", 0.4), AGAIN),
    "item of a container": (clear_container, AGAIN),
    "item of a container in a container": (lambda m: m.net.options["more"].__setitem__(0, 2), AGAIN),
    "buffer rebound": (rebind_buffer, AGAIN),
    "layer replaced": (replace_layer, AGAIN),
    "network replaced": (replace_net, AGAIN),
    "class changed": (change_class, AGAIN),
    "network in evaluation mode": (lambda m: m.net.eval(), [*script(AT + 1), *["native"] * 6]),
    "forward hook": (add_hook, [*script(AT + 1), *["native"] * 6]),
    "channels last": (lambda m: m.net.to(memory_format=torch.preserve_format), ON),
    # What does not: replayed on.
    "nothing": (lambda m: None, ON),
    "load_state_dict": (load, ON),
    "tensor hook": (add_tensor_hook, ON),
    "unread attribute": (lambda m: setattr(m.net, "unread", 7), ON),
    "equal attribute": (lambda m: setattr(m.net, "scale", float("1.5")), ON),
    "buffer written": (lambda m: m.net.offset.fill_(0.3), ON),
    "parameter written": (lambda m: m.net.inner[0].weight.data.mul_(0.5), ON),
    "reseeded": (reseed, ON),
    "learning rate": (lambda m: m.optimizers().param_groups[0].update(lr=0.2), ON),
    "gradients dropped": (lambda m: [setattr(p, "grad", None) for p in m.parameters()], ON),
    "gradients replaced": (
        lambda m: [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()],
        ON,
    ),
    "an extra forward": (lambda m: m.net(torch.ones(5, FEATURES)), ON),
    "an extra forward without gradient": (lambda m: torch.no_grad()(m.net)(torch.ones(5, FEATURES)), ON),
    "an extra backward": (lambda m: m.net(torch.ones(5, FEATURES)).sum().backward(), ON),
}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str, window: int) -> None:
    change, actions = CHANGES[name]

    check_replayed(
        lambda: Learner(Scaled(), events={AT: change}), actions=actions, steps=STEPS, accumulate_grad_batches=window
    )


def test_a_forward_replaced_within_the_step() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == AT:
            module.net.forward = lambda inputs: module.net.inner(inputs) * 0.5
        return nn.functional.cross_entropy(module.net(batch[0]), batch[1])

    check_replayed(lambda: Learner(Scaled(), step), actions=[*script(AT), *["native"] * (STEPS - AT)], steps=STEPS)


def test_freeze_and_unfreeze() -> None:
    """The recording made before freezing is used again after unfreezing."""
    events = {
        3: lambda m: m.net.inner[0].requires_grad_(False),
        8: lambda m: m.net.inner[0].requires_grad_(True),
    }

    check_replayed(
        lambda: Learner(Scaled(), events=events),
        actions=[*script(4), "native", "native", "record", "replay", "replay", *["replay"] * 3],
        steps=STEPS,
    )


def test_evaluation_and_back() -> None:
    events = {4: lambda m: m.net.eval(), 6: lambda m: m.net.train()}

    check_replayed(
        lambda: Learner(Scaled(), events=events),
        actions=[*script(5), "native", "native", *["replay"] * 5],
        steps=STEPS,
    )


def test_hook_added_and_removed() -> None:
    handles: list[Any] = []
    events = {
        4: lambda m: handles.append(m.net.inner[0].register_forward_hook(lambda *_: None)),
        6: lambda m: handles.pop().remove(),
    }

    trace = check_replayed(
        lambda: Learner(Scaled(), events=events),
        actions=[*script(5), "native", "native", *["replay"] * 5],
        steps=STEPS,
    )
    assert trace.report.reasons[Reason.HOOKS] == 2


def test_global_hook() -> None:
    handles: list[Any] = []
    events = {
        4: lambda m: handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None)),
        6: lambda m: handles.pop().remove(),
    }

    check_replayed(
        lambda: Learner(Scaled(), events=events),
        actions=[*script(5), "native", "native", *["replay"] * 5],
        steps=STEPS,
    )


def test_a_network_that_changes_all_the_time_is_replayed_by_its_parts() -> None:
    def change(module: Any) -> None:
        module.net.scale += 0.1

    _, replay = run_both(lambda: Learner(Scaled(), events=dict.fromkeys(range(3, 60, 4), change)), steps=40)

    assert replay.trace is not None
    recordings = replay.trace.report.recordings
    assert [recording.region for recording in recordings] == ["net"] * 3 + ["net.inner"]
    assert replay.trace.actions[-10:] == ["replay"] * 10


def test_deterministic_flag() -> None:
    def flip(module: Any) -> None:
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)

    check_replayed(
        lambda: Learner(Scaled(), events={4: flip, 6: flip}),
        actions=[*script(5), "native", "native", *["replay"] * 5],
        steps=STEPS,
    )


def test_default_dtype() -> None:
    check_replayed(
        lambda: Learner(
            Scaled(),
            events={
                4: lambda m: torch.set_default_dtype(torch.float64),
                6: lambda m: torch.set_default_dtype(torch.float32),
            },
        ),
        actions=[*script(5), "native", "native", *["replay"] * 5],
        steps=STEPS,
    )


class Settles(nn.Module):
    """Decides something in its first call, as classifiers of transformers decide what kind of labels they have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.kind: str | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "single label"
        return self.net(inputs) * (2.0 if self.kind == "single label" else 1.0)


def test_what_is_set_in_the_first_call_only_is_recorded_as_a_whole() -> None:
    trace = check_replayed(lambda: Learner(Settles()), actions=["native"] * 3 + ["record"] + ["replay"] * 3)

    assert {recording.region for recording in trace.report.recordings} == {"net"}


class FollowsTheEpoch(LightningModule):
    """A network that is a LightningModule, whose Trainer moves on without any attribute being set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * (2.0 if self.current_epoch else 1.0)


class FollowsTheOptimizer(nn.Module):
    """A network that knows the optimizer, whose learning rate a scheduler changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.known: dict[str, torch.optim.Optimizer] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.known["optimizer"].param_groups[0]["lr"]


class TellsItsNetwork(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if isinstance(self.net, FollowsTheOptimizer):
            self.net.known["optimizer"] = optimizer
        scheduler = OwnScheduler(optimizer, 1)
        if isinstance(self.net, FollowsItsScheduler):
            self.net.known["scheduler"] = scheduler
        return [optimizer], [scheduler]


class OwnScheduler(torch.optim.lr_scheduler.StepLR):
    """A class of a user's own, whose attributes code of torch reads."""


class FollowsItsScheduler(nn.Module):
    """A network that asks a scheduler of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.known: dict[str, Any] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.known["scheduler"].get_last_lr()[0]


@pytest.mark.parametrize(
    ("network", "where"),
    [
        (FollowsTheEpoch, "self.trainer.current_epoch"),
        (FollowsTheOptimizer, "net.known"),
        (FollowsItsScheduler, "net.known"),
    ],
)
def test_a_network_that_follows_the_fit_is_replayed_by_its_parts(network: Callable[[], nn.Module], where: str) -> None:
    trace = check_native(lambda: TellsItsNetwork(network()), Reason.TRAINER_READ, where=where, max_epochs=3)

    assert {recording.region for recording in trace.report.recordings} == {"net.inner"}


def test_what_is_the_same_in_all_training_steps_may_be_read() -> None:
    class Asks(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs) * (2.0 if self.trainer.training and not self.trainer.sanity_checking else 1.0)

    check_replayed(lambda: Learner(Asks()))


class Drawing(nn.Module):
    """Keeps a generator, with which it could draw."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand((), generator=self.generator)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(FEATURES, FEATURES))


@pytest.mark.parametrize(
    ("make", "reason"), [(Drawing, Reason.HOST_RANDOM), (scripted, Reason.SCRIPTED_MODULE)], ids=["drawing", "scripted"]
)
def test_what_a_part_holds_leaves_the_other_parts_to_be_recorded(make: Callable[[], nn.Module], reason: Reason) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = make(), mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(self.first(inputs))

    _, replay = run_both(lambda: Learner(Holding()), steps=STEPS)

    assert replay.trace is not None
    report = replay.trace.report
    assert reason in report.reasons
    assert "net.first" in report.messages[reason]
    assert {recording.region for recording in report.recordings} == {"net.inner"}
    assert replay.trace.actions[-3:] == ["replay"] * 3


class Config:
    scale = 1.0


@pytest.mark.parametrize("kept", [weakref.proxy, weakref.ref], ids=["proxy", "reference"])
def test_what_a_network_knows_weakly_is_compared(kept: Callable[[Any], Any]) -> None:
    class Knows(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.inner, self.config = mlp(), kept(config)

        def forward(self, inputs: Tensor) -> Tensor:
            known = self.config() if isinstance(self.config, weakref.ref) else self.config
            return self.inner(inputs) * known.scale

    def make() -> Learner:
        config = Config()
        return Learner(Knows(config), events={5: lambda module: setattr(config, "scale", 2.0)})

    trace = check_replayed(make, actions=[*script(6), *script(STEPS - 6)], steps=STEPS)
    assert trace.report.reasons[Reason.MODULE_CHANGED] == 1
