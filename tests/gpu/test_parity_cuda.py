# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Training with CUDA graphs is native training, to the last bit.

Every case trains native, native, replay from one seed: the second native run says whether native repeats itself.
"""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.helpers.models import (
    DigitsCNN,
    GPTModule,
    TimmModule,
    cycled,
    digits_data,
    image_batches,
    token_batches,
)
from tests.helpers.parity import Case, Verdict, check, run_case
from tests.helpers.trace import ZeroGradTrace

# Lightning and torch advise on workers and nondeterminism at every turn here; the traces keep what matters.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

STEPS = 60
Keep = Callable[[Verdict], None]


def _timm(model: str, **options: Any) -> Case:
    return Case(
        model + ("" if options.get("fused_attention", True) else " (plain attention)"),
        lambda fused: TimmModule(model, fused=fused, **options),
        lambda steps: cycled(image_batches(), steps),
    )


def _gpt(name: str, attention: Any) -> Case:
    return Case(
        name,
        lambda fused: GPTModule(attention=attention, fused=fused),
        lambda steps: cycled(token_batches(), steps),
    )


# Real images, a ragged last batch and validation in each epoch.
DIGITS = Case("digits", lambda fused: DigitsCNN(fused=fused), lambda steps: digits_data())
GPT = _gpt("gpt", "fused")
# Fused attention may be nondeterministic, and then its control excuses a case. The same networks with attention spelled
# out are deterministic in every precision.
GPT_PLAIN = _gpt("gpt (plain attention)", "plain")
VIT_PLAIN = _timm("vit_tiny_patch16_224", fused_attention=False)
CASES = [
    DIGITS,
    _timm("resnet18"),
    _timm("efficientnet_b0"),
    _timm("vit_tiny_patch16_224"),
    VIT_PLAIN,
    GPT,
    GPT_PLAIN,
]


def _run(
    case: Case,
    precision: str,
    keep: Keep,
    steps: int = STEPS,
    scope: Literal["network", "step"] = "network",
    **options: Any,
) -> Verdict:
    from lightning_replay import ReplayStrategy

    verdict = run_case(
        case,
        precision,
        lambda: ReplayStrategy(scope=scope, on_native="ignore"),
        accelerator="gpu",
        steps=steps,
        gradients="fingerprint",
        **options,
    )
    keep(verdict)
    regions = {recording.region for recording in verdict.replay.report.recordings}
    assert (regions == {"training_step"}) == (scope == "step"), regions
    return verdict


@pytest.mark.parametrize("scope", ["network", "step"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" (plain attention)", "_plain"))
def test_equals_native(case: Case, precision: str, scope: Literal["network", "step"], keep: Keep) -> None:
    if case not in (DIGITS, GPT, GPT_PLAIN):
        pytest.importorskip("timm")

    named = case if scope == "network" else _renamed(case, f"{case.name}, whole step")
    verdict = _run(named, precision, keep, scope=scope)

    check(verdict)
    if not verdict.control_equal:
        print(f"native does not repeat itself, equality not asserted: {verdict.control_differences}")


def test_live_gradients_survive_the_next_forward(keep: Keep) -> None:
    """A callback reads ``.grad`` between the next forward and ``zero_grad``: it must be the last step's, clipped."""
    verdict = _run(_renamed(GPT_PLAIN, "gradients read late"), "bf16-mixed", keep, 20, make_trace=ZeroGradTrace)

    assert verdict.control_equal, verdict.control_differences
    assert verdict.replay.gradients_at_zero, "the hook has seen no gradient"
    check(verdict)


def test_accumulation(keep: Keep) -> None:
    """Two micro-batches an optimizer step: the second backward adds to the first one's gradients."""
    verdict = _run(_renamed(GPT_PLAIN, "accumulation of 2"), "bf16-mixed", keep, 20, accumulate_grad_batches=2)

    assert verdict.control_equal, verdict.control_differences
    assert len(verdict.replay.gradients) == 10
    check(verdict)


def _renamed(case: Case, name: str) -> Case:
    return Case(name, case.make_module, case.make_data)
