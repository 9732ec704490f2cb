# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Compare a trial replay with native runs of the same call from the same state."""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_replay.engine.bits import first_difference, same_bits

MAX_NATIVE_RUNS = 10
"""Native runs beside the step that trained that one recording may cost, the one before its capture included.

Some operations come out alike many times before they do not, so a replay that differs is not refused before that.
"""

MAX_REPLAYS = 4
"""Trial replays that a recording may cost, where one differs that should not."""

SHOWN_SPREAD = 4
"""How many times the distance between a few native runs others may be apart: each of many tensors is a draw."""

Trial = dict[str, Tensor | None]
"""Every value that one run of a call produced, by dotted name: results, gradients, written buffers."""

_ALERT = re.compile(r"(.+?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a certification.

    Attributes:
        equal: "bitwise", "nondeterministic" (as close as native runs are to each other) or "off"; empty if the replay
            must not be used.
        where: Dotted name of the first value that differs.
        difference: Its first difference.
        operations: Operations that declare themselves nondeterministic.
    """

    equal: Literal["bitwise", "nondeterministic", "off", ""]
    where: str = ""
    difference: str = ""
    operations: tuple[str, ...] = ()


@contextlib.contextmanager
def nondeterminism_alerts() -> Iterator[list[str]]:
    """Collects, for the length of a block, the operations by which torch promises no equal results.

    Torch tells only while deterministic algorithms are asked for, and of some operations only once a process.

    Yields:
        A list that holds their names at the end.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module that has properties
    fills = settings.fill_uninitialized_memory
    always = torch.is_warn_always_enabled()
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False
        torch.set_warn_always(True)
        try:
            yield names
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            settings.fill_uninitialized_memory = fills
            torch.set_warn_always(always)
            alerts = (_ALERT.match(str(warning.message)) for warning in caught)
            names.extend(dict.fromkeys(alert[1] for alert in alerts if alert is not None))


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
    find_declared: Callable[[], Sequence[str]],
    replay_again: Callable[[], Trial],
) -> Verdict:
    """Judges a trial replay.

    Where native makes no promise, none can be kept: a difference no larger than those among native runs, or than what
    another order of a sum makes, is accepted then. Native makes none where an operation declares itself
    nondeterministic, even if native runs happen to be equal, and where they are seen to differ, unless deterministic
    algorithms are on. Some kernels differ seldom and say nothing of it; so if native runs are equal all the same, a
    difference as small as that is accepted if another trial replay of the same graphs has the bits of native, the step
    that trained included.

    Args:
        mode: "bitwise" accepts nothing but equal bits.
        native: Native runs of the same call made already: the step that trained, which may lack values, and the
            warm-up.
        replay: The trial replay from the same state.
        run_native: Makes another native run from the same state.
        find_declared: Makes another one that names the operations that declare themselves nondeterministic.
        replay_again: Makes another trial replay from the same state.

    Returns:
        Whether the replay may be used, and otherwise the first difference.
    """
    different = {name: text for run in native for name, text in differences(run, replay).items()}
    if not different:
        return Verdict("bitwise")
    name, text = next(iter(different.items()))
    refused = Verdict("", name, f"native and replay have {text}")
    if mode == "bitwise" or any("None" in text for text in different.values()):
        return refused
    operations = tuple(find_declared())
    if not operations and torch.are_deterministic_algorithms_enabled():
        return refused
    runs = list(native)
    promised = not operations
    for _ in range(MAX_NATIVE_RUNS - 2):
        runs.append(run_native())
        promised = promised and not differences(runs[1], runs[-1])
        if promised:
            continue
        if (far := _find_far(different, runs, replay)) is None:
            return Verdict("nondeterministic", operations=operations)
        refused = Verdict("", far, f"native and replay have {different[far]}")
    if promised and _find_far(different, runs, replay) is None:
        for _ in range(MAX_REPLAYS - 1):
            again = replay_again()
            if not any(differences(run, again) for run in runs[:2]):
                return Verdict("nondeterministic")
    return refused


def _find_far(names: Iterable[str], runs: Sequence[Trial], replay: Trial) -> str | None:
    """Finds a value of a replay that is farther from native runs than these are from each other."""
    for name in names:
        values = [run[name] for run in runs if name in run]
        distance = min(_distance(value, replay[name]) for value in values)
        spread = max(_distance(a, b) for a in values for b in values)
        if distance > max(SHOWN_SPREAD * spread, _rounding(values[0])):
            return name
    return None


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def _distance(left: Tensor | None, right: Tensor | None) -> float:
    assert left is not None and right is not None
    if not left.is_floating_point() and not left.is_complex():
        return float((left != right).sum())
    finite = left.isfinite() & right.isfinite()
    if not same_bits(left[~finite], right[~finite]):
        return math.inf
    return _largest(_precise(left[finite]) - _precise(right[finite]))


def _rounding(value: Tensor | None) -> float:
    """Returns what reordering a sum may change: a few units in the last place of the largest value."""
    assert value is not None
    if not value.is_floating_point() and not value.is_complex():
        return 0.0
    return 16 * torch.finfo(value.dtype).eps * _largest(_precise(value[value.isfinite()]))


def _precise(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
