# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The comparison itself: what it must tell apart, and what it must not."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.bits import assert_same, bits, same_bits
from tests.helpers.digest import Fingerprint, sha256
from tests.helpers.models import DigitsCNN, MLPModule, cycled, digits_data, feature_batches
from tests.helpers.trace import GradientMode, Trace, TraceResult, ZeroGradTrace, compare, run_fit, unequal

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int64,
]


@dataclass
class _Pair:
    left: Any
    right: Any


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    other = tensor.clone()
    other[1, 0] = 1

    assert same_bits(tensor, tensor.clone())
    assert not same_bits(tensor, other)
    assert bits(tensor).data_ptr() != tensor.data_ptr()
    assert not bits(tensor[0, 0]).is_floating_point()


def test_layout_does_not_matter_to_bits() -> None:
    images = torch.randn(2, 3, 4, 4)

    assert same_bits(images, images.to(memory_format=torch.channels_last))


def test_equal_nans_are_equal() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)

    assert same_bits(quiet, quiet.clone())
    assert not same_bits(quiet, payload)


ZERO = torch.zeros(2, 3)
MINUS = ZERO.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(-0.0))


@pytest.mark.parametrize(
    ("native", "replay", "message"),
    [
        (ZERO, MINUS, r"root\[1, 2\]: native 0\.0 \(0x00000000\), replay -0\.0 \(0x80000000\) \(1 of 6"),
        (ZERO, None, r"root: native torch\.float32 of shape \(2, 3\), replay None"),
        ({"a": [ZERO, None]}, {"a": [ZERO, ZERO]}, r"root\.a\.1: native None, replay torch"),
        (_Pair(1, (ZERO,)), _Pair(1, (MINUS,)), r"root\.right\.0\[1, 2\]"),
        (ZERO, ZERO.double(), r"root: native torch\.float32.*replay torch\.float64"),
        (ZERO, ZERO[0], r"replay torch\.float32 of shape \(3,\)"),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), "keys differ, in their order"),
        ({"a": 1}, {"a": 1, "b": 2}, r"only in replay \['b'\]"),
        ([1], [1, 2], "native has 1 items, replay 2"),
        (0.0, -0.0, "native 0.0"),
        (1, True, "native is a int, replay a bool"),
        (np.zeros(2), np.array([0.0, -0.0]), r"root\[1\]"),
    ],
)
def test_differences_are_told_and_placed(native: Any, replay: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same(native, replay, "root")


def test_fingerprints_see_one_bit_of_one_tensor() -> None:
    tensors = [torch.randn(3, 5), torch.zeros(7), torch.randn(4).bfloat16(), torch.zeros(0), torch.randn(())]
    fingerprint = Fingerprint()
    before = fingerprint(tensors)

    assert torch.equal(before, fingerprint([tensor.clone() for tensor in tensors]))
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            changed = [other.clone() for other in tensors]
            changed[position].view(-1)[-1].neg_()
            unequal_rows = (fingerprint(changed) != before).all(dim=1)
            assert unequal_rows.nonzero().flatten().tolist() == [position]
    assert fingerprint([]).shape == (0, 2)


def test_fingerprints_draw_no_random_numbers() -> None:
    state = torch.get_rng_state()
    Fingerprint()([torch.zeros(100)])
    assert torch.equal(state, torch.get_rng_state())


def test_sha256_knows_dtype_and_shape() -> None:
    hashes = {sha256(ZERO), sha256(MINUS), sha256(ZERO.to(torch.int32)), sha256(ZERO.reshape(6)), sha256(ZERO.double())}
    assert len(hashes) == 5


def _fit(seed: int = 7, gradients: GradientMode = "sha256", **options: Any) -> TraceResult:
    options.setdefault("max_steps", 6)
    return run_fit(
        lambda: MLPModule(width=8, features=4),
        lambda: cycled(feature_batches(4, 4), 6),
        seed=seed,
        gradients=gradients,
        **options,
    )


@pytest.mark.parametrize("gradients", ["sha256", "fingerprint", "copy"])
def test_a_native_run_repeats_itself_and_another_seed_does_not(gradients: GradientMode) -> None:
    native = _fit(gradients=gradients)

    assert len(native.gradients) == len(native.outputs) == 6
    compare(native, _fit(gradients=gradients))
    sections = {difference.split(".")[0] for difference in unequal(native, _fit(seed=8, gradients=gradients))}
    assert {"outputs", "gradients", "parameters", "last_gradients", "optimizers", "rng"} <= sections


def test_absent_gradients_are_not_zeros() -> None:
    class Unused(MLPModule):
        def __init__(self) -> None:
            super().__init__(width=8, features=4)
            self.unused = torch.nn.Parameter(torch.zeros(3))

    class ZeroInstead(Unused):
        def on_after_backward(self) -> None:
            self.unused.grad = torch.zeros(3)

    data = lambda: cycled(feature_batches(4, 4), 2)  # noqa: E731
    native, replay = run_fit(Unused, data, max_steps=2), run_fit(ZeroInstead, data, max_steps=2)

    assert native.gradients[0]["unused"] is None
    with pytest.raises(AssertionError, match=r"gradients\.0\.unused: native None"):
        compare(native, replay, ["gradients"])


def test_writing_into_a_held_loss_is_seen() -> None:
    class Overwriting(Trace):
        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            if len(self.result.actions) == 3:
                self._held[0][1].add_(1.0)

    assert unequal(_fit(), _fit(trace=Overwriting())) == ["outputs.0.loss: changed after its step"]


def test_gradients_seen_before_zero_grad_are_those_of_the_step_before_clipped() -> None:
    result = _fit(trace=ZeroGradTrace("copy"), gradient_clip_val=None)

    assert result.gradients_at_zero[0]["net.0.weight"] is None
    assert_same(result.gradients[:-1], result.gradients_at_zero[1:])


def test_digits_have_a_ragged_batch_and_validation() -> None:
    result = run_fit(lambda: DigitsCNN(width=2), lambda: digits_data(limit=100), max_epochs=2)

    assert [shapes[0][0] for shapes in result.shapes] == [64, 36] * 2
    assert len(result.full_size_steps) == 2
    assert "val_loss" in result.metrics


def test_declared_nondeterminism_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def noisy(self: MLPModule, batch: Any, batch_idx: int) -> Tensor:
        warnings.warn("some_backward does not have a deterministic implementation, but you set ...", stacklevel=1)
        return plain(self, batch, batch_idx)

    plain = MLPModule.training_step
    monkeypatch.setattr(MLPModule, "training_step", noisy)

    before = torch.are_deterministic_algorithms_enabled()

    assert _fit().nondeterministic == ["some_backward"]
    assert torch.are_deterministic_algorithms_enabled() == before
