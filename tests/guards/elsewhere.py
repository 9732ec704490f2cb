# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What networks of the tests refer to in another module: functions, classes, objects, and the globals they read."""

import contextvars
import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor, nn

factor = 2.0


def scaled(inputs: Tensor) -> Tensor:
    return inputs * factor


def with_attribute(inputs: Tensor) -> Tensor:
    return inputs * with_attribute.gain  # type: ignore[attr-defined]


def keyword(inputs: Tensor, *, gain: float = 2.0) -> Tensor:
    return inputs * gain


def default(inputs: Tensor, gain: float = 2.0) -> Tensor:
    return inputs * gain


def body(inputs: Tensor) -> Tensor:
    return inputs * 2


def other_body(inputs: Tensor) -> Tensor:
    return inputs * 3


def call_inner(inputs: Tensor) -> Any:
    return inner_functions["scaled"](inputs)


inner_functions = {"scaled": scaled}
functions = {"first": call_inner}


class Meta(type):
    gain = 2.0


class Base:
    inherited = 2.0


class Config(Base, metaclass=Meta):
    own = 2.0

    @classmethod
    def from_class(cls) -> float:
        return cls.own

    def method(self, inputs: Tensor) -> Tensor:
        return scaled(inputs)


config = Config()


class Reverse(torch.autograd.Function):
    alpha = 1.0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return inputs.view_as(inputs) * Reverse.alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * factor * ctx.owner.strength, None


class Key:
    def __init__(self) -> None:
        self.hidden = 1

    def __hash__(self) -> int:
        return hash(self.hidden)

    def __eq__(self, other: object) -> bool:
        return hash(self) == hash(other)


@dataclasses.dataclass
class Sizes:
    width: float = 2.0


class Point:
    def __init__(self) -> None:
        self.height = 2.0


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Batch:
    inputs: Tensor

    def scale(self, inputs: Tensor) -> Tensor:
        return scaled(inputs)


variable = contextvars.ContextVar("variable", default=2.0)
outside = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
