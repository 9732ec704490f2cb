# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The clipper by itself: the same bits as torch's clipping, and what it does when gradients change."""

import copy
import gc
import math
import pickle
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_replay import ReplayWarning, norm
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.guards.gradients import find_unsupported
from lightning_replay.norm import MAX_RERECORDS, STABLE_CALLS, NormClipper
from lightning_replay.reasons import Reason
from tests.helpers.bits import assert_same
from tests.helpers.norm import COUNTS, DTYPES, LEVELS, NATIVE_CALLS, WHERE, Twins, check_bits, check_limits

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.utils, "get_total_norm"), reason="this torch has no torch.nn.utils.get_total_norm"
)


def make(count=6, where="buffers", dtype=torch.float32, patience=STABLE_CALLS):
    clipper = NormClipper("tape", patience)
    clipper.begin()
    return clipper, Twins(clipper, count, dtype, "cpu", where)


def follow(monkeypatch):
    """Lets tapes be replayed on new tensors in recorded memory, as CUDA graphs are: here the twins keep it alive."""
    monkeypatch.setattr(NormClipper, "_follows", True)


def engage(twins):
    for _ in range(NATIVE_CALLS):
        twins.step()
    assert twins.clipper.is_engaged


def steps(twins, count=6, **options):
    for _ in range(count):
        twins.step(**options)


# -- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_bits(dtype, count, level, where, monkeypatch):
    if where == "same_memory":
        follow(monkeypatch)
    check_bits("tape", "cpu", dtype, count, level, where)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_limits_are_not_rounded_otherwise(dtype):
    draw = random.Random(5)
    norms = [0.0, math.inf, math.nan, 1e-6, *(10 ** draw.uniform(-5, 4) for _ in range(16))]
    limits = [math.inf, math.nan, 1e-46, 1e39, 3.4028235e38, *(10 ** draw.uniform(-5, 5) for _ in range(200))]
    check_limits("cpu", dtype, norms, limits)


@pytest.mark.parametrize("where", ["buffers", "new_memory"])
def test_mixed_dtypes(where):
    clipper, twins = make(where=where)
    for side in (twins.native, twins.replayed):
        side += [nn.Parameter(torch.ones(9, dtype=dtype)) for dtype in DTYPES]
    engage(twins)
    twins.step("above")
    twins.step("below")
    assert clipper.replays == 2


@pytest.mark.parametrize("where", ["buffers", "new_memory"])
def test_the_limit_of_the_moment_counts(where):
    clipper, twins = make(where=where)
    engage(twins)
    for limit in (0.1, 2, 1e6, 0.1, 0.25):
        twins.step(limit=limit)
    assert clipper.replays == 5


def test_a_norm_that_was_read_keeps_its_value():
    clipper, twins = make()
    engage(twins)
    twins.step()
    held, value = clipper.last_norm, float(clipper.last_norm)
    twins.step()
    assert clipper.replays == 2
    assert float(held) == value != float(clipper.last_norm)
    clipper.end()
    assert float(clipper.last_norm) > 0


def test_gradients_are_not_kept_alive():
    clipper, twins = make(where="new_memory")
    engage(twins)
    twins.step()
    references = [weakref.ref(p.grad) for p in twins.replayed]
    for parameter in twins.replayed:
        parameter.grad = None
    twins.held.clear()
    gc.collect()
    assert clipper.replays == 1
    assert all(reference() is None for reference in references)


# -- drift ---------------------------------------------------------------------------------------------------------


def test_new_tensors_at_each_step_end_on_copies():
    clipper, twins = make(patience=3)
    engage(twins)
    twins.where = "new_memory"
    steps(twins, 3)
    assert clipper.native == {Reason.WARM_UP: 2, Reason.RECORDING: 2, Reason.NORM_MOVED: 2}
    twins.step()
    assert (clipper.replays, clipper.copied) == (1, 1)


def test_stable_buffers_need_no_copies_any_more():
    clipper, twins = make(where="new_memory")
    engage(twins)
    twins.where = "buffers"
    steps(twins)
    assert clipper.native == {Reason.WARM_UP: 2, Reason.RECORDING: 2}
    assert (clipper.replays, clipper.copied) == (5, 2)


def test_new_tensors_in_the_same_memory_are_clipped_in_place(monkeypatch):
    follow(monkeypatch)
    clipper, twins = make(where="same_memory")
    engage(twins)
    steps(twins, 4)
    assert (clipper.replays, clipper.copied) == (4, 0)


