# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Whether a method uses its batch's index is decided from its code, on the safe side."""

from typing import Any

import pytest

from lightning_replay.guards.parameters import find_use


class Base:
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def shared(self, batch: Any, index: int, stage: str = "") -> Any:
        return batch

    def uses(self, batch: Any, index: int) -> Any:
        return batch * index

    @staticmethod
    def static(batch: Any, index: int) -> Any:
        return batch


class Ignores(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return batch


class OneParameter(Base):
    def step(self, batch: Any) -> Any:
        return batch


class HandsOn(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        self.shared(batch, index=batch_idx)
        return self.shared(batch, batch_idx, "train")


class HandsUp(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class Recurses(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch[1:], batch_idx) if batch else batch


class Rest(Base):
    def step(self, batch: Any, *rest: Any) -> Any:
        return batch


class Branches(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return batch if batch_idx else None


class HandsOnToAUser(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return self.uses(batch, batch_idx)


class HandsOnAndUses(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared(batch, batch_idx), batch_idx + 1


class ToAFunction(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return str(batch_idx)


class ToAStaticMethod(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return self.static(batch, batch_idx)


class Closure(Base):
    def step(self, batch: Any, batch_idx: int) -> Any:
        return [batch for _ in range(2) if (lambda: batch_idx)()]


class RestUsed(Base):
    def step(self, batch: Any, *rest: Any) -> Any:
        return batch, rest


@pytest.mark.parametrize("owner", [Ignores, OneParameter, HandsOn, HandsUp, Recurses, Rest])
def test_unused(owner: Any) -> None:
    assert find_use(owner, owner.step, 2) is None


@pytest.mark.parametrize(
    "owner", [Branches, HandsOnToAUser, HandsOnAndUses, ToAFunction, ToAStaticMethod, Closure, RestUsed]
)
def test_used(owner: Any) -> None:
    line = find_use(owner, owner.step, 2)

    assert line is not None
    assert __file__ in line
