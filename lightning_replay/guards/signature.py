# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What tells two calls of a region apart: their arguments and torch's switches."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_replay.engine import tree
from lightning_replay.engine.layout import ALIGNMENT, is_plain, overlaps_itself
from lightning_replay.engine.modes import Modes
from lightning_replay.engine.recording import describe
from lightning_replay.reasons import Finding, Reason


class Arguments(NamedTuple):
    """The arguments of one call, taken apart.

    Attributes:
        tensors: The tensors, as the caller gave them.
        paths: Their dotted paths.
        structure: Structure of `(args, kwargs)`.
        layouts: For each tensor what a kernel sees of it.
        aliases: For each tensor the position of the first one in the same memory.
    """

    tensors: list[Tensor]
    paths: list[str]
    structure: tree.Structure
    layouts: tuple[Any, ...]
    aliases: tuple[int, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """The hashable part."""
        return self.structure, self.layouts, self.aliases

    def __str__(self) -> str:
        tensors = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors]
        return ", ".join([*tensors, *map(repr, tree.plain_values(self.structure))]) or "no tensors"


def read_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Arguments | Finding:
    """Takes the arguments of a call apart.

    Args:
        name: Dotted path of the region.
        args: Positional arguments.
        kwargs: Keyword arguments.
        device: The device of the recordings.

    Returns:
        The arguments, or a finding if they cannot be copied into static memory.
    """
    try:
        tensors, paths, structure = tree.flatten((args, kwargs), name)
    except tree.OpaqueValueError as error:
        return Finding(Reason.ARGUMENT, error.path, "tensors and plain values", error.kind)
    layouts = []
    first: dict[int, int] = {}
    aliases = []
    for position, tensor in enumerate(tensors):
        if not is_plain(tensor) or tensor.device != device or overlaps_itself(tensor):
            expected = f"a plain strided tensor on {device}"
            return Finding(Reason.UNSUPPORTED_TENSOR, paths[position], expected, describe(tensor))
        alignment = tensor.data_ptr() % ALIGNMENT
        layouts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, alignment))
        aliases.append(
            first.setdefault(tensor.untyped_storage().data_ptr() if tensor.numel() else -position - 1, position)
        )
    return Arguments(tensors, paths, structure, tuple(layouts), tuple(aliases))


def check_modes(name: str, modes: Modes) -> Finding | None:
    """Finds a mode under which calls are not recorded."""
    if modes.inference or not modes.grad:
        return Finding(Reason.UNRECORDED_MODE, name, "gradients enabled", "no_grad or inference mode")
    if modes.anomaly:
        return Finding(Reason.DETECT_ANOMALY, name, "no anomaly detection", "detect_anomaly is on")
    if modes.saved_tensor_hooks:
        actual = "the call is wrapped in activation checkpointing or another context of saved-tensor hooks"
        return Finding(Reason.UNRECORDED_MODE, name, "no hooks on what autograd saves", actual)
    if modes.transformed:
        actual = "the call is inside of torch.func (vmap, grad, jvp) or forward-mode differentiation"
        return Finding(Reason.UNRECORDED_MODE, name, "no transformation of the call", actual)
    if modes.foreign_modes:
        actual = f"{modes.foreign_modes} torch function or dispatch modes are active"
        return Finding(Reason.UNRECORDED_MODE, name, "no mode that intercepts operations", actual)
    return None


def check_input_aliases(name: str, arguments: Arguments, parameters: Mapping[int, str]) -> Finding | None:
    """Finds a trainable argument that shares memory with another or is a parameter of the region itself."""
    for position, tensor in enumerate(arguments.tensors):
        if id(tensor) in parameters:
            actual = f"its own parameter {parameters[id(tensor)]}"
            return Finding(Reason.FOREIGN_GRAPH, arguments.paths[position], "an argument that is not", actual)
        other = arguments.aliases[position]
        if other != position and tensor.requires_grad and tensor is not arguments.tensors[other]:
            actual = f"shares memory with {arguments.paths[other]}"
            return Finding(
                Reason.OUTPUT_ALIAS, arguments.paths[position], "trainable arguments with own memory", actual
            )
    return None
