# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""docs/limits.md names the test behind each of its sentences; most of them are here.

Where a limit costs speed alone, the test also holds the run against a native one. Where a limit can cost exactness, the
test shows the deviation: it fails, and the page has to change, once the limit is gone.
"""

import copy
import importlib
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import NotReplayedError, Reason, ReplayStrategy
from lightning_replay.guards.module import find_hidden_state
from tests.helpers.bits import assert_same, same_bits

STEPS = 10


class Regression(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loader(samples: int = 4 * STEPS) -> DataLoader:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)


def replaying(**options: Any) -> ReplayStrategy:
    return ReplayStrategy(backend="tape", **{"on_native": "ignore", **options})


def fit(
    make_module: Callable[[], LightningModule], strategy: Any, data: DataLoader | None = None, **options: Any
) -> Any:
    """Trains one epoch from a fixed seed and returns the module."""
    seed_everything(1, verbose=False)
    module = make_module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **quiet, **options)
    trainer.fit(module, data or loader())
    return module


def fit_both(
    make_module: Callable[[], LightningModule], data: DataLoader | None = None, **options: Any
) -> ReplayStrategy:
    """Trains natively and with replay, asserts equal weights and buffers, and returns the strategy."""
    strategy = replaying(**options)
    native = fit(make_module, "auto", data)
    replay = fit(make_module, strategy, data)
    assert_same(dict(native.state_dict()), dict(replay.state_dict()))
    return strategy


def test_what_has_no_limit_is_replayed() -> None:
    """Guards the tests below: with this module nothing stands in the way."""
    report = fit_both(lambda: Regression(make_net())).report()

    assert report.steps_replayed == STEPS - 4
    assert set(report.reasons) == {Reason.WARM_UP, Reason.RECORDING}


# -- where it works ----------------------------------------------------------------------------------------------


def test_one_device() -> None:
    with pytest.raises(ValueError, match="devices=2"):
        Trainer(accelerator="cpu", devices=2, strategy=replaying())


def test_one_node() -> None:
    with pytest.raises(ValueError, match="num_nodes=2"):
        Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy=replaying())


def test_without_cuda_the_fit_is_native() -> None:
    strategy = ReplayStrategy(on_native="ignore")
    fit(lambda: Regression(make_net()), strategy)

    assert strategy.report().reasons == {Reason.NO_CUDA: STEPS}


def test_manual_optimization_is_native() -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__(make_net())
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert fit_both(Manual).report().reasons == {Reason.MANUAL_OPTIMIZATION: STEPS}


def test_an_optimizer_with_several_closures_is_native() -> None:
    class Searching(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    assert set(fit_both(lambda: Searching(make_net())).report().reasons) == {Reason.OPTIMIZER}


def test_only_the_network_is_recorded() -> None:
    losses: list[int] = []

    class Counting(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            losses.append(batch_idx)
            return super().training_step(batch, batch_idx)

    strategy = replaying()
    fit(lambda: Counting(make_net()), strategy)

    assert losses == list(range(STEPS))
    assert strategy.report().steps_replayed == STEPS - 4


@pytest.mark.parametrize("scope", ["network", "step"])
def test_the_update_of_the_weights_is_native(scope: str) -> None:
    updates: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            updates.append(1)
            return loss

    class Module(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Counting(self.parameters(), lr=0.1)

    report = fit_both(lambda: Module(make_net()), scope=scope).report()

    assert [recording.region for recording in report.recordings] == ["net" if scope == "network" else "training_step"]
    assert report.steps_replayed == STEPS - 4
    assert len(updates) == 2 * STEPS  # of the native run too


# -- Python is not run again -------------------------------------------------------------------------------------


def test_python_in_the_network_is_not_run_again() -> None:
    calls = np.zeros(100_000)  # too large to be compared

    class Counting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            calls[0] += 1
            return super().forward(inputs)

    report = fit_both(lambda: Regression(Counting(4, 1))).report()

    assert report.steps_replayed == STEPS - 4
    assert STEPS < calls[0] < 2 * STEPS


def test_a_changed_attribute_is_seen() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.scale

    class Scheduled(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.net.scale = 1.0 if batch_idx < 6 else 0.5
            return super().training_step(batch, batch_idx)

    report = fit_both(lambda: Scheduled(Scaled(4, 1)), warmup_steps=1).report()

    assert report.steps_replayed == 4 + 2  # two native steps before each of the two recordings
    assert report.recordings[0].replays == 4


def test_an_attribute_set_by_the_network_is_native() -> None:
    class Remembering(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.last_shape = len(inputs)
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(inputs)

    report = fit_both(lambda: Regression(Remembering(4, 1))).report()

    assert report.steps_replayed == 0
    assert Reason.ATTRIBUTE_WRITTEN in report.reasons


def test_a_container_filled_by_the_network_is_native() -> None:
    _CALLS.clear()

    class Appending(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            _CALLS.append(len(inputs))
            return super().forward(inputs)

    report = fit_both(lambda: Regression(Appending(4, 1))).report()

    assert report.steps_replayed == 0
    assert Reason.ATTRIBUTE_WRITTEN in report.reasons
    assert len(_CALLS) == 2 * STEPS


_CALLS: list[int] = []


# -- globals, closures and what is beyond them -------------------------------------------------------------------


@dataclass
class Settings:
    scale: Any = 1.0


_SCALE = 1.0
_NESTED: Any = {"scales": [(Settings(), 1.0)]}


class ByGlobal(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * _SCALE


class ByContainer(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * _NESTED["scales"][0][0].scale


def by_closure() -> tuple[nn.Module, Callable[[float], None]]:
    scale = 1.0

    class Closed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Closed(4, 1), change


def by_object() -> tuple[nn.Module, Callable[[float], None]]:
    class Configured(nn.Linear):
        def __init__(self, settings: Settings) -> None:
            super().__init__(4, 1)
            self.settings = settings

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.settings.scale

    settings = Settings()
    return Configured(settings), lambda value: setattr(settings, "scale", value)


class Scheduled(Regression):
    """Changes a number that its network reads, and can say so.

    Args:
        make: Makes the network and the function that changes the number.
        told: What is called on the strategy at the step of the change, or later.
    """

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, Callable[[float], None]]],
        told: dict[int, Callable[[Any], None]] | None = None,
    ) -> None:
        net, self.change = make()
        super().__init__(net)
        self.told = told or {}
        self.change(1.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 6:
            self.change(0.5)
        if batch_idx in self.told and isinstance(self.trainer.strategy, ReplayStrategy):
            self.told[batch_idx](self.trainer.strategy)
        return super().training_step(batch, batch_idx)


def set_global(value: float) -> None:
    global _SCALE
    _SCALE = value


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (ByGlobal(4, 1), set_global), id="global"),
        pytest.param(
            lambda: (ByContainer(4, 1), lambda value: setattr(_NESTED["scales"][0][0], "scale", value)), id="container"
        ),
        pytest.param(by_closure, id="closure"),
        pytest.param(by_object, id="object"),
    ],
)
def test_a_changed_global_or_closure_is_seen(make: Any) -> None:
    report = fit_both(lambda: Scheduled(make), warmup_steps=1).report()

    assert report.reasons[Reason.MODULE_CHANGED] == 1
    assert report.steps_replayed == 4 + 2  # two native steps before each of the two recordings


# Six lists inside each other, an array of another library, a module that only a string names, the environment, a weak
# dictionary, a function that only torch's own code names.
_DEEP = [[[[[[1.0]]]]]]
_ARRAY = np.ones(100_000)
_REGISTRY = "tests_limits_registry"
_VARIABLE = "LIGHTNING_REPLAY_TEST_SCALE"
_WEAK: weakref.WeakKeyDictionary[type, float] = weakref.WeakKeyDictionary()
_SOFTPLUS = F.softplus


class Deep(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * _DEEP[0][0][0][0][0][0]


class InArray(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float(_ARRAY[0])


class Unnamed(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * importlib.import_module(_REGISTRY).scale


class InEnvironment(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float(os.environ[_VARIABLE])


class InWeakDictionary(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * _WEAK[InWeakDictionary]


class InFormat(nn.Linear):
    scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float("{.scale}".format(self))  # noqa: UP032


class CallsTorch(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return _ACTIVATION(super().forward(inputs))


_ACTIVATION = nn.Softplus()


def set_item(container: Any, value: float) -> None:
    container[0] = value


def replace_softplus(value: float) -> None:
    F.softplus = lambda *arguments: _SOFTPLUS(*arguments) * value


def set_registry(value: float) -> None:
    registry = types.ModuleType(_REGISTRY)
    registry.scale = value  # type: ignore[attr-defined]
    sys.modules[_REGISTRY] = registry


def set_environment(value: float) -> None:
    os.environ[_VARIABLE] = str(value)


UNSEEN = {
    "nested": (Deep, lambda value: set_item(_DEEP[0][0][0][0][0], value)),
    "library": (InArray, lambda value: set_item(_ARRAY, value)),
    "unnamed": (Unnamed, set_registry),
    "environment": (InEnvironment, set_environment),
    "weak dictionary": (InWeakDictionary, lambda value: _WEAK.__setitem__(InWeakDictionary, value)),
    "torch": (CallsTorch, replace_softplus),
    "format string": (InFormat, lambda value: setattr(InFormat, "scale", value)),
}


def unseen(name: str) -> Callable[[], tuple[nn.Module, Callable[[float], None]]]:
    net, change = UNSEEN[name]
    return lambda: (net(4, 1), change)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    sys.modules.pop(_REGISTRY, None)
    os.environ.pop(_VARIABLE, None)
    F.softplus = _SOFTPLUS
    InFormat.scale = 1.0


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_guard_reaches_is_not_seen(name: str) -> None:
    """A limit of exactness: the page has to change when this fails."""
    strategy = replaying()
    native = fit(lambda: Scheduled(unseen(name)), "auto")
    replay = fit(lambda: Scheduled(unseen(name)), strategy)

    assert strategy.report().steps_replayed == STEPS - 4
    assert not same_bits(native.net.weight, replay.net.weight)


class Counted(Regression):
    """A step that counts itself in memory that only code in C knows."""

    def __init__(self, count: Callable[[], Any]) -> None:
        super().__init__(make_net())
        self.count = count

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count()
        return super().training_step(batch, batch_idx)


def in_an_array() -> tuple[Callable[[], Any], Callable[[], int]]:
    array = np.zeros(100_000, dtype=np.int64)
    return lambda: array.__setitem__(0, array[0] + 1), lambda: int(array[0])


def in_a_cache() -> tuple[Callable[[], Any], Callable[[], int]]:
    cached = lru_cache(lambda: None)
    cached()
    return cached, lambda: cached.cache_info().hits


@pytest.mark.parametrize("make", [in_an_array, in_a_cache])
def test_effects_in_c_are_neither_seen_nor_repeated(make: Callable[[], Any]) -> None:
    """A limit of exactness: the page has to change when this fails."""
    count, counted = make()
    fit(lambda: Counted(count), "auto")
    native = counted()

    strategy = replaying(scope="step")
    fit(lambda: Counted(count), strategy)

    assert native == STEPS
    assert {recording.region for recording in strategy.report().recordings} == {"training_step"}
    assert strategy.report().steps_replayed >= STEPS - 5
    assert counted() - native != STEPS


class LogsThroughACopy(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        copy.copy(self).log("mine", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_shallow_copy_of_the_module_logs_as_the_module_does() -> None:
    """A limit of exactness: the page has to change when this fails."""

    def logged(strategy: Any) -> set[str]:
        return {*fit(lambda: LogsThroughACopy(make_net()), strategy).trainer.callback_metrics}

    assert logged("auto") == set()
    assert logged(replaying()) == logged(replaying(scope="step")) == {"mine"}


def test_an_audit_sees_what_no_guard_reaches() -> None:
    strategy = replaying()
    fit(lambda: Scheduled(unseen("library"), told={8: lambda strategy: strategy.audit()}), strategy)

    report = strategy.report()
    assert report.steps_replayed == 4
    assert report.reasons[Reason.PYTHON_VALUE] == 1
    assert "replays from step" in report.messages[Reason.PYTHON_VALUE]
    assert "may have deviated" in report.messages[Reason.PYTHON_VALUE]


def test_an_audit_sees_other_operations() -> None:
    class Branching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            return outputs.tanh() if _ARRAY[0] < 1 else outputs

    def make() -> tuple[nn.Module, Callable[[float], None]]:
        return Branching(4, 1), lambda value: set_item(_ARRAY, value)

    strategy = replaying()
    fit(lambda: Scheduled(make, told={8: lambda strategy: strategy.audit()}), strategy)

    assert strategy.report().steps_replayed == 4
    assert strategy.report().reasons[Reason.PYTHON_VALUE] == 1


def test_invalidating_makes_the_next_steps_exact() -> None:
    strategy = replaying(warmup_steps=1)
    native = fit(lambda: Scheduled(unseen("library")), "auto")
    told = {6: lambda strategy: strategy.invalidate("the scale has changed")}
    replay = fit(lambda: Scheduled(unseen("library"), told=told), strategy)

    assert_same(native.net.weight, replay.net.weight)
    assert strategy.report().reasons[Reason.INVALIDATED] == 1
    assert strategy.report().steps_replayed == 4 + 2


# -- hooks and logging -------------------------------------------------------------------------------------------


def test_module_hooks_are_native() -> None:
    def hooked() -> LightningModule:
        module = Regression(make_net())
        module.net[0].register_forward_hook(lambda *_: None)
        return module

    report = fit_both(hooked).report()

    assert report.reasons[Reason.HOOKS] >= STEPS
    assert "net" not in {recording.region for recording in report.recordings}


def test_logging_inside_the_network_is_native() -> None:
    class Whole(Regression):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.net(inputs)
            self.log("mean", outputs.mean())
            return outputs

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

    report = fit_both(lambda: Whole(make_net())).report()

    assert Reason.LOG_IN_REGION in report.reasons
    assert "self" not in {recording.region for recording in report.recordings}


# -- what the device cannot do alone -----------------------------------------------------------------------------


class Waiting(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs / inputs.abs().max().item())


class Drawing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 if random.random() < 0.5 else 0.9)


class PrivateGenerator(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn(inputs.shape, generator=self.generator))


class WritingItsInput(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mul_(0.5))


class Printing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        print("called")
        return super().forward(inputs)


class Timed(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 if time.monotonic() > 0 else 0.5)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Printing, Reason.HOST_EFFECT),
        (Timed, Reason.HOST_EFFECT),
        (Waiting, Reason.HOST_SYNC),
        (Drawing, Reason.HOST_RANDOM),
        (PrivateGenerator, Reason.HOST_RANDOM),
        (WritingItsInput, Reason.INPUT_WRITTEN),
    ],
)
def test_what_a_recording_cannot_hold_is_native(net: type[nn.Linear], reason: Reason) -> None:
    report = fit_both(lambda: Regression(net(4, 1))).report()

    assert reason in report.reasons
    assert report.steps_replayed == 0


# -- gradients ---------------------------------------------------------------------------------------------------


class Seeing(Regression):
    """Reads the gradient of the second layer when the one of the first is ready."""

    def __init__(self) -> None:
        super().__init__(make_net())
        self.seen: list[bool] = []
        self.net[0].weight.register_hook(lambda _: self.seen.append(self.net[2].weight.grad is not None))


def test_a_hook_sees_other_gradients_after_the_backward_only() -> None:
    """A limit of exactness: the page has to change when this fails."""
    strategy = replaying()

    assert fit(Seeing, "auto").seen == [True] * STEPS
    assert fit(Seeing, strategy).seen == [True] * 4 + [False] * (STEPS - 4)
    assert strategy.report().steps_replayed == STEPS - 4


def test_a_hook_gets_its_own_gradient() -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__(make_net())
            self.seen: list[Tensor] = []
            self.net[0].weight.register_hook(lambda gradient: self.seen.append(gradient.clone()))

    strategy = replaying()

    assert_same(fit(Keeping, "auto").seen, fit(Keeping, strategy).seen)
    assert strategy.report().steps_replayed == STEPS - 4


def test_hooks_of_several_parameters_run_in_another_order() -> None:
    class Ordered(Regression):
        def __init__(self) -> None:
            super().__init__(make_net())
            self.order: list[str] = []
            for name, parameter in self.net.named_parameters():
                parameter.register_hook(lambda gradient, name=name: self.order.append(name))

    strategy = replaying()
    native, replayed = fit(Ordered, "auto").order, fit(Ordered, strategy).order
    hooks = len(native) // STEPS

    assert strategy.report().steps_replayed == STEPS - 4
    assert replayed[: 4 * hooks] == native[: 4 * hooks]
    assert replayed[-hooks:] != native[-hooks:]
    assert sorted(replayed[-hooks:]) == sorted(native[-hooks:])


def test_a_hook_on_the_node_of_a_parameter_does_not_run() -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__(make_net())
            self.calls = 0
            weight = self.net[0].weight
            self.node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self.node.register_hook(self.count)

        def count(self, *_: Any) -> None:
            self.calls += 1

    assert fit(Keeping, "auto").calls == STEPS
    assert fit(Keeping, replaying()).calls == 4


def test_a_second_backward_of_a_replayed_step_is_an_error() -> None:
    class Twice(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 6:
                loss.backward(retain_graph=True)
            return loss

    with pytest.raises(NotReplayedError, match="repeated_backward"):
        fit(lambda: Twice(make_net()), replaying())


class Tied(nn.Module):
    """Uses one layer three times, so that the order of a sum shows in its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(inputs)))))


