# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Arms that are compared do the same training, and what an option switches on is on in all of them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything

from tests.benchmarks import worker
from tests.benchmarks.full_iteration import Iteration
from tests.benchmarks.workloads import WORKLOADS
from tests.helpers.digest import sha256

STEPS = 14


def fit(arm: str, *words: str) -> dict[str, Any]:
    """One tiny fit on the tape."""
    given = ["--arm", arm, "--out", "-", "--device", "cpu", "--backend", "tape", "--models", "tiny"]
    given += ["--steps", str(STEPS), "--skip", "8", "--window", "3", *words]
    return worker._fit(worker.parser().parse_args(given), "tiny")


@pytest.mark.parametrize("update", ["foreach", "fused"])
def test_full_iteration_is_the_same_training(update: str) -> None:
    native = fit("native", "--update", update)
    seed_everything(7, verbose=False)
    iteration = Iteration(WORKLOADS["tiny"].make_module(update == "fused"), "bf16-mixed", clip=1.0)
    batches = WORKLOADS["tiny"].make_batches()

    losses = [iteration(batches[step % len(batches)]).detach() for step in range(STEPS)]

    assert sha256(torch.stack(losses)) == native["losses_sha256"]


def test_full_iteration_needs_cuda() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        fit("full_iteration")


def test_a_fused_update_is_clipped_from_the_recording() -> None:
    native, replay = fit("native", "--update", "fused"), fit("replay", "--update", "fused")

    assert replay["timed_actions"] == {"replay": 6}
    assert replay["norm_replays"] >= 6
    assert replay["weights_sha256"] == native["weights_sha256"]
    assert replay["weights_sha256"] != fit("replay", "--update", "fused", "--clip", "0")["weights_sha256"]


@pytest.mark.parametrize(("arm", "action"), [("native", "None"), ("replay", "replay")])
def test_each_step_logs_its_loss_on_request(arm: str, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    log = LightningModule.log
    monkeypatch.setattr(LightningModule, "log", lambda *args, **kwargs: logged.append(args[1]) or log(*args, **kwargs))

    silent = fit(arm)
    assert logged == []
    run = fit(arm, "--log")

    assert logged == ["loss"] * STEPS
    assert run["timed_actions"] == {action: 6}
    assert run["losses_sha256"] == silent["losses_sha256"]


@pytest.mark.parametrize("update", ["foreach", "fused"])
def test_update_and_clipping_are_timed_apart(update: str) -> None:
    run = fit("replay", "--update", update)

    assert run["timed_actions"] == {"replay": 6}
    assert run["update_host_ms"] > 0
    assert run["clip_host_ms"] > 0
