# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A parity case: one module trained natively twice and with replay once, judged as bits.

The second native run is the control. Where native does not repeat itself there is nothing for a replay to equal, and
the verdict says so instead of passing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from tests.helpers.trace import GradientMode, Loaders, Trace, TraceResult, run_fit, unequal


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        name: as it shall be called in reports.
        make_module: takes ``fused``, whether AdamW is to be the fused one, and gives the module.
        make_data: takes the number of steps and gives the loaders.
    """

    name: str
    make_module: Callable[[bool], LightningModule]
    make_data: Callable[[int], Loaders]


@dataclass
class Verdict:
    """What came of a case. ``equal`` means nothing unless ``control_equal``."""

    model: str
    precision: str
    steps: int
    steps_replayed: int
    control_equal: bool
    equal: bool
    differences: list[str]
    control_differences: list[str]
    nondeterministic: list[str]
    seconds_native: float
    seconds_replay: float
    report: dict[str, Any]
    replay: TraceResult = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns what a receipt keeps: everything but the trace."""
        kept = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "replay"}
        return {**kept, "actions": _runs(self.replay.actions)}


def run_case(
    case: Case,
    precision: str,
    make_strategy: Callable[[], Strategy],
    *,
    accelerator: str,
    steps: int,
    gradients: GradientMode,
    make_trace: Callable[[GradientMode], Trace] = Trace,
    **options: Any,
) -> Verdict:
    """Trains native, native, replay from the same seed and compares them."""
    # With mixed precision Lightning refuses to clip for optimizers that unscale gradients themselves, the fused ones.
    fused = precision == "32-true"

    def arm(strategy: str | Callable[[], Strategy]) -> TraceResult:
        return run_fit(
            lambda: case.make_module(fused),
            lambda: case.make_data(steps),
            strategy,
            precision,
            accelerator=accelerator,
            max_steps=steps // options.get("accumulate_grad_batches", 1),
            trace=make_trace(gradients),
            **options,
        )

    native, control, replay = arm("auto"), arm("auto"), arm(make_strategy)
    control_differences, differences = unequal(native, control), unequal(native, replay)
    return Verdict(
        model=case.name,
        precision=precision,
        steps=len(replay.actions),
        steps_replayed=replay.actions.count("replay"),
        control_equal=not control_differences,
        equal=not differences,
        differences=differences,
        control_differences=control_differences,
        nondeterministic=sorted({*native.nondeterministic, *control.nondeterministic}),
        seconds_native=round(native.seconds, 3),
        seconds_replay=round(replay.seconds, 3),
        report=plain(replay.report.as_dict()),
        replay=replay,
    )


def check(verdict: Verdict, warmup_steps: int = 3) -> None:
    """Asserts a case's bar: replayed as scripted, reported as it happened, and equal to native to the last bit.

    Where the native control differs from native, equality is not asserted: the verdict's ``control_equal`` carries
    that into the receipt.

    Raises:
        AssertionError: saying which of these failed.
    """
    trace = verdict.replay
    counts = (trace.report.steps_total, trace.report.steps_replayed)
    assert counts == (len(trace.actions), trace.actions.count("replay")), f"{counts} reported, ran {trace.actions}"
    assert trace.report.steps_native == trace.report.steps_total - trace.report.steps_replayed

    if not verdict.control_equal:
        return

    context = f"native repeats itself; declared nondeterministic: {verdict.nondeterministic or 'nothing'}"
    assert verdict.equal, "\n  ".join([f"{verdict.model}, {verdict.precision}: {context}", *verdict.differences])
    actions = trace.full_size_actions
    script = ["native"] * warmup_steps + ["record"] + ["replay"] * (len(actions) - warmup_steps - 1)
    assert actions == script, f"{_runs(actions)}; reasons: {verdict.report.get('reasons')}"
    after_warmup = len(actions) - warmup_steps
    replayed = actions.count("replay")
    assert replayed >= 0.9 * after_warmup, f"{replayed} of {after_warmup} full-size steps after warm-up were replayed"


def _runs(actions: list[str | None]) -> str:
    """Writes an action script as "native x 3, record, replay x 56"."""
    runs: list[tuple[str | None, int]] = []
    for action in actions:
        if runs and runs[-1][0] == action:
            runs[-1] = (action, runs[-1][1] + 1)
        else:
            runs.append((action, 1))
    return ", ".join(f"{action} x {count}" if count > 1 else str(action) for action, count in runs)


def plain(value: Any) -> Any:
    """Turns a report into what JSON can hold."""
    if isinstance(value, dict):
        return {str(getattr(key, "value", key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
