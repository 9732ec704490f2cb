# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Fresh autograd leaves in place of a module's parameters, for as long as it is being recorded.

A parameter's gradient accumulator remembers the stream it was made on for as long as anything keeps an autograd graph
alive, a logged loss for example, and would draw that stream into a capture. Stand-ins share the parameters' memory and
have no such past, no hooks and no `.grad`.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn import Module, Parameter


@contextlib.contextmanager
def stand_ins(root: Module, parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Replaces parameters throughout a module tree, in lists and tuples among the attributes too.

    torch's RNNs keep their weights in such a list, and weak references in another by which they notice a replacement;
    they would then lay their weights out anew, away from the memory of the parameters.

    Args:
        root: The module tree.
        parameters: The parameters to replace.

    Yields:
        The stand-ins, in the same order.
    """
    fresh = {id(p): Parameter(p.detach(), requires_grad=True) for p in parameters}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in fresh:
                    undo.append((module._parameters, name, parameter))
            for name, value in module.__dict__.items():
                if type(value) in (list, tuple) and any(id(_referent(item)) in fresh for item in value):
                    undo.append((module.__dict__, name, value))
        for holder, name, value in undo:
            if isinstance(value, Parameter):
                holder[name] = fresh[id(value)]
            else:
                holder[name] = type(value)(_replaced(item, fresh) for item in value)
        yield list(fresh.values())
    finally:
        for holder, name, value in undo:
            holder[name] = value


def _referent(item: Any) -> Any:
    return item() if isinstance(item, weakref.ref) else item


def _replaced(item: Any, fresh: dict[int, Parameter]) -> Any:
    stand_in = fresh.get(id(_referent(item)))
    if stand_in is None:
        return item
    return weakref.ref(stand_in) if isinstance(item, weakref.ref) else stand_in
