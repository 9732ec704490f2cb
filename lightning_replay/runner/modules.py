# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Module trees: which calls can be watched, and what stands at a dotted path."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from lightning_replay.dispatch import Region
from lightning_replay.guards.module import join
from lightning_replay.reasons import Finding, Reason


def make_region(name: str, module: Module) -> Region:
    """Makes a region. The forward of its class is looked up at each call, as Python does."""
    given = module.__dict__.get("forward")
    region = Region(name, module, given or partial(_run_own_forward, module), instance_forward=given)
    if given is not None and type(module).__name__ != "OptimizedModule":
        actual = f"an instance attribute {given!r}"
        region.refusal = Finding(Reason.REPLACED_FORWARD, name, "the forward of its class", actual)
    return region


def _run_own_forward(module: Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def module_at(root: Module, name: str) -> Module | None:
    """Returns the module at a dotted path, or None."""
    module: Module | None = root
    for part in () if name == "self" else name.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def is_compiled(root: Module) -> bool:
    """Tells whether torch.compile is at work in a module tree; a dispatch mode would switch it off."""
    return any(_is_compiled_itself(module) for module in root.modules())


def _is_compiled_itself(module: Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def uncompiled_modules(root: Module, path: str = "") -> Iterator[tuple[str, Module]]:
    """Yields a module tree without TorchScript and what lies inside compiled modules.

    An attribute set in a compiled module would recompile it, and one of TorchScript has no forward in Python.
    """
    if isinstance(root, torch.jit.ScriptModule):
        return
    if root._compiled_call_impl is None:
        yield path, root
    if _is_compiled_itself(root):
        return
    for name, child in root.named_children():
        yield from uncompiled_modules(child, join(path, name))
