# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Stand between a module and its own forward, for the duration of a block."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.nn import Module


def is_interposed(forward: Any) -> bool:
    """Tells whether an instance attribute `forward` was put there by `interposed`."""
    return getattr(forward, "_interposed", False) is True


@contextlib.contextmanager
def interposed(wrappers: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Puts an instance attribute `forward` on each module and takes it away again.

    Nothing is left on a module afterwards, so that copies, pickles and state dicts never meet it.

    Args:
        wrappers: For each module what is called in place of its forward.
    """
    before = [(module.__dict__, module.__dict__.get("forward"), wrapper) for module, wrapper in wrappers.items()]
    for module, wrapper in wrappers.items():
        wrapper.__dict__["_interposed"] = True
        module.__dict__["forward"] = wrapper
    try:
        yield
    finally:
        for attributes, forward, wrapper in before:
            if attributes.get("forward") is not wrapper:
                continue  # the block itself has set another, or deleted it
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


class Shadowed:
    """Puts an instance attribute in front of a method of an object, for the duration of a block.

    Args:
        target: The object.
        name: The method's name.
        value: What is found there meanwhile.
    """

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self._attributes: dict[str, Any] = target.__dict__
        self._name = name
        self._value = value
        self._missing = name not in self._attributes
        self._before = self._attributes.get(name)

    def __enter__(self) -> None:
        self._attributes[self._name] = self._value

    def __exit__(self, *_: object) -> None:
        if self._missing:
            self._attributes.pop(self._name, None)
        else:
            self._attributes[self._name] = self._before
