# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Stand between a module and its own methods, for the duration of a block."""

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.nn import Module
from typing_extensions import override

_MODULE_CODE = vars(sys.modules[Module.__module__])


class Standing:
    """Stands in front of a module's method, as an instance attribute.

    A copy of the module, made while it is there, gets the method of its own class, and loses this again when the
    block ends; a pickle of the module holds the method of its class.

    Args:
        module: The module.
        name: The method's name.
        run: What is called.
        before: The module's own instance attribute, if it has one.
    """

    def __init__(self, module: Module, name: str, run: Callable[..., Any], before: Any) -> None:
        self._module = module
        self._name = name
        self._run = run
        self._before = before
        self._copies: list[weakref.ref[Module]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what stands in front."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        copied = memo.get(id(self._module), self._module)
        if copied is not self._module:
            self._copies.append(weakref.ref(copied))
        return partial(getattr(type(copied), self._name), copied)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return partial, (self._before,)
        return partial, (getattr(type(self._module), self._name), self._module)

    def leave_copies(self) -> None:
        """Takes away what the module's copies were given."""
        for copied in filter(None, (reference() for reference in self._copies)):
            if isinstance(copied.__dict__.get(self._name), partial):
                del copied.__dict__[self._name]
        self._copies.clear()


class Interposed(Standing):
    """Stands in front of a module's forward.

    A shallow copy of the module takes this along like all other attributes, and loses it when it is called.
    """

    def __init__(self, module: Module, run: Callable[..., Any], before: Any) -> None:
        super().__init__(module, "forward", run, before)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what stands in front, or the own forward of a shallow copy."""
        frame = sys._getframe(1)
        # Python does not tell on which object an attribute was found; the frame of Module.__call__ does.
        called = frame.f_locals.get("self") if frame.f_globals is _MODULE_CODE else None
        if isinstance(called, Module) and called is not self._module and called.__dict__.get("forward") is self:
            _put(called, self._before)
            return called.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def is_interposed(forward: Any) -> bool:
    """Tells whether an instance attribute `forward` was put there by `interposed`."""
    return isinstance(forward, Interposed)


@contextlib.contextmanager
def interposed(wrappers: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Puts an instance attribute `forward` on each module and takes it away again.

    Nothing is left on a module afterwards, nor on copies made meanwhile. A forward that the block itself sets stays.

    Args:
        wrappers: For each module what is called in place of its forward.
    """
    owned = {module: module.__dict__.get("forward") for module in wrappers}
    before = [(module, owned[module], Interposed(module, run, owned[module])) for module, run in wrappers.items()]
    for module, _, standing in before:
        module.__dict__["forward"] = standing
    try:
        yield
    finally:
        for module, forward, standing in before:
            if module.__dict__.get("forward") is standing:
                _put(module, forward)
            standing.leave_copies()


def _put(module: Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


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
        if isinstance(self._value, Standing):
            self._value.leave_copies()
