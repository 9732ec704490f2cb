# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A dict that nothing was written to need not be read again: Python counts what is written to each."""

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.nn import Module


class Versions:
    """How often some dicts were written to.

    Python counts it for its own optimizations, and torch's compiler, which has a use for it too, makes it known. The
    version that a dict had means that it has the items that it had, in the same order. Another version means nothing:
    the dict has to be read.

    Args:
        dicts: The dicts, none of them empty, for what fills an empty one may go uncounted, and none of a class that
            holds more than Python counts, as an `OrderedDict` does with its order.
    """

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self._dicts = list(dicts) if _CAN_COUNT else []
        self._then = self._now = _read(self._dicts)
        self._era = _clock.era()

    def are_same(self) -> bool:
        """Tells whether nothing was written to any of them; False where nothing can tell."""
        if not _CAN_COUNT:
            return False
        if (era := _clock.era()) != self._era:
            self._now = _read(self._dicts)
            if self._now != self._then:
                return False
            self._era = era
        return True

    def accept(self) -> set[int]:
        """Takes them as they were at the last comparison, and returns the ids of those that were written to."""
        written = {id(d) for d, then, now in zip(self._dicts, self._then, self._now, strict=True) if then != now}
        self._then = self._now
        return written

    def leave_out(self, ids: Container[int]) -> None:
        """Compares some of them no longer."""
        kept = [i for i, d in enumerate(self._dicts) if id(d) not in ids]
        self._dicts = [self._dicts[i] for i in kept]
        self._then = self._now = [self._then[i] for i in kept]


class _Clock:
    """Tells eras apart: within one, nothing at all was written to any dict whose version was ever asked for.

    From Python 3.12 on, versions are numbers of one series, and only what is written to these dicts takes one. So does
    a new dict; if it gets the number after that of the new dict before it, no other was taken. In earlier releases all
    dicts take numbers of the series, and each question begins an era.
    """

    def __init__(self) -> None:
        self._last = self._era = 0

    def era(self) -> int:
        """Returns the number of the era."""
        (number,) = _read([{}])
        if number != self._last + 1:
            self._era += 1
        self._last = number
        return self._era


_version: Callable[[dict[str, Any]], int] = getattr(torch._C._dynamo.guards, "dict_version", lambda _: 0)


def _read(dicts: Iterable[dict[str, Any]]) -> list[int]:
    return list(map(_version, dicts))


def _can_count() -> bool:
    """Tells whether this torch knows versions, which are not public, and whether Python counts all that it has to.

    Python 3.13 has releases that miss attributes which are set on objects of few attributes.
    """
    few, many = Module(), Module()
    many.__dict__.update((f"attribute_{i}", i) for i in range(64))
    try:
        return _counts(few) and _counts(many)
    except (RuntimeError, TypeError):
        return False


def _counts(module: Module) -> bool:
    attributes = module.__dict__
    clock = _Clock()
    writes: tuple[Callable[[], Any], ...] = (
        *(functools.partial(setattr, module, "training", value) for value in (False, True)),
        *(functools.partial(setattr, module, "name", value) for value in range(32)),
        functools.partial(attributes.update, name=-1),
        functools.partial(delattr, module, "name"),
    )
    for write in writes:
        before, era = _read([attributes]), clock.era()
        if _read([attributes]) != before:
            return False
        write()
        if _read([attributes]) == before or clock.era() == era:
            return False
    return True


_clock = _Clock()
_CAN_COUNT = _can_count()
