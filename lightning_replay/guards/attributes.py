# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What many modules hold under certain names: the very same objects as before, or not."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

_HAS_OBJECTS_FROM_ITERATORS = np.lib.NumpyVersion(np.__version__) >= "1.23.0"


def identities(values: Iterable[Any]) -> bytes:
    """Returns where objects lie, in their order.

    Of two lists whose objects are all alive, this is the same only if they hold the very same objects. Comparing it
    takes a tenth of the time of comparing them one by one.
    """
    if _HAS_OBJECTS_FROM_ITERATORS:
        return np.fromiter(values, dtype=object).tobytes()
    return array("Q", map(id, values)).tobytes()


class Attributes:
    """Attributes of many modules, as they are when this is made, read in one pass, and the names of all there are.

    Args:
        named: The `__dict__` of each module, and the names that matter in it.

    Attributes:
        values: The attributes.
    """

    def __init__(self, named: Iterable[tuple[dict[str, Any], Sequence[str]]]) -> None:
        self._named = [(attributes, tuple(names)) for attributes, names in named]
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for attributes, names in self._named:
            if names:
                alike.setdefault(names, []).append(attributes)
        # Of a single name an itemgetter would give no tuple.
        self._readers = [(itemgetter(*(names * 2 if len(names) == 1 else names)), d) for names, d in alike.items()]
        self._dicts = [attributes for attributes, _ in self._named]
        self._names, self._sizes = list(chain.from_iterable(self._dicts)), list(map(len, self._dicts))
        self.values = list(self._read())
        self._identities = identities(self.values)

    def are_same(self) -> bool:
        """Tells whether they are the very objects that they were, and the modules have no others."""
        try:
            same = identities(self._read()) == self._identities
        except KeyError:  # one is gone
            return False
        names, sizes = chain.from_iterable(self._dicts), map(len, self._dicts)
        return same and list(names) == self._names and list(sizes) == self._sizes

    def of(self, dicts: set[int]) -> "Attributes":
        """Returns those of some modules alone, given by the ids of their `__dict__`."""
        return Attributes([(attributes, names) for attributes, names in self._named if id(attributes) in dicts])

    def _read(self) -> Iterator[Any]:
        """Reads those with the same names together."""
        return chain.from_iterable(chain.from_iterable(map(read, dicts) for read, dicts in self._readers))