class UsedLater(Regression):
    """Uses a weight of its network once more from a step on."""

    begin = 6

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch[0]) if batch_idx >= self.begin else loss

    def extra(self, inputs: Tensor) -> Tensor:
        return 0.1 * self.net.layer.weight.square().sum()


class UsedFromTheStart(UsedLater):
    begin = 0


class UsedInACast(UsedLater):
    def extra(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.net.layer.weight).square().mean()


class UsedInASecondCall(UsedLater):
    def extra(self, inputs: Tensor) -> Tensor:
        return self.net(2 * inputs).square().mean()


class UsedFirst(UsedLater):
    """The new use comes before the network's own."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        extra = self.extra(batch[0]) if batch_idx >= self.begin else 0.0
        return Regression.training_step(self, batch, batch_idx) + extra


class PenalisedUnderAutocast(UsedLater):
    """Autocast shares the network's casts, but a penalty uses none."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [UsedLater, UsedFirst, UsedInACast, UsedInASecondCall])
@pytest.mark.parametrize("scope", ["network", "step"])
def test_a_later_use_of_a_parameter_that_is_used_twice_is_native(kind: type[UsedLater], scope: str) -> None:
    report = fit_both(lambda: kind(Tied()), scope=scope).report()

    assert report.steps_replayed > 0
    assert report.reasons[Reason.SHARED_PARAMETER] > 0