def test_new_tensors_are_waited_for_as_they_may_become_buffers(monkeypatch):
    follow(monkeypatch)
    clipper, twins = make(where="same_memory", patience=8)
    steps(twins, 4)
    twins.where = "buffers"
    steps(twins, 4)
    assert clipper.native == {Reason.WARM_UP: 5, Reason.RECORDING: 1}
    assert (clipper.replays, clipper.copied) == (2, 0)


def test_a_tape_is_not_followed():
    clipper, twins = make(where="same_memory")
    engage(twins)
    steps(twins, 4)
    assert (clipper.replays, clipper.copied) == (4, 4)


def test_a_few_places_in_turn_have_a_recording_each(monkeypatch):
    follow(monkeypatch)
    clipper, twins = make(where="same_memory", patience=4)
    places = [{}, {}]
    for step in range(12):
        twins.buffers = places[step % 2]
        twins.step()
    assert clipper.native == {Reason.WARM_UP: 4, Reason.RECORDING: 2}
    assert (clipper.replays, clipper.copied) == (6, 0)


def test_the_last_recording_fits_all_places(monkeypatch):
    follow(monkeypatch)
    clipper, twins = make(where="same_memory", patience=3)
    for _ in range(MAX_RERECORDS + 2):
        twins.buffers = {}
        steps(twins, 4)
    assert clipper.native[Reason.RECORDING] == 1 + MAX_RERECORDS
    assert (clipper.replays, clipper.copied) == (MAX_RERECORDS + 4, 1 + 4)
    assert clipper.refusal is None


def test_another_layout_in_the_same_memory_is_seen(monkeypatch):
    follow(monkeypatch)
    clipper, twins = make(where="same_memory")
    engage(twins)
    twins.give("above")
    for side in (twins.native, twins.replayed):
        side[2].grad = side[2].grad.view(5, 3).t()
    expected = torch.nn.utils.clip_grad_norm_(twins.native, 1.0)
    clipper.clip(twins.replayed, 1.0)
    assert_same(expected, clipper.last_norm)
    assert_same([p.grad for p in twins.native], [p.grad for p in twins.replayed])
    assert clipper.native[Reason.NORM_DRIFT] == 1
    assert "gradient 2 of 6" in clipper.messages[Reason.NORM_DRIFT]


@pytest.mark.parametrize("where", ["buffers", "new_memory"])
def test_a_missing_gradient_makes_one_call_native(where):
    clipper, twins = make(where=where)
    engage(twins)
    twins.step()
    twins.step(absent=frozenset({2}))
    assert clipper.native[Reason.NORM_DRIFT] == 1
    assert "expected: 6 gradients" in clipper.messages[Reason.NORM_DRIFT]
    twins.step()
    assert clipper.replays == 2


def test_another_address_in_the_same_tensor_is_seen():
    clipper, twins = make()
    engage(twins)
    twins.replayed[0].grad.data = twins.replayed[0].grad.data.clone()
    twins.step()
    assert clipper.native[Reason.NORM_MOVED] == 1
    assert clipper.replays == 0


def test_another_layout_is_seen_on_copies():
    clipper, twins = make(where="new_memory")
    engage(twins)
    twins.give("above")
    twins.native[2].grad = twins.native[2].grad.t().contiguous().t()
    twins.replayed[2].grad = twins.replayed[2].grad.t().contiguous().t()
    expected = torch.nn.utils.clip_grad_norm_(twins.native, 1.0)
    clipper.clip(twins.replayed, 1.0)
    assert_same(expected, clipper.last_norm)
    assert clipper.native[Reason.NORM_DRIFT] == 1


def test_another_stream_is_seen(monkeypatch):
    clipper, twins = make()
    engage(twins)
    monkeypatch.setattr(norm, "current_stream", lambda device: 7)
    twins.step()
    assert clipper.native[Reason.NORM_DRIFT] == 1
    assert "another stream" in clipper.messages[Reason.NORM_DRIFT]


def test_a_call_in_other_memory_between_replays_is_harmless(recwarn):
    clipper, twins = make()
    engage(twins)
    twins.step()
    twins.where = "new_memory"
    twins.step()
    twins.where = "buffers"
    twins.step()
    assert clipper.native == {Reason.WARM_UP: 2, Reason.RECORDING: 1, Reason.NORM_MOVED: 1}
    assert (clipper.replays, clipper.copied) == (2, 0)
    clipper.end()
    assert Reason.NORM_MOVED.is_harmless
    assert not recwarn.list


def change_often(twins):
    for missing in range(MAX_RERECORDS + 2):
        steps(twins, 5, absent=frozenset({missing}))


