# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Where many tensors lie, with which shapes, strides and dtypes: compared before each replay."""

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

MAX_CIRCUMSTANCES = 4
"""How many combinations of autocast, modes and trainability have a guard of their own."""

_dtype = attrgetter("dtype")
_requires_grad = attrgetter("requires_grad")


class Memory:
    """The addresses of tensors as they are when this is made.

    Args:
        tensors: The tensors, all of them with memory of their own.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._then = list(map(Tensor.data_ptr, tensors))

    def is_same(self) -> bool:
        """Tells whether all lie where they lay."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._then

    def moved(self, index: int) -> bool:
        """Tells whether one of them lies elsewhere."""
        return self._tensors[index].data_ptr() != self._then[index]


class Layouts:
    """Shapes, strides and dtypes of tensors as they are when this is made.

    torch's compiler has a guard that compares them all in one call, and autocast, modes and trainability with them. So
    its yes is enough, but its no is not: then they are read here, and if they are as they were, there will be one more
    guard, for these circumstances.

    Args:
        tensors: The tensors, all of them strided, each of them once.

    Attributes:
        trainable: Which of them required a gradient at the last comparison.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._then = _read(tensors)
        self._guards: deque[tuple[Callable[..., bool], tuple[bool, ...]]] = deque(maxlen=MAX_CIRCUMSTANCES)
        self.trainable = tuple(map(_requires_grad, tensors))

    def are_same(self, others: Sequence[Tensor] | None = None) -> bool:
        """Tells whether all are as they were, and notes which are trainable.

        Args:
            others: Tensors to compare instead, of which nothing is kept.
        """
        tensors = self._tensors if others is None else others
        can_guard = _CAN_GUARD and torch.is_grad_enabled()  # without gradients, a guard sees none as trainable
        if can_guard:
            for is_unchanged, trainable in self._guards:
                if is_unchanged(*tensors):
                    self.trainable = trainable
                    return True
        self.trainable = tuple(map(_requires_grad, tensors))
        if _read(tensors) != self._then:
            return False
        if can_guard:
            self._guards.appendleft((_guard(tensors), self.trainable))
        return True

    def then(self, index: int) -> tuple[Any, ...]:
        """Returns shape, strides and dtype of a tensor as they were."""
        return tuple(self._then[index :: len(self._tensors)])

    def now(self, index: int) -> tuple[Any, ...]:
        """Returns shape, strides and dtype of a tensor as they are."""
        return tuple(_read([self._tensors[index]]))


def _read(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns all shapes, then all strides, then all dtypes: three passes without a Python call for each tensor."""
    return [*map(Tensor.size, tensors), *map(Tensor.stride, tensors), *map(_dtype, tensors)]


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Makes torch's guard, with all sizes and strides fixed."""
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


def _can_guard() -> bool:
    """Tells whether this torch has the guard, which is not public, and whether it sees what is asked of it."""
    tensor = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    others = (tensor[:1], tensor.view(3, 2).t(), tensor.view(torch.int32), tensor.detach().requires_grad_())
    try:
        is_unchanged = _guard([tensor])
        return is_unchanged(tensor) and not any(map(is_unchanged, others))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


_CAN_GUARD = _can_guard()
