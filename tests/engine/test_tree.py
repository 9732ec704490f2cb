# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Taking values apart and putting them together again."""

import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_replay.engine import tree
from tests.helpers.bits import same_bits


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Box:
    content: Any
    label: str = ""


@dataclass(frozen=True)
class Frozen:
    content: Any


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=3),
    st.sampled_from([torch.float32, torch.device("cpu"), Color.RED, slice(1, None), np.float32(2.5), int]),
)
tensors = st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float32))
keys = st.one_of(st.text(max_size=2), st.integers(0, 3), st.booleans())
values = st.recursive(
    scalars | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        inner.map(Box),
        inner.map(Frozen),
    ),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None)
@given(values)
def test_round_trip(value: Any) -> None:
    leaves, paths, structure = tree.flatten(value, "net")
    made = tree.rebuild(structure, iter(leaves))

    assert same_bits(value, made)
    assert type(made) is type(value)
    assert len(leaves) == len(paths) == len(set(paths)) or len(leaves) == len(paths)
    assert all(path.startswith("net") for path in paths)
    again, _, other = tree.flatten(made, "net")
    assert other == structure
    assert hash(other) == hash(structure)
    assert all(left is right for left, right in zip(leaves, again, strict=True))


@settings(max_examples=120, deadline=None)
@given(values, values)
def test_structures_are_equal_only_for_equal_values(left: Any, right: Any) -> None:
    """Equal structures put together with the same tensors are the same value, as bits."""
    leaves, _, one = tree.flatten(left)
    others, _, two = tree.flatten(right)

    if one == two:
        assert len(leaves) == len(others)
        assert same_bits(tree.rebuild(one, iter(leaves)), tree.rebuild(two, iter(leaves)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        (complex(0, 0.0), complex(0, -0.0)),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({1: 0}, {True: 0}),
        ({1: 0}, {1.0: 0}),
        (np.float32(1), np.float64(1)),
        (np.int64(1), 1),
        (Point(1, 2), (1, 2)),
        (Box(1), Frozen(1)),
        (Box(1, "a"), Box(1, "b")),
        (Color.RED, Color.BLUE),
        (slice(0, 1), slice(False, 1)),
        (None, ()),
        (torch.float32, torch.float64),
    ],
)
def test_different_structures(left: Any, right: Any) -> None:
    assert tree.flatten(left)[2] != tree.flatten(right)[2]


def test_nan_equals_itself() -> None:
    assert tree.flatten(float("nan"))[2] == tree.flatten(float("nan"))[2]


def test_default_dict_keeps_its_factory() -> None:
    leaves, _, structure = tree.flatten(defaultdict(list, a=[torch.ones(1)]))

    made = tree.rebuild(structure, iter(leaves))

    assert made["new"] == []


def test_paths() -> None:
    _, paths, _ = tree.flatten(({"a": [torch.ones(1), Box(torch.ones(1))]}, Point(1, torch.ones(1))), "net")

    assert paths == ["net[0].a[0]", "net[0].a[1].content", "net[1].y"]


@pytest.mark.parametrize("value", [object(), {"deep": [object()]}, {1, 2}, {object(): 1}, iter([1])])
def test_opaque(value: Any) -> None:
    with pytest.raises(tree.OpaqueValueError) as caught:
        tree.flatten(value, "net")

    assert caught.value.path.startswith("net")
    assert caught.value.kind


def test_data_class_with_more_than_its_fields_is_opaque() -> None:
    box = Box(1)
    box.extra = 2  # type: ignore[attr-defined]

    with pytest.raises(tree.OpaqueValueError, match="Box"):
        tree.flatten(box)


def test_a_tensor_with_attributes_is_opaque() -> None:
    tensor = torch.ones(1)
    tensor.scale = 2.0  # type: ignore[attr-defined]

    with pytest.raises(tree.OpaqueValueError, match="scale"):
        tree.flatten(tensor)


def test_the_same_tensor_twice() -> None:
    shared = torch.ones(1)
    leaves, _, structure = tree.flatten([shared, shared])

    made: list[Tensor] = tree.rebuild(structure, iter(leaves))

    assert made[0] is made[1] is shared
