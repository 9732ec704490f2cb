# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Whatever a step reads, changes or advances beside its batch: found, or the run is not the native one."""

import copy
import dataclasses
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_replay import Reason
from tests.parity.harness import NotEqualError, batches, mlp, run_both, tape

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12
CHANGE_AT = 6


class Step(LightningModule):
    """Scales its loss by what `weight` returns; `change` makes that another number in the middle of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.prepare()

    def prepare(self) -> None: ...

    def weight(self) -> Any:
        return 1.0

    def change(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels) * self.weight()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == CHANGE_AT:
            self.change()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Hparams(Step):
    def prepare(self) -> None:
        self.save_hyperparameters({"weight": 2.0})

    def weight(self) -> Any:
        return self.hparams.weight

    def change(self) -> None:
        self.hparams.weight = 0.5


class Decorated(Step):
    def prepare(self) -> None:
        self.w = 2.0

    @torch.no_grad()
    def weight(self) -> Any:
        return self.w

    def change(self) -> None:
        self.w = 0.5


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class DecoratedByTheUser(Decorated):
    @logged
    def weight(self) -> Any:
        return self.w


@dataclasses.dataclass(slots=True)
class Config:
    w: float = 2.0


class Slots(Step):
    def prepare(self) -> None:
        self.config = Config()

    def weight(self) -> Any:
        return self.config.w

    def change(self) -> None:
        self.config.w = 0.5


class Scale:
    def __init__(self) -> None:
        self.value = 2.0

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * self.value

    def current(self) -> float:
        return self.value


class Operator(Step):
    def prepare(self) -> None:
        self.scale = Scale()

    def weight(self) -> Any:
        return self.scale

    def change(self) -> None:
        self.scale.value = 0.5


SCALE = Scale()


class GlobalObject(Step):
    def prepare(self) -> None:
        SCALE.value = 2.0

    def weight(self) -> Any:
        return SCALE.current()

    def change(self) -> None:
        SCALE.value = 0.5


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, one: float) -> float:
        return one * self.factor


class ModuleInAList(Step):
    def prepare(self) -> None:
        self.hidden = [Hidden()]

    def weight(self) -> Any:
        return self.hidden[0](1.0)

    def change(self) -> None:
        self.hidden[0].factor = 0.5


settings = types.ModuleType("settings_of_a_test")
settings.inner = types.SimpleNamespace  # type: ignore[attr-defined]
sys.modules["settings_of_a_test"] = settings


class ImportedInTheStep(Step):
    def prepare(self) -> None:
        settings.w = 2.0  # type: ignore[attr-defined]

    def weight(self) -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return settings_of_a_test.w

    def change(self) -> None:
        settings.w = 0.5  # type: ignore[attr-defined]


def weight_of(options: dict[str, float] = {"w": 2.0}) -> float:  # noqa: B006
    return options["w"]


class DefaultArgument(Step):
    def prepare(self) -> None:
        weight_of.__defaults__[0]["w"] = 2.0  # type: ignore[index]

    def weight(self) -> Any:
        return weight_of()

    def change(self) -> None:
        weight_of.__defaults__[0]["w"] = 0.5  # type: ignore[index]


class Getter(Step):
    """Looks an attribute up by an object that knows its name, which no code does."""

    get = staticmethod(operator.attrgetter("config.w"))

    def prepare(self) -> None:
        self.config = Config()

    def weight(self) -> Any:
        return self.get(self)

    def change(self) -> None:
        self.config.w = 0.5


class Caller(Getter):
    get = staticmethod(operator.methodcaller("scaled", 2, by=3.0))

    def scaled(self, factor: int, by: float) -> float:
        return factor * by * self.config.w


class SwappedMemory(Step):
    def prepare(self) -> None:
        self.plain = torch.tensor(2.0)

    def weight(self) -> Any:
        return self.plain

    def change(self) -> None:
        self.plain.data = torch.tensor(0.5)


class Array(Step):
    def prepare(self) -> None:
        self.array = np.array([2.0])

    def weight(self) -> Any:
        return float(self.array[0])

    def change(self) -> None:
        self.array[0] = 0.5


class KeptOptimizer(Step):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.kept = super().configure_optimizers()
        return self.kept

    def weight(self) -> Any:
        return self.kept.param_groups[0]["lr"] * 20

    def change(self) -> None:
        self.kept.param_groups[0]["lr"] = 0.01


class KeptUnderAnyName(KeptOptimizer):
    def weight(self) -> Any:
        return getattr(self, "".join(["ke", "pt"])).param_groups[0]["lr"] * 20


class OptimizerInADict(KeptOptimizer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizers_by_name = {"only": Step.configure_optimizers(self)}
        return self.optimizers_by_name["only"]

    def weight(self) -> Any:
        return self.optimizers_by_name["only"].param_groups[0]["lr"] * 20

    def change(self) -> None:
        self.optimizers_by_name["only"].param_groups[0]["lr"] = 0.01


class OptimizerInAClosure(OptimizerInADict):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        self.rate = lambda: optimizer.param_groups[0]["lr"] * 20
        return optimizer

    def weight(self) -> Any:
        return self.rate()


running: list[Trainer] = []


class TrainerInAGlobal(Step):
    def on_train_start(self) -> None:
        running[:] = [self.trainer]

    def weight(self) -> Any:
        return 2.0 if running[0].global_step > CHANGE_AT else 1.0


class KeptCallback(Step):
    def prepare(self) -> None:
        self.stopping = EarlyStopping("loss")

    def weight(self) -> Any:
        return 1.0 + self.stopping.wait_count

    def change(self) -> None:
        self.stopping.wait_count += 1


class PlainTensorInPlace(Step):
    def prepare(self) -> None:
        self.count = torch.zeros(())

    def weight(self) -> Any:
        self.count += 1
        return self.count * 0.1


class IteratorOfTensors(Step):
    def prepare(self) -> None:
        self.weights = iter([torch.tensor(float(i + 1)) for i in range(100)])

    def weight(self) -> Any:
        return next(self.weights)


class OwnRandom(Step):
    def prepare(self) -> None:
        self.random = random.Random(1)

    def weight(self) -> Any:
        return 2.0 if self.random.random() < 0.5 else 1.0


class OwnNumpyRandom(Step):
    def prepare(self) -> None:
        self.generator = np.random.default_rng(1)

    def weight(self) -> Any:
        return float(self.generator.random())


class PlainOutput(Step):
    def prepare(self) -> None:
        self.names = itertools.cycle("abc")
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "name": next(self.names)}


class ZeroesInTheStep(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.zero_grad()
        return super().training_step(batch, batch_idx)


class CopiesInTheStep(Step):
    """A teacher, copied from the network in the middle of a step in which the network is watched."""

    def prepare(self) -> None:
        self.teacher: list[nn.Module] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        if not self.teacher:
            self.teacher.append(copy.deepcopy(self.net))
            assert pickle.dumps(self.net)
        with torch.no_grad():
            target = self.teacher[0](inputs)
        logits = self.net(inputs)
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, target)


class CopiesItself(Step):
    """A snapshot of the LightningModule, made while its log and its Trainer are watched."""

    def prepare(self) -> None:
        self.made: list[LightningModule] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made, self.made = self.made, []
        copied = copy.deepcopy(self)
        read = pickle.loads(pickle.dumps(self))
        self.made = made or [copied, read]
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def by_parity(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, batch: Any, batch_idx: int) -> Any:
        return function(self, batch, batch_idx) * (2.0 if batch_idx % 2 else 1.0)

    return wrapper


class IndexBehindADecorator(Step):
    @by_parity
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


SEEN_AGAIN = [
    Hparams,
    Decorated,
    DecoratedByTheUser,
    Slots,
    Operator,
    GlobalObject,
    ModuleInAList,
    ImportedInTheStep,
    DefaultArgument,
    Getter,
    Caller,
    SwappedMemory,
    Array,
]
REFUSED = [
    (KeptOptimizer, Reason.TRAINER_READ),
    (KeptUnderAnyName, Reason.TRAINER_READ),
    (OptimizerInADict, Reason.TRAINER_READ),
    (OptimizerInAClosure, Reason.TRAINER_READ),
    (TrainerInAGlobal, Reason.TRAINER_READ),
    (KeptCallback, Reason.TRAINER_READ),
    (PlainTensorInPlace, Reason.ATTRIBUTE_WRITTEN),
    (IteratorOfTensors, Reason.ATTRIBUTE_WRITTEN),
    (OwnRandom, Reason.HOST_RANDOM),
    (OwnNumpyRandom, Reason.HOST_RANDOM),
    (PlainOutput, Reason.ATTRIBUTE_WRITTEN),
    (ZeroesInTheStep, Reason.ATTRIBUTE_WRITTEN),
    (IndexBehindADecorator, Reason.BATCH_INDEX),
]


@pytest.mark.parametrize("make", SEEN_AGAIN, ids=lambda make: make.__name__)
def test_a_change_is_seen_and_the_step_recorded_again(make: type[Step]) -> None:
    _, replay = run_both(make, batches(), strategy=tape(scope="step"), steps=STEPS)

    assert replay.trace is not None
    report = replay.trace.report
    assert Reason.MODULE_CHANGED in report.reasons, report
    assert [recording.region for recording in report.recordings] == ["training_step"] * 2
    assert replay.trace.actions[CHANGE_AT] == "replay"
    assert replay.trace.actions[-1] == "replay"


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_cannot_be_replayed_is_refused(make: type[Step], reason: Reason) -> None:
    accumulate = 2 if make is ZeroesInTheStep else 1
    _, replay = run_both(make, batches(), strategy=tape(scope="step"), steps=STEPS, accumulate_grad_batches=accumulate)

    assert replay.trace is not None
    report = replay.trace.report
    assert reason in report.reasons, report
    assert "training_step" not in {recording.region for recording in report.recordings}


@pytest.mark.parametrize("scope", ["network", "step"])
def test_a_copy_made_in_a_step_is_a_module_of_its_own(scope: str) -> None:
    _, replay = run_both(CopiesInTheStep, batches(), strategy=tape(scope=scope), steps=STEPS)

    assert replay.trace is not None
    assert "replay" in replay.trace.actions
    teacher = replay.modules[0].teacher[0]  # type: ignore[index, union-attr]
    assert "forward" not in teacher.__dict__


@pytest.mark.parametrize("scope", ["network", "step"])
def test_a_copy_of_the_module_made_in_a_step_holds_nothing_of_ours(scope: str) -> None:
    native, replay = run_both(CopiesItself, batches(), strategy=tape(scope=scope), steps=STEPS)

    assert replay.trace is not None
    assert "replay" in replay.trace.actions
    copied, read = replay.modules[0].made  # type: ignore[misc, union-attr]
    assert copied.__dict__.keys() == native.modules[0].made[0].__dict__.keys()  # type: ignore[index, union-attr]
    assert read.log.func is type(read).log  # as a forward, which a pickle keeps as that of its class
    read.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException):  # Lightning's own, outside of a fit
        read.log("loss", 1.0)


class ReplacesTheStep(Step):
    def twice(self, batch: Any, batch_idx: int) -> Tensor:
        return Step.training_step(self, batch, batch_idx) * 2

    def change(self) -> None:
        self.training_step = self.twice  # type: ignore[method-assign]


class ReplacesTheStepOfItsClass(ReplacesTheStep):
    def change(self) -> None:
        type(self).training_step = type(self).twice  # type: ignore[method-assign]


@pytest.mark.parametrize("made", [ReplacesTheStep, ReplacesTheStepOfItsClass])
def test_a_step_that_is_replaced_is_not_replayed_as_it_was(made: type[Step]) -> None:
    _, replay = run_both(lambda: type("Made", (made,), {})(), batches(), strategy=tape(scope="step"), steps=STEPS)

    assert replay.trace is not None
    report = replay.trace.report
    assert Reason.REPLACED_FORWARD in report.reasons
    assert {recording.region for recording in report.recordings} == {"training_step", "net"}


def test_comparison_of_the_runs_bites() -> None:
    def other() -> Iterator[type[Step]]:
        yield Step
        yield Hparams

    kinds = other()
    with pytest.raises(NotEqualError):
        run_both(lambda: next(kinds)(), batches(), strategy=tape(scope="step"), steps=STEPS)