def test_changing_too_often_retires_once_with_one_message():
    clipper, twins = make(where="new_memory")
    engage(twins)
    with pytest.warns(ReplayWarning, match="norm_retired") as caught:
        change_often(twins)
    assert len(caught) == 1
    assert clipper.native[Reason.RECORDING] == 1 + MAX_RERECORDS
    assert clipper.native[Reason.NORM_RETIRED] > 1
    assert not clipper.is_engaged
    assert clipper.replays == MAX_RERECORDS * 2


def test_an_unsteady_pattern_is_never_recorded_and_says_so():
    clipper, twins = make(where="new_memory")
    for step in range(10):
        twins.step(absent=frozenset({step % 2}))
    with pytest.warns(ReplayWarning, match="norm_drift"):
        clipper.end()
    assert (clipper.replays, clipper.native[Reason.RECORDING]) == (0, 0)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["warm_up", "capture"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no"), Reason.CAPTURE_FAILED), (torch.OutOfMemoryError("full"), Reason.OUT_OF_MEMORY)],
    ids=["error", "memory"],
)
@pytest.mark.parametrize("where", ["buffers", "new_memory"])
def test_a_failed_recording_leaves_native_clipping(monkeypatch, method, error, reason, where):
    clipper, twins = make(where=where)
    real = getattr(TapeBackend, method)

    def fail_late(self, *args, **options):
        real(self, *args, **options)
        raise error

    monkeypatch.setattr(TapeBackend, method, fail_late)
    with pytest.warns(ReplayWarning, match=reason.value) as caught:
        steps(twins)
    assert len(caught) == 1
    assert not clipper.is_engaged
    assert clipper.native == {Reason.WARM_UP: 2, Reason.RECORDING: 1, reason: 3}


def test_a_recording_that_differs_is_not_used(monkeypatch):
    clipper, twins = make()
    real = norm._scale
    monkeypatch.setattr(norm, "_scale", lambda gradients, total, limit: real(gradients, total, limit * 1.001))
    with pytest.warns(ReplayWarning, match=r"clipped gradient 0: native and replay have"):
        steps(twins)
    assert clipper.native[Reason.MISMATCH] == 3


def test_nothing_is_published_before_success(monkeypatch):
    clipper, twins = make()
    engaged = []
    real = norm._certify
    monkeypatch.setattr(norm, "_certify", lambda *args: engaged.append(clipper.is_engaged) or real(*args))
    engage(twins)
    assert engaged == [False]


# -- native routes -------------------------------------------------------------------------------------------------


def refused(twins, reason, spoil, calls=5):
    """Clips spoiled gradients a few times and asserts that each call was native, for this reason, and right."""
    for _ in range(calls):
        twins.give("above")
        for side in (twins.native, twins.replayed):
            spoil(side)
        expected = torch.nn.utils.clip_grad_norm_(twins.native, 0.5)
        twins.clipper.clip(twins.replayed, 0.5)
        assert_same(expected, twins.clipper.last_norm)
        for left, right in zip(twins.native, twins.replayed, strict=True):
            assert_same(left.grad.to_dense(), right.grad.to_dense())
            left.grad = right.grad = None
    assert twins.clipper.native == {reason: calls}
    with pytest.warns(ReplayWarning, match=reason.value):
        twins.clipper.end()


def offset(side):
    side[1].grad = torch.cat([torch.zeros(16), side[1].grad])[16:]


def gaps(side):
    side[2].grad = side[2].grad.repeat(1, 2)[:, ::2]


def expanded(side):
    side[1].grad = side[1].grad[:1].expand(7)


def history(side):
    side[1].grad.requires_grad_()


class Marked(torch.Tensor):
    pass


def subclass(side):
    side[1].grad = side[1].grad.as_subclass(Marked)


def shared(side):
    flat = torch.cat([side[2].grad.view(-1), torch.zeros(5)])
    side[2].grad = flat[:15].view(3, 5)
    side[1].grad = flat[8:15]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (offset, Reason.NORM_LAYOUT),
        (gaps, Reason.NORM_LAYOUT),
        (history, Reason.NORM_LAYOUT),
        (subclass, Reason.NORM_LAYOUT),
        (shared, Reason.NORM_ALIASED),
    ],
)
def test_unusual_gradients_are_native(spoil, reason):
    _, twins = make()
    refused(twins, reason, spoil)


def test_an_expanded_gradient_is_refused_and_native_raises_as_ever():
    gradient = torch.ones(1).expand(7)
    assert find_unsupported([gradient]).reason is Reason.NORM_LAYOUT


