# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Shapes, strides and dtypes: the same answers with torch's own guard and without it."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_replay.guards import layouts
from lightning_replay.guards.layouts import Layouts, Memory


@pytest.fixture(params=[True, False], ids=["guard", "no guard"], autouse=True)
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    assert layouts._CAN_GUARD  # else this torch is compared more slowly than need be
    monkeypatch.setattr(layouts, "_CAN_GUARD", request.param)
    return bool(request.param)


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.ones(2, 3)), torch.zeros(1, 3), torch.zeros(()), torch.zeros(0, 3), torch.zeros(4)]


def set_data(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    def set_it(tensors: list[Tensor]) -> None:
        tensors[index].data = change(tensors[index].data)

    return set_it


CHANGES: dict[str, tuple[int, Callable[[list[Tensor]], Any]]] = {
    "shape": (0, set_data(0, lambda t: t[:1])),
    "strides": (0, set_data(0, lambda t: t.as_strided((2, 3), (1, 2)))),
    "stride of one element": (1, set_data(1, lambda t: t.as_strided((1, 3), (1, 1)))),
    "stride of no element": (3, set_data(3, lambda t: t.as_strided((0, 3), (7, 1)))),
    "dtype": (2, set_data(2, lambda t: t.view(torch.int32))),
    "dimensions": (2, lambda t: t[2].unsqueeze_(0)),
    "transposed": (0, lambda t: torch.no_grad()(t[0].t_)()),
    "resized": (4, lambda t: t[4].resize_(3)),
    "set": (4, lambda t: t[4].set_(torch.zeros(2, 2))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str) -> None:
    index, change = CHANGES[name]
    watched = tensors()
    state = Layouts(watched)
    assert state.are_same()
    assert state.are_same()

    change(watched)

    assert not state.are_same()
    assert [i for i in range(len(watched)) if state.then(i) != state.now(i)] == [index]
    assert state.now(index) == (watched[index].shape, watched[index].stride(), watched[index].dtype)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, torch.inference_mode, Passing],
    ids=["autocast", "no_grad", "inference_mode", "dispatch mode"],
)
def test_circumstances_are_no_change(around: Callable[[], AbstractContextManager[Any]]) -> None:
    watched = tensors()
    state = Layouts(watched)
    for _ in range(2):
        assert state.are_same()
        with around():
            assert state.are_same()

    set_data(0, lambda t: t[:1])(watched)

    assert not state.are_same()
    with around():
        assert not state.are_same()


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad])
def test_trainability_is_noted_and_no_change(around: Callable[[], AbstractContextManager[Any]]) -> None:
    watched = tensors()
    state = Layouts(watched)
    assert state.trainable == (True, False, False, False, False)
    for trainable in (True, False, True, False, False):
        for tensor in (watched[0], watched[4]):
            tensor.requires_grad_(trainable)
        with torch.no_grad():
            watched[0].add_(1)
        with around():
            assert state.are_same()
        assert state.trainable == (trainable, False, False, False, trainable)


def test_a_parameter_unfrozen_where_gradients_are_off() -> None:
    watched = tensors()
    watched[0].requires_grad_(False)
    state = Layouts(watched)
    assert state.are_same()

    watched[0].requires_grad_(True)

    with torch.no_grad():
        assert state.are_same()
    assert state.trainable[0]


def test_each_circumstance_is_read_once(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = tensors()
    state = Layouts(watched)
    reads = []
    read = layouts._read
    monkeypatch.setattr(layouts, "_read", lambda tensors: reads.append(1) or read(tensors))
    for _ in range(5):
        assert state.are_same()
        with torch.autocast("cpu", torch.bfloat16):
            assert state.are_same()
    assert len(reads) == (2 if guarded else 10)


@pytest.mark.parametrize("index", [0, 1, 2, 4])  # the one without elements lies nowhere
def test_another_address(index: int) -> None:
    watched = tensors()
    memory = Memory(watched)
    assert memory.is_same()

    set_data(index, lambda t: torch.cat([t.flatten(), t.new_zeros(1)])[1:])(watched)

    assert not memory.is_same()
    assert [i for i in range(len(watched)) if memory.moved(i)] == [index]


def test_no_tensors() -> None:
    state = Layouts([])
    assert state.are_same()
    assert state.are_same()


@pytest.mark.parametrize("answer", [True, False, AttributeError, TypeError])
def test_a_guard_that_does_not_see_is_not_used(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def guard(tensors: Any) -> Callable[..., bool]:
        if isinstance(answer, type):
            raise answer
        return lambda *_: answer

    assert layouts._can_guard()
    monkeypatch.setattr(layouts, "_guard", guard)
    assert not layouts._can_guard()
