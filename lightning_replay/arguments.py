# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The arguments of what users make: what is accepted, and what a wrong one is told."""

from collections.abc import Iterable, Sequence

import torch

from lightning_replay.reasons import five_parts


def argument_message(name: str, given: object, accepted: str, cure: str, owner: str = "ReplayStrategy") -> str:
    """Formats the message about an argument: name, given, accepted, cure."""
    shown = " ".join(repr(given).split())
    return five_parts(f"{owner} cannot be used with {name}={shown}", name, accepted, shown, cure)


def check_choice(name: str, value: object, accepted: tuple[str, ...], owner: str = "ReplayStrategy") -> None:
    """Raises ValueError unless a value is one of the accepted ones."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(argument_message(name, value, " or ".join(map(repr, accepted)), "pass one of these", owner))


def check_backend(value: object, owner: str = "ReplayStrategy") -> None:
    """Raises ValueError unless a value names a backend that this machine has."""
    check_choice("backend", value, ("auto", "cuda", "tape"), owner)
    if value == "cuda" and not torch.cuda.is_available():
        cure = 'use backend="auto", or backend="tape" to debug on a CPU'
        raise ValueError(argument_message("backend", value, "a machine with a CUDA device", cure, owner))


def backend_message(device: torch.device, owner: str = "ReplayStrategy") -> str:
    """Formats the message about CUDA graphs that were asked for while training on another device."""
    cure = 'pass accelerator="gpu" to the Trainer, or backend="auto"'
    return argument_message("backend", "cuda", f"a CUDA device, not {device}", cure, owner)


def check_kind(name: str, value: object, kind: type, owner: str = "ReplayStrategy") -> None:
    """Raises TypeError unless a value is None or an object of a class."""
    if value is not None and not isinstance(value, kind):
        accepted = f"None, or an object of {kind.__module__}.{kind.__qualname__}"
        raise TypeError(argument_message(name, value, accepted, "pass one, or leave it out", owner))


def check_text(name: str, value: object, owner: str) -> None:
    """Raises TypeError unless a value is a string."""
    if not isinstance(value, str):
        raise TypeError(argument_message(name, value, "a string", "say it in words", owner))


def check_count(name: str, value: object, owner: str = "ReplayStrategy", least: int = 1) -> None:
    """Raises TypeError or ValueError unless a value is an int of at least 1, or of another least."""
    message = argument_message(name, value, f"an int of at least {least}", "pass such an int", owner)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(argument_message(name, value, "True or False", "pass one of these"))


def check_names(modules: object) -> None:
    """Raises TypeError or ValueError unless modules is None or a list of names."""
    if modules is None:
        return
    if isinstance(modules, str) or not isinstance(modules, Sequence) or not all(isinstance(m, str) for m in modules):
        raise TypeError(argument_message("modules", modules, "a list of dotted names", 'pass for example ["net"]'))
    if not modules:
        raise ValueError(argument_message("modules", modules, "at least one name, or None", "leave modules out"))


def as_device(device: int | str | torch.device) -> torch.device:
    """Returns a device with its index.

    Raises:
        ValueError: If it names none.
    """
    try:
        if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
            raise TypeError
        made = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        asked = f"cuda:{device}" if isinstance(device, int) else str(device)
        if str(made) != asked:  # of an index, torch keeps eight bits
            raise TypeError
    except (RuntimeError, TypeError):
        message = argument_message(
            "device", device, 'a device such as "cuda:0", or its index', "pass one, or leave it out"
        )
        raise ValueError(message) from None
    if made.type == "cuda" and made.index is None:
        made = torch.device("cuda", 0)
    return made


def named_modules(root: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Returns the modules at dotted names, the root for "self".

    Raises:
        ValueError: If one of them does not exist, or lies inside another one, which would be recorded with it.
    """
    found = {name: _named_module(root, name) for name in names}
    for inner, module in found.items():
        for outer, other in found.items():
            if inner != outer and any(part is module for part in other.modules()):
                accepted = f"modules apart from each other, but {inner!r} lies inside {outer!r}"
                raise ValueError(argument_message("modules", [*found], accepted, f"leave out {inner!r} or {outer!r}"))
    return found


def _named_module(root: torch.nn.Module, name: str) -> torch.nn.Module:
    """Returns the module at a dotted name, the root for "self".

    Raises:
        ValueError: If there is none.
    """
    if name == "self":
        return root
    known: dict[str, torch.nn.Module] = dict(root.named_modules(remove_duplicate=False))
    if name not in known or not name:
        near = ", ".join(repr(path) for path in list(known)[1:12])
        raise ValueError(argument_message("modules", name, f"a name such as {near}", "use a name of named_modules()"))
    return known[name]
