# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Fits that are native as a whole: equal to native, with the reason, one warning, or an error on request."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_replay import NotReplayedError, Reason, ReplayStrategy, ReplayWarning
from tests.parity.harness import Arm, Learner, PoisonedStrategy, batches, check_native, mlp, run_both, tape

pytestmark = pytest.mark.filterwarnings("ignore")


class Manual(Learner):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.step(self, batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class NoOptimizer(Learner):
    def configure_optimizers(self) -> None:
        return None


class Iterates(Learner):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return self.step(self, batch, batch_idx)


class OwnBackward(Learner):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class HookedNet(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inner = mlp()
        target = self.inner[0] if inside else self
        target.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs)


class Syncs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs) * (2 if inputs.mean() > 0 else 1)


class Logs(Learner):
    """Logs from the network's own code, which is the LightningModule's forward here."""

    def forward(self, inputs: Any) -> Any:
        self.log("mean", inputs.mean())
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


FITS: dict[str, tuple[Any, Reason, dict[str, Any]]] = {
    "manual optimization": (Manual, Reason.MANUAL_OPTIMIZATION, {}),
    "no optimizer": (lambda: NoOptimizer(mlp()), Reason.NO_OPTIMIZER, {}),
    "anomaly detection": (lambda: Learner(mlp()), Reason.DETECT_ANOMALY, {"detect_anomaly": True}),
    "dataloader_iter": (lambda: Iterates(mlp()), Reason.DATALOADER_ITER, {}),
    "backward of its own": (lambda: OwnBackward(mlp()), Reason.OVERRIDDEN_BACKWARD, {}),
    "LBFGS": (
        lambda: Learner(mlp(0.0), optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)),
        Reason.OPTIMIZER,
        {},
    ),
    "hook": (lambda: Learner(HookedNet(False)), Reason.HOOKS, {}),
    "hook inside": (lambda: Learner(HookedNet(True)), Reason.HOOKS, {}),
    "host sync": (lambda: Learner(Syncs()), Reason.HOST_SYNC, {}),
    "logs inside": (lambda: Logs(mlp()), Reason.LOG_IN_REGION, {"whole": "self"}),
}


@pytest.mark.parametrize("name", FITS)
def test_equal_to_native_with_the_reason(name: str) -> None:
    make, reason, options = FITS[name]

    check_native(make, reason, **options)


@pytest.mark.parametrize("name", FITS)
def test_error_on_request(name: str) -> None:
    make, reason, options = FITS[name]
    options = {key: value for key, value in options.items() if key != "whole"}

    arm = Arm(make, batches(), tape(on_native="error"), **options)

    assert isinstance(arm.error, NotReplayedError)
    assert arm.error.finding.reason is reason
    assert "to do:" in str(arm.error)
    assert all("forward" not in module.__dict__ for module in arm.modules[0].modules())


@pytest.mark.parametrize("name", ["manual optimization", "host sync", "hook"])
def test_one_warning_a_reason(name: str) -> None:
    make, reason, options = FITS[name]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Arm(make, batches(), tape(on_native="warn"), **options)

    messages = [str(warning.message) for warning in caught if issubclass(warning.category, ReplayWarning)]
    assert len([message for message in messages if f"[{reason.value}]" in message]) == 1


def test_compiled_lightning_module() -> None:
    module = Learner(mlp())
    module._compiler_ctx = {"compiler": "dynamo"}  # what lightning.pytorch.utilities.compile.from_compiled leaves

    arm = Arm(lambda: module, batches(), tape())

    assert arm.trace is not None
    assert arm.trace.report.reasons == {Reason.COMPILED_MODULE: 7}


def test_off_cuda_one_clear_warning_and_native() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native, replay = run_both(lambda: Learner(mlp()), strategy=ReplayStrategy())

    assert native.trace is not None
    assert replay.trace is not None
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, ReplayWarning)]
    assert len(messages) == 1
    assert "not a CUDA device" in messages[0]
    assert 'backend="tape"' in messages[0]
    assert replay.trace.report.reasons == {Reason.NO_CUDA: 7}
    assert replay.trace.actions == ["native"] * 7


def test_off_cuda_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        arm = Arm(lambda: Learner(mlp()), batches(), ReplayStrategy(on_native="ignore"))

    assert arm.error is None


def test_a_healthy_run_neither_warns_nor_raises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplayWarning)
        arm = Arm(lambda: Learner(mlp()), batches(), tape(on_native="warn"))
    strict = Arm(lambda: Learner(mlp()), batches(), tape(on_native="error"))

    assert arm.error is None
    assert strict.error is None


def test_strategy_by_name() -> None:
    arm = Arm(lambda: Learner(mlp()), batches(), "replay")

    assert arm.trace is not None
    assert arm.trace.report.steps_total == 7


def test_report_of_a_run() -> None:
    arm = Arm(lambda: Learner(mlp()), batches(), tape())

    assert arm.trace is not None
    report = arm.trace.report
    assert (report.steps_total, report.steps_replayed, report.steps_native) == (7, 4, 3)
    assert report.reasons == {Reason.WARM_UP: 2, Reason.RECORDING: 1}
    (recording,) = report.recordings
    assert (recording.region, recording.replays, recording.certified) == ("net", 4, "bitwise")
    assert recording.capture_seconds > 0
    assert recording.pool_bytes > 0
    text = str(report)
    assert "7 in all, 4 replayed" in text
    assert "(5, 6) float32" in text
    assert report.as_dict()["reasons"] == {"warm_up": 2, "recording": 1}


def test_certification_modes() -> None:
    for mode, expected in (("off", "off"), ("bitwise", "bitwise"), ("auto", "bitwise")):
        _, replay = run_both(lambda: Learner(mlp()), strategy=tape(certify=mode))
        assert replay.trace is not None
        assert [recording.certified for recording in replay.trace.report.recordings] == [expected]


def test_invalidated_on_request() -> None:
    strategy = tape()

    def invalidate(module: Any) -> None:
        if module.trainer.strategy is strategy:
            strategy.invalidate("the test asks for it")

    _, replay = run_both(
        lambda: Learner(mlp(), events={4: invalidate}),
        strategy=strategy,
        steps=10,
    )

    assert replay.trace is not None
    assert replay.trace.actions == ["native", "native", "record", "replay", "replay"] * 2
    assert replay.trace.report.reasons[Reason.INVALIDATED] == 1


__all__ = ["PoisonedStrategy"]
