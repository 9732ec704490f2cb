# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clipping by norm from CUDA graphs: the same bits, and no wait of the host between backward and update."""

import random

import pytest
import torch
from lightning.pytorch import Callback

from lightning_replay import ReplayPrecision, ReplayStrategy
from lightning_replay.norm import COPY_CALLS, STABLE_CALLS, NormClipper
from lightning_replay.reasons import Reason
from tests.helpers.bits import assert_same
from tests.helpers.models import MLPModule, cycled, feature_batches
from tests.helpers.norm import (
    COUNTS,
    DTYPES,
    LEVELS,
    NATIVE_CALLS,
    WHERE,
    Twins,
    assert_same_quickly,
    check_bits,
    check_limits,
)
from tests.helpers.trace import Trace, compare, run_fit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LARGE = 200_003  # several chunks of torch's multi-tensor kernels, and not a multiple of a vector load
STEPS = 30
WAITS = ("Synchronize", "cudaMemcpy")  # what .item() of a CUDA tensor ends in; Adam reads its step counts from the CPU


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_bits(dtype, count, level, where):
    check_bits("cuda", "cuda", dtype, count, level, where, LARGE if count == COUNTS[0] else 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_limits_are_not_rounded_otherwise(dtype):
    draw = random.Random(5)
    norms = [0.0, float("inf"), float("nan"), 1e-6, *(10 ** draw.uniform(-5, 4) for _ in range(8))]
    limits = [float("inf"), float("nan"), 1e-46, 1e39, 3.4028235e38, *(10 ** draw.uniform(-5, 5) for _ in range(100))]
    check_limits("cuda", dtype, norms, limits)


@pytest.mark.parametrize("where", WHERE)
def test_mixed_dtypes_and_layouts(where):
    clipper = NormClipper("cuda", STABLE_CALLS)
    clipper.begin()
    twins = Twins(clipper, 12, torch.float32, "cuda", where)
    for side in (twins.native, twins.replayed):
        side += [torch.nn.Parameter(torch.ones(9, 5, dtype=dtype, device="cuda")) for dtype in DTYPES]
    for _ in range(NATIVE_CALLS + 3):
        twins.step()
    assert clipper.replays == 3


def test_a_failed_capture_leaves_native_clipping_and_the_device_usable(monkeypatch):
    from lightning_replay import norm

    real = norm._scale

    def waits(gradients, total, limit):
        real(gradients, total, limit)
        if torch.cuda.is_current_stream_capturing():
            float(total)  # not possible while capturing

    monkeypatch.setattr(norm, "_scale", waits)
    clipper = NormClipper("cuda", on_finding=lambda finding: None)
    clipper.begin()
    twins = Twins(clipper, 12, torch.float32, "cuda", "buffers")
    for _ in range(6):
        twins.step()
    assert clipper.native[Reason.CAPTURE_FAILED] == 3
    assert torch.randn(3, device="cuda").isfinite().all()
    monkeypatch.undo()
    clipper.begin()
    for _ in range(NATIVE_CALLS + 2):
        twins.step()
    assert clipper.replays > 0


def test_another_stream_is_native():
    clipper = NormClipper("cuda")
    clipper.begin()
    twins = Twins(clipper, 12, torch.float32, "cuda", "buffers")
    for _ in range(NATIVE_CALLS):
        twins.step()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        twins.step()
    torch.cuda.synchronize()
    assert (clipper.replays, clipper.native[Reason.NORM_DRIFT]) == (0, 1)
    twins.step()
    assert clipper.replays == 1


def test_new_gradients_in_the_same_memory_are_clipped_in_place():
    clipper = NormClipper("cuda")
    clipper.begin()
    parameters = [torch.nn.Parameter(torch.randn(n, 7, device="cuda")) for n in range(1, 63)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    memory = [torch.empty_like(parameter).detach() for parameter in parameters]
    for _ in range(COPY_CALLS + 6):
        for parameter, twin, home in zip(parameters, twins, memory, strict=True):
            parameter.grad = home.normal_().detach()  # a new tensor, as the allocator makes in memory just given back
            twin.grad.copy_(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(twins, 1.0)
        clipper.clip(parameters, 1.0)
        assert_same(norm, clipper.last_norm)
        assert_same_quickly([p.grad for p in twins], [p.grad for p in parameters], "gradients")
    assert clipper.native == {Reason.WARM_UP: COPY_CALLS, Reason.RECORDING: 1}
    assert (clipper.replays, clipper.copied) == (5, 0)


def test_memory_is_given_back():
    def used():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    clipper = NormClipper("cuda", STABLE_CALLS)
    levels = []
    for _ in range(3):  # the first fit leaves the capture stream its workspace, once for the process
        clipper.begin()
        twins = Twins(clipper, 62, torch.float32, "cuda", "new_memory", LARGE)
        replays = clipper.replays
        for _ in range(NATIVE_CALLS + 2):
            twins.step()
        assert clipper.replays > replays
        during = used()
        clipper.end()
        levels.append(used())
        assert levels[-1] < during
        del twins
    assert levels[2] <= levels[1]


def _fit(strategy, precision, plugin=None, **options):
    options.setdefault("max_steps", STEPS)
    if plugin is not None:
        precision, options["plugins"] = None, [plugin]
    return run_fit(
        lambda: MLPModule(width=64, features=32),
        lambda: cycled(feature_batches(16, 32), 2 * STEPS),
        strategy,
        precision,
        accelerator="gpu",
        gradients="fingerprint",
        **options,
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"])
def test_fits_equal_native(precision, accumulate):
    native = _fit("auto", precision, accumulate_grad_batches=accumulate)
    replay = _fit(lambda: ReplayStrategy(warmup_steps=1), precision, accumulate_grad_batches=accumulate)
    compare(native, replay)
    assert replay.report.norm_replays >= STEPS // 2
    assert replay.report.norm_copied == 0
    plugin = ReplayPrecision(precision)
    compare(native, _fit("auto", None, plugin, accumulate_grad_batches=accumulate))
    assert plugin.norm_replays >= STEPS // 2
    assert plugin.norm_replays + sum(plugin.norm_native.values()) == STEPS


def test_an_overflow_skips_the_update_as_native():
    class Overflowing(Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.fit_loop.epoch_loop.batch_idx == 25:
                next(pl_module.parameters()).grad[0, 0] = float("inf")

    native = _fit("auto", "16-mixed", callbacks=[Overflowing()])
    replay = _fit(lambda: ReplayStrategy(warmup_steps=1), "16-mixed", callbacks=[Overflowing()])
    compare(native, replay)
    assert replay.report.norm_replays >= STEPS // 2
    assert native.scaler["scale"] < _fit("auto", "16-mixed").scaler["scale"]


class _Window(Callback):
    """Profiles from the end of one backward to the end of its update."""

    def __init__(self, step):
        self.step, self.events, self.profiler = step, [], None

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.__enter__()
            self.mark = torch.profiler.record_function("window")
            self.mark.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.profiler is not None:
            self.norm = trainer.precision_plugin.last_gradient_norm
            self.mark.__exit__(None, None, None)
            self.profiler.__exit__(None, None, None)
            window = next(e for e in self.profiler.events() if e.name == "window" and e.device_type.name == "CPU")
            span = window.time_range
            self.events = [
                e.name
                for e in self.profiler.events()
                if e.device_type.name == "CPU" and span.start <= e.time_range.start and e.time_range.end <= span.end
            ]
            self.profiler = None


@pytest.mark.parametrize("arm", ["strategy", "plugin"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_host_does_not_wait_between_backward_and_update(arm, precision):
    """Reading the norm is inside the window too."""
    window = _Window(STEPS - 2)
    plugin = ReplayPrecision(precision) if arm == "plugin" else None
    strategy = "auto" if plugin else lambda: ReplayStrategy(warmup_steps=1)
    replay = _fit(strategy, precision, plugin, callbacks=[window], trace=Trace("off"))
    replays = plugin.norm_replays if plugin else replay.report.norm_replays
    assert replays >= STEPS // 2
    launches = [name for name in window.events if "GraphLaunch" in name]
    waits = [name for name in window.events if any(part in name for part in WAITS) and "Async" not in name]
    assert len(launches) == 1, window.events
    assert not waits, waits
    assert window.norm.device.type == "cuda"
