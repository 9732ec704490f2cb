# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""N. Is it on, and does it help?"""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import NotReplayedError, Reason, ReplayStrategy
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, STEPS, Arm, Learner, batches, loader, mlp, run_both, script

pytestmark = pytest.mark.filterwarnings("ignore")


def detect(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """A loss over a number of boxes that changes from step to step."""
    logits = module.net(batch[0])
    boxes = 1 + batch_idx % 3
    return F.cross_entropy(logits[:boxes], batch[1][:boxes])


def multi_scale() -> Any:
    return loader([batch for size in (4, 6) for batch in batches(size=size, count=1)], 20)


def test_f51_the_report_names_networks_shapes_and_reasons(field: Field) -> None:
    trace = field.both(lambda: Learner(mlp(), detect), multi_scale)

    report = trace.report
    assert {recording.signature for recording in report.recordings} == {"(4, 6) float32", "(6, 6) float32"}
    assert all(recording.region == "net" and recording.replays for recording in report.recordings)
    assert report.steps_replayed + report.steps_native == report.steps_total == 20
    assert {Reason.WARM_UP, Reason.RECORDING} <= set(report.reasons)
    assert "net" in str(report)
    assert "(4, 6) float32" in str(report)


def test_f51_strict_mode_raises_at_the_first_native_step(field: Field) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs / inputs.abs().max().item())

    arm = Arm(lambda: Learner(Reads()), batches(), field.strategy(on_native="error"), accelerator=field.accelerator)
    assert isinstance(arm.error, NotReplayedError)
    assert "host_sync" in str(arm.error)


@pytest.mark.parametrize("bar", [False, True])
def test_f52_logged_values_with_and_without_a_bar(field: Field, bar: bool) -> None:
    class Logging(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True, on_step=True)
            return loss

    trace = field.replayed(lambda: Logging(mlp()), enable_progress_bar=bar)

    assert "loss" in trace.metrics


def autoencoder() -> Learner:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(module.net(batch[0]), batch[0])

    widths = (64, 32, 16, 8, 16, 32, 64)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return Learner(nn.Sequential(*layers), step)


# That replay is not slower either is measured by tests.benchmarks.sweep.


def test_f53_a_small_autoencoder_is_replayed(field: Field) -> None:
    trace = field.replayed(autoencoder, batches(64, size=32))

    assert len(trace.report.recordings) == 1


@pytest.mark.parametrize("size", [1, 8, 64])
def test_f54_every_step_is_replayed_after_capture(field: Field, size: int) -> None:
    def make() -> Learner:
        convolutions = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        return Learner(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 12 * 12, CLASSES)))

    trace = field.replayed(make, batches(3, 16, 16, size=size))

    assert len(trace.report.recordings) == 1


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q.flatten(-2), k.flatten(-2), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Llama(nn.Module):
    """Rotary embedding, SDPA, gated layers, and a head tied to the embedding."""

    def __init__(self, vocabulary: int = 16, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        frequencies = 1.0 / 100 ** (torch.arange(0, width // 2, 2) / (width // 2))
        angles = torch.outer(torch.arange(64), frequencies)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.turns[: tokens.shape[1]])
        return self.head(self.norm(hidden))


def predict(module: Any, batch: Any, batch_idx: int) -> Tensor:
    (tokens,) = batch
    return F.cross_entropy(module.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_f55_the_curve_of_a_small_language_model(field: Field) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randint(16, (4, 9), generator=generator),) for _ in range(6)]
    trace = field.replayed(lambda: Learner(Llama(), predict), data, steps=90 if field.on_gpu else 60)

    (groups,) = [optimizer["param_groups"] for optimizer in trace.optimizers]
    assert len(groups[0]["params"]) == len(set(groups[0]["params"])) == len(list(Llama().parameters()))


def test_f56_a_machine_without_a_device() -> None:
    strategy = ReplayStrategy(warmup_steps=2, on_native="ignore")
    _, replay = run_both(lambda: Learner(mlp()), batches(), strategy=strategy, accelerator="cpu")

    assert replay.trace is not None
    assert replay.trace.report.reasons == {Reason.NO_CUDA: STEPS}
    assert Reason.NO_CUDA in replay.trace.report.messages


def test_f56_manual_optimization(field: Field) -> None:
    class Manual(Learner):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    trace = field.native(Manual, Reason.MANUAL_OPTIMIZATION)

    assert list(trace.report.messages) == [Reason.MANUAL_OPTIMIZATION]


def test_f56_a_fit_too_short_to_record(field: Field) -> None:
    trace = field.both(lambda: Learner(mlp()), fast_dev_run=True)

    assert trace.actions == ["native"]
    assert set(trace.report.reasons) <= {Reason.WARM_UP, Reason.LAST_BATCH}


def test_f56_batch_normalization_is_no_obstacle(field: Field) -> None:
    trace = field.replayed(
        lambda: Learner(nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))
    )

    assert trace.actions == script()


def test_f56_a_compiled_network(gpu_field: Field) -> None:
    trace = gpu_field.both(lambda: Learner(torch.compile(mlp(0.0))), steps=10)

    assert "replay" in trace.actions or trace.report.messages