def test_a_parameter_given_twice_is_scaled_twice():
    clipper, twins = make()
    native, replayed = [*twins.native, twins.native[4]], [*twins.replayed, twins.replayed[4]]
    for _ in range(5):
        twins.give("above")
        expected = torch.nn.utils.clip_grad_norm_(native, 0.5)
        clipper.clip(replayed, 0.5)
        assert_same(expected, clipper.last_norm)
        assert_same([p.grad for p in native], [p.grad for p in replayed])
    assert clipper.native == {Reason.NORM_ALIASED: 5}


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (torch.ones(3).to_sparse(), Reason.NORM_SPARSE),
        (torch.ones(3, device="meta"), Reason.NORM_DEVICES),
        (torch.ones(3, dtype=torch.complex64), Reason.NORM_LAYOUT),
    ],
    ids=["sparse", "devices", "complex"],
)
def test_what_native_may_not_know_either_is_native_and_counted(gradient, reason):
    """In whatever way it ends: torch's multi-tensor norm knows no sparse gradients, and the meta device no values."""
    clipper, twins = make()
    engage(twins)
    twins.give("above")
    for side in (twins.native, twins.replayed):
        side.append(nn.Parameter(torch.ones(3, dtype=gradient.dtype, device=gradient.device)))
        side[-1].grad = gradient.clone()

    def outcome(clip, parameters):
        try:
            clip(parameters, 1.0)
        except Exception as error:
            return type(error), str(error)
        return [p.grad for p in parameters]

    expected = outcome(torch.nn.utils.clip_grad_norm_, twins.native)
    assert_same(expected, outcome(clipper.clip, twins.replayed))
    assert clipper.native[reason] == 1
    assert clipper.replays == 0


def test_asking_for_an_error_is_native_and_raises():
    clipper, twins = make()
    engage(twins)
    twins.give("above")
    clipper.clip(twins.replayed, 1.0, error_if_nonfinite=True)
    assert clipper.native[Reason.NORM_ERROR_IF_NONFINITE] == 1
    twins.give("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clipper.clip(twins.replayed, 1.0, error_if_nonfinite=True)
    assert clipper.replays == 0


def test_an_older_torch_is_native(monkeypatch):
    clipper, twins = make()
    twins.limit = lambda level: 0.5
    monkeypatch.delattr(torch.nn.utils, "clip_grads_with_norm_")
    for _ in range(5):
        twins.step()
    assert clipper.native == {Reason.NORM_TORCH: 5}


def test_a_replaced_torch_function_is_called(monkeypatch):
    clipper, twins = make()
    real, calls = torch.nn.utils.clip_grad_norm_, []

    def replaced(parameters, *args, **options):
        calls.append(1)
        return real(parameters, *args, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", replaced)
    steps(twins, 5)
    assert clipper.native == {Reason.NORM_OVERRIDDEN: 5}
    assert len(calls) == 10
    monkeypatch.undo()
    steps(twins, 4)
    assert clipper.replays == 1
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", replaced)
    twins.step()
    assert (clipper.replays, len(calls)) == (1, 12)


def test_modes_are_native():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    clipper, twins = make()
    engage(twins)
    with Watch():
        twins.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twins.step()
    assert clipper.native[Reason.NORM_MODE] == 2
    twins.step()
    assert clipper.replays == 1


def test_a_cpu_is_native_and_says_so_once():
    clipper = NormClipper("auto")
    clipper.begin()
    twins = Twins(clipper, 6, torch.float32, "cpu", "buffers")
    for _ in range(6):
        twins.step()
    with pytest.warns(ReplayWarning, match="no_cuda") as caught:
        clipper.end()
    assert len(caught) == 1
    assert clipper.native == {Reason.NO_CUDA: 6}


def test_nothing_to_clip_is_not_counted():
    clipper, twins = make()
    clipper.clip(twins.replayed, 1.0)
    assert not clipper.native
    assert float(clipper.last_norm) == 0.0


# -- copies and ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_have_the_options_alone(copied):
    clipper, twins = make(patience=4)
    engage(twins)
    other = copied(clipper)
    assert (other.backend, other.patience, other.replays, other.is_engaged) == ("tape", 4, 0, False)
    assert clipper.is_engaged


def test_a_short_fit_is_quiet(recwarn):
    clipper, twins = make()
    twins.step()
    clipper.end()
    assert not recwarn.list


def test_the_next_fit_starts_anew():
    clipper, twins = make()
    engage(twins)
    twins.step()
    clipper.end()
    clipper.begin()
    assert clipper.last_norm is None
    engage(twins)
    twins.step()
    assert (clipper.replays, clipper.native[Reason.RECORDING]) == (2, 2)