def test_a_later_use_beside_a_shared_cast_is_added_to_it() -> None:
    report = fit_both(lambda: PenalisedUnderAutocast(Tied())).report()

    assert report.steps_replayed == STEPS - 4
    assert Reason.SHARED_PARAMETER not in report.reasons


def test_a_later_use_of_a_cast_or_hooked_parameter_is_an_error() -> None:
    class SharesCasts(UsedInACast):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().training_step(batch, batch_idx)

    class Hooked(UsedLater):
        def on_fit_start(self) -> None:
            self.net.layer.weight.register_hook(lambda gradient: gradient)

    with pytest.raises(NotReplayedError, match="shared_parameter"):
        fit(lambda: SharesCasts(Tied()), replaying())
    with pytest.raises(NotReplayedError, match="shared_parameter"):
        fit(lambda: Hooked(Tied()), replaying())
    strategy = replaying()
    fit(lambda: UsedFromTheStart(Tied()), strategy)
    assert strategy.report().steps_replayed == 0
    assert strategy.report().reasons[Reason.SHARED_PARAMETER] > 0


@pytest.mark.parametrize("what", ["argument", "result"])
def test_what_is_written_before_the_backward_does_not_reach_it(what: str) -> None:
    class Writes(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            result = self.net(batch[0])
            loss = F.mse_loss(result * 1, batch[1])
            if batch_idx == 6:
                (batch[0] if what == "argument" else result.detach()).zero_()
            return loss

    def make() -> LightningModule:
        return Writes(nn.Sequential(nn.Linear(4, 1), nn.Tanh()))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(make, "auto")
    strategy = replaying()
    fit(make, strategy)
    assert strategy.report().steps_replayed == STEPS - 4


def test_gradients_are_the_same_tensors_in_each_step() -> None:
    seen: list[int] = []

    class Marks(Regression):
        def on_after_backward(self) -> None:
            gradient = self.net[0].weight.grad
            seen.append(getattr(gradient, "marked_in", -1))
            gradient.marked_in = self.trainer.global_step

    fit(lambda: Marks(make_net()), "auto")
    assert seen == [-1] * STEPS
    seen.clear()
    fit(lambda: Marks(make_net()), replaying())
    assert seen == [-1] * 5 + list(range(4, STEPS - 1))


def test_other_results_with_gradients_are_computed_natively() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(inputs), self.right(inputs)

    class Alternating(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            left, right = self.net(batch[0])
            return F.mse_loss(left if batch_idx != 6 else right, batch[1])

    assert fit_both(lambda: Alternating(TwoHeads())).report().reasons[Reason.COTANGENTS] == 1


# -- shapes and memory -------------------------------------------------------------------------------------------


def test_a_smaller_last_batch_is_native() -> None:
    report = fit_both(lambda: Regression(make_net()), loader(4 * STEPS + 1)).report()

    assert report.reasons[Reason.LAST_BATCH] == 1
    assert report.steps_replayed == STEPS - 4


def test_dropout_of_a_recurrent_network_is_native_on_cuda() -> None:
    finding = find_hidden_state([("net", nn.LSTM(4, 4, num_layers=2, dropout=0.5))], torch.device("cuda"))

    assert finding is not None
    assert finding.reason is Reason.HIDDEN_STATE


def test_shapes_beyond_the_budget_are_native() -> None:
    class Shrinking(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            rows = 4 if batch_idx < 6 else 3
            return super().training_step([part[:rows] for part in batch], batch_idx)

    report = fit_both(lambda: Shrinking(make_net()), max_recordings=1).report()

    assert report.reasons[Reason.BUDGET] + report.reasons[Reason.LAST_BATCH] == STEPS - 6
    assert len(report.recordings) == 1


def test_a_part_in_evaluation_mode_is_native() -> None:
    class Evaluated(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.net.eval()
            return super().training_step(batch, batch_idx)

    assert fit_both(lambda: Evaluated(make_net())).report().reasons == {Reason.UNRECORDED_MODE: STEPS}


def test_gradient_buffers_take_the_bytes_of_the_parameters() -> None:
    class Measuring(Regression):
        buffers_bytes = 0

        def on_train_end(self) -> None:
            (region,) = self.trainer.strategy._runner.regions
            held = [buffer for buffer in region.buffers.buffers if buffer is not None]
            self.buffers_bytes = sum(buffer.nbytes for buffer in held)

    strategy = replaying()
    module = fit(lambda: Measuring(make_net()), strategy)

    assert module.buffers_bytes == sum(parameter.nbytes for parameter in module.parameters())
    assert all(recording.pool_bytes > 0 for recording in strategy.report().recordings)


def test_recordings_are_given_back_after_fit() -> None:
    strategy = replaying()
    fit(lambda: Regression(make_net()), strategy)

    assert strategy._runner is None
    assert len(strategy.report().recordings) == 1
