# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One warning a reason and fit, at a line of the user's own."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_replay import Reason, ReplayWarning
from tests.parity.harness import FEATURES, Learner, batches, loader, mlp, tape

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "max_epochs": 3,
}
STEPS = 20


class Waits(nn.Module):
    """Reads a value back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.layer(inputs)
        return inputs if inputs.sum().item() < 1e9 else -inputs


class Counts(Waits):
    """Sets an attribute."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        return self.layer(inputs)


def warned_in(action: Callable[[], None]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [warning for warning in caught if issubclass(warning.category, ReplayWarning)]


def fit(trainer: Trainer, module: Learner) -> None:
    trainer.fit(module, *loader(batches(), STEPS))


def three_regions(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    for part in module.net[:-1]:
        inputs = part(inputs)
    return nn.functional.cross_entropy(module.net[-1](inputs), labels)


def reasons_of(said: list[warnings.WarningMessage]) -> list[str]:
    return sorted(str(warning.message).partition("[")[2].partition("]")[0] for warning in said)


def test_one_warning_a_reason_in_many_steps_of_several_regions() -> None:
    net = nn.ModuleList([Waits(), Waits(), Counts(), Counts(), mlp()])
    strategy = tape(on_native="warn")

    said = warned_in(lambda: fit(Trainer(strategy=strategy, **QUIET), Learner(net, three_regions)))

    reasons = reasons_of(said)
    assert reasons == sorted(set(reasons))
    assert {"attribute_written", "host_sync"} <= set(reasons)
    assert strategy.report().reasons[Reason.HOST_SYNC] > 2 * STEPS
    assert strategy.report().steps_replayed > STEPS


def test_another_fit_says_it_again() -> None:
    strategy = tape(on_native="warn")

    for _ in range(2):
        said = warned_in(lambda: fit(Trainer(strategy=strategy, **QUIET), Learner(nn.Sequential(Waits(), mlp()))))
        assert reasons_of(said).count("host_sync") == 1


def test_a_warning_points_at_a_line_of_the_user() -> None:
    strategy = tape(on_native="warn")
    module = Learner(nn.ModuleList([Waits(), mlp()]), three_regions)

    caught = warned_in(lambda: fit(Trainer(strategy=strategy, **QUIET), module))

    (said,) = [warning for warning in caught if "[host_sync]" in str(warning.message)]
    own = [inspect.getsourcelines(code) for code in (fit, three_regions)]
    lines = {first + offset for source, first in own for offset in range(len(source))}
    assert said.filename == __file__
    assert said.lineno in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device the fit is not native as a whole")
def test_a_native_fit_warns_at_the_call_of_fit() -> None:
    strategy = tape(on_native="warn", backend="auto")

    (said,) = warned_in(lambda: fit(Trainer(strategy=strategy, **QUIET), Learner(mlp())))

    assert said.filename == __file__
    assert said.lineno == inspect.getsourcelines(fit)[1] + 1
    assert "[no_cuda]" in str(said.message)


class OwnClipping(Learner):
    """Clips without Lightning's helper."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def test_clipping_that_stays_native_is_said_once() -> None:
    strategy = tape(on_native="warn")
    trainer = Trainer(strategy=strategy, gradient_clip_val=1.0, **QUIET)

    said = warned_in(lambda: fit(trainer, OwnClipping(mlp())))

    assert reasons_of(said) == ["norm_overridden"]
    assert said[0].filename == __file__
