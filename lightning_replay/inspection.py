# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Watch one run of a region, below autograd, for what a recording cannot hold."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_replay.engine.operations import host_access, user_line, written_tensors
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason


class Inspector(TorchDispatchMode):
    """Refuses the first operation that a recording cannot hold, before it does harm.

    Attributes:
        foreign: Tensors used that are neither arguments, members of the region, nor made in it. Their addresses are
            frozen into a recording, so it must keep them alive.

    Args:
        device: The device of the recording.
        inputs: The region's arguments; writing one is a finding.
        parameters: The region's parameters; writing one is a finding.
        buffers: The region's buffers.
    """

    def __init__(
        self, device: torch.device, inputs: Iterable[Tensor], parameters: Iterable[Tensor], buffers: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._device = device
        self._inputs = {_address(tensor) for tensor in inputs if tensor.numel()}
        self._parameters = {_address(tensor) for tensor in parameters if tensor.numel()}
        self._known = self._inputs | self._parameters | {_address(tensor) for tensor in buffers}
        self.foreign: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        finding = host_access(func, args, kwargs, self._device) or self._check_writes(func, args, kwargs)
        if finding is not None:
            raise CaptureError(finding)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.numel() and _address(leaf) not in self._known:
                self._known.add(_address(leaf))
                self.foreign.append(leaf.detach())
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel():
                self._known.add(_address(leaf))  # a foreign tensor is alive all the time and cannot take this address
        return result

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> Finding | None:
        if not func._schema.is_mutable:
            return None
        for tensor in written_tensors(func, args, kwargs):
            if _address(tensor) in self._inputs:
                return Finding(Reason.INPUT_WRITTEN, user_line(), "arguments that are only read", str(func))
            if _address(tensor) in self._parameters:
                return Finding(Reason.PARAMETER_WRITTEN, user_line(), "parameters that are only read", str(func))
        return None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
