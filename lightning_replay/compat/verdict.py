# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The contract check: is the Lightning in this process one that was inspected?

A function's source is read once, and again only when the function was replaced. The objects of one fit (loops,
optimizer, precision, strategy, module) are looked at each time, for attributes that hide a pinned method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lightning_replay.compat import seams
from lightning_replay.compat.contract import Contract, known_versions, load_contract
from lightning_replay.compat.live import LookupFailed, check_imports, live_fingerprint, split_name
from lightning_replay.reasons import five_parts

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CURE = "Remove what changes Lightning, or install an inspected release; until then training runs natively."


@dataclass(frozen=True)
class Verdict:
    """What a contract check found.

    Attributes:
        known: Whether everything that we lean on is as inspected.
        version: The Lightning release in this process.
        function: Dotted name of the first function that is not as inspected, if any.
        expected: What the contract says, in words.
        actual: What was met, in words.
    """

    known: bool
    version: str
    function: str | None = None
    expected: str = ""
    actual: str = ""

    @property
    def where(self) -> str:
        """The place concerned: the function, or Lightning as a whole."""
        return self.function or "lightning"

    def message(self) -> str:
        """Say in five parts what happened, where, what was expected, what was met and what to do."""
        if self.known:
            return f"Lightning {self.version} is as inspected."
        what = f"Lightning {self.version} is not as inspected, so nothing is replayed."
        return five_parts(what=what, where=self.where, expected=self.expected, actual=self.actual, cure=_CURE)


def check(trainer: Trainer | None = None) -> Verdict:
    """Compare the Lightning in this process with the contract of its release.

    Args:
        trainer: A Trainer whose loops, optimizer, precision, strategy and module are looked at too.

    Returns:
        The verdict. The first difference found is the one it names.
    """
    version = seams.installed_version()
    contract = load_contract(version)
    if contract is None:
        inspected = known_versions()
        span = f"one of the {len(inspected)} inspected releases {inspected[0]} to {inspected[-1]}" if inspected else ""
        return Verdict(False, version, None, span or "a readable contract", f"Lightning {version}")
    return _check_functions(contract) or _check_objects(contract, trainer) or Verdict(True, version)


def _check_functions(contract: Contract) -> Verdict | None:
    """Return the verdict on the first changed function, or None."""
    for name, expected in contract.functions.items():
        try:
            actual = live_fingerprint(name)
            if actual != expected:
                return _changed(contract, name, f"it behaves otherwise (fingerprint {actual})")
            check_imports(name, contract.functions)
        except LookupFailed as problem:
            return _changed(contract, name, str(problem))
    return None


def _check_objects(contract: Contract, trainer: Trainer | None) -> Verdict | None:
    """Return the verdict on the first object of a fit that is not what the contract speaks of, or None."""
    if trainer is None:
        return None
    for where, value, expected in seams.loops(trainer):
        if type(value) is not expected:
            return _changed(contract, f"{_dotted(expected)}.run", f"{where} is a {_dotted(type(value))}")
    for where, value, may_override in seams.step_objects(trainer):
        kind = type(value)
        for owner in kind.__mro__:
            for method in _methods_by_class(contract).get(_dotted(owner), ()):
                name = f"{_dotted(owner)}.{method}"
                if method not in vars(owner):  # a class that only goes by the name of Lightning's, such as ours
                    continue
                if method in vars(value) and not isinstance(vars(owner)[method], property):
                    return _changed(contract, name, f"{where}.{method} is set on the object and hides it")
                if not may_override and _provider(kind, method) is not owner:
                    return _changed(contract, name, f"{where} has the one of {_dotted(_provider(kind, method))}")
    return None


@cache
def _methods_by_class(contract: Contract) -> dict[str, list[str]]:
    """Return the pinned methods of each class."""
    methods: dict[str, list[str]] = {}
    for name in contract.functions:
        module, path = split_name(name)
        if len(path) == 2:
            methods.setdefault(f"{module}.{path[0]}", []).append(path[1])
    return methods


def _provider(kind: type, method: str) -> type:
    """Return the class from which a type has a method."""
    return next(owner for owner in kind.__mro__ if method in vars(owner))


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _changed(contract: Contract, name: str, actual: str) -> Verdict:
    expected = f"as in Lightning {contract.version}, inspected {contract.inspected}"
    if name in contract.functions:
        expected += f" (fingerprint {contract.functions[name]})"
    return Verdict(False, contract.version, name, expected, actual)
