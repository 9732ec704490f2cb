# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Compare a trial replay with native runs of the same call from the same state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_replay.engine.bits import first_difference, same_bits

MAX_NATIVE_RUNS = 3
"""Native runs, beside the step that trained, spent on telling nondeterminism from error."""

Trial = dict[str, Tensor | None]
"""Every value that one run of a call produced, by dotted name: results, gradients, written buffers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a certification.

    Attributes:
        equal: "bitwise", "nondeterministic" (as close as native runs are to each other) or "off".
        difference: The first difference, if the replay must not be used.
    """

    equal: Literal["bitwise", "nondeterministic", "off", ""]
    difference: str = ""
    names: list[str] = field(default_factory=list)


def differences(left: Trial, right: Trial) -> dict[str, str]:
    """Returns the first difference of each value that differs as bits, None against zero included."""
    found = {}
    for name, value in left.items():
        other = right.get(name)
        if value is None or other is None:
            if value is not other:
                found[name] = f"{_kind(value)} and {_kind(other)}"
        elif not same_bits(value, other):
            found[name] = first_difference(value, other)
    return found


def certify(
    mode: Literal["auto", "bitwise"],
    native: Sequence[Trial],
    replay: Trial,
    run_native: Callable[[], Trial],
    repeats: bool,
) -> Verdict:
    """Judges a trial replay.

    Args:
        mode: "bitwise" accepts nothing but equal bits.
        native: Native runs of the same call made already: the step that trained, and the warm-up.
        replay: The trial replay from the same state.
        run_native: Makes another native run from the same state.
        repeats: Native promises to repeat itself: deterministic algorithms are on.

    Returns:
        Equal bits with every native run, or a distance within native's own spread where native makes no promise.
    """
    different = {name: text for run in native for name, text in differences(run, replay).items()}
    if not different:
        return Verdict("bitwise")
    name, text = next(iter(different.items()))
    refused = Verdict("", f"{name}: native and replay have {text}", list(different))
    if mode == "bitwise" or repeats or any("None" in text for text in different.values()):
        return refused
    runs = list(native)
    while len(runs) < MAX_NATIVE_RUNS:
        runs.append(run_native())
    for name in different:
        distance = min(_distance(run[name], replay[name]) for run in runs)
        spread = max(_distance(a[name], b[name]) for a in runs for b in runs)
        if distance > max(4 * spread, _rounding(runs[0][name])):
            return refused
    return Verdict("nondeterministic", names=list(different))


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def _distance(left: Tensor | None, right: Tensor | None) -> float:
    assert left is not None and right is not None
    if not left.is_floating_point() and not left.is_complex():
        return float((left != right).sum())
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


def _rounding(value: Tensor | None) -> float:
    """Returns what reordering a sum may change: a few units in the last place of the largest value."""
    assert value is not None
    if not value.is_floating_point() or not value.numel():
        return 0.0

    return 16 * torch.finfo(value.dtype).eps * float(value.double().abs().max())
