# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A small network whose forward reads everything that an event may change."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 4
WIDTH = 6
CLASSES = 3

GAIN: Any = 1.0
ACTIVATION: Callable[[Tensor], Tensor] = torch.tanh
TABLE: dict[str, Any] = {"gains": [1.0, [1.0]]}


class Settings:
    """An object of a user's own class."""

    def __init__(self) -> None:
        self.gain: Any = 1.0


class Block(nn.Module):
    bonus: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.factor: Any = 1.0
        self.settings = Settings()
        self.gains: list[Any] = [1.0, {"inner": 1.0}]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = ACTIVATION(self.norm(self.linear(inputs)) + self.shift)
        hidden = hidden * self.factor * self.settings.gain * self.gains[0] * self.gains[1]["inner"] + self.bonus
        return inputs + hidden


class Net(nn.Module):
    """Args:
    closure: Returns a number that the forward multiplies with.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.2)
        self.spare = nn.Linear(WIDTH, CLASSES)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.scale: Any = 1.0
        self.habit: str | None = None
        self.closure = closure
        self.calls: Any = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor, other: Tensor | None = None, weight: Any = 1.0) -> dict[str, Any]:
        hidden = self.first(inputs)
        if other is not None:
            hidden = hidden + self.first(other * 0.5)
        if self.habit is not None:
            hidden = self.behave(inputs, hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.drop(hidden) * self.scale * GAIN * TABLE["gains"][0] * TABLE["gains"][1][0] * weight
        hidden = hidden * self.closure() + torch.ones(WIDTH).to(hidden.dtype)
        if self.training:
            self.count += 1
        return {"logits": self.last(hidden), "hidden": hidden, "best": hidden.argmax(1), "nothing": None}

    def behave(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        """What a recording cannot hold, one habit at a time."""
        if self.habit == "reads":
            return hidden * (1.0 if inputs.sum().item() > 0 else 0.5)
        if self.habit == "draws":
            return hidden * random.random()
        if self.habit == "counts":
            self.calls += 1
        if self.habit == "writes":
            inputs.mul_(0.5)
        if self.habit == "rebinds":
            self.count = self.count + 1
        if self.habit == "raises":
            raise ValueError("a habit of this network")
        if self.habit == "prunes":
            self.first.weight.data.mul_(self.first.weight.data.abs() > 0.05)
        return hidden


class Root(nn.Module):
    """Stands where the LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        factor = 1.0

        def closure() -> Any:
            return factor

        def change(value: Any) -> None:
            nonlocal factor
            factor = value

        self.change_closure = change
        self.net = Net(closure)
