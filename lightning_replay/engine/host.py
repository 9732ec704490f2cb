# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Host tensors on their way into device operations, and the device constants that stand for them in a recording.

A graph that copies from the host reads an address of memory that the host has long given to something else, and most
such copies cannot even be captured. So where an operation would copy a host tensor, a recording reads a device tensor
of the same bits instead. A host tensor without dimensions that an operation takes as a number is frozen as one.
"""

import ctypes
import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_replay.engine.bits import as_bits
from lightning_replay.engine.layout import is_plain, without_expanded
from lightning_replay.engine.operations import COPYING, crossing, user_line
from lightning_replay.engine.reads import Reads, is_read
from lightning_replay.errors import CaptureError
from lightning_replay.reasons import Finding, Reason


class HostValues(NamedTuple):
    """What a host tensor holds; equal for two tensors of the same layout and bits.

    Attributes:
        shape: Its shape.
        stride: Its strides.
        dtype: Its dtype.
        digest: A digest of its bits; empty if it is no plain tensor of the host: none to compare.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes

    def __str__(self) -> str:
        return f"a CPU tensor {self.shape} {str(self.dtype).removeprefix('torch.')} of bits {self.digest.hex()[:8]}"


def host_values(tensor: Tensor) -> HostValues:
    """Reads a host tensor."""
    if not is_plain(tensor) or tensor.device.type != "cpu":
        return HostValues(tuple(tensor.shape), (), tensor.dtype, b"")
    bits = as_bits(tensor)
    data = ctypes.string_at(bits.data_ptr(), bits.numel() * bits.element_size()) if bits.numel() else b""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return HostValues(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, digest)


class LiftingMode(TorchDispatchMode):
    """A mode that sees `torch.tensor(1.0, device=...)` for what it is: a host tensor, and its copy to the device."""

    _before = False

    def __enter__(self) -> Any:
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class HostConstants(LiftingMode):
    """What stands for the host in a recording. As a mode, it puts it in its place.

    Attributes:
        reads: The numbers that the region reads from the device. Each time the mode is entered it gives them in order.

    Args:
        device: The device of the recording.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._twins: dict[HostValues, Tensor] = {}
        self.reads = Reads()
        self._asked = 0

    @property
    def needed(self) -> bool:
        """Tells whether there are any. If not, nothing should run under this mode: torch takes other ways then."""
        return bool(self._twins) or bool(self.reads.answers)

    def __enter__(self) -> Any:
        self._asked = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_read(func, args, self._device) and self._asked < len(self.reads.answers):
            self._asked += 1
            return self.reads.answers[self._asked - 1]
        args, kwargs = self.replaced(func, args, kwargs or {})
        return func(*args, **kwargs)

    def replaced(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: bool = False
    ) -> tuple[Any, ...]:
        """Returns the arguments with a constant for each host tensor that the operation would copy.

        Args:
            func: The operation.
            args: Positional arguments.
            kwargs: Keyword arguments.
            make: Make constants that are missing.

        Raises:
            CaptureError: If there is no constant of these bits.
        """
        if func.overloadpacket.__name__ not in COPYING or not (tensors := crossing(func, args, kwargs)):
            return args, kwargs
        twins = {id(tensor): self._twin(tensor, make) for tensor in tensors}
        replaced: tuple[Any, ...] = tree_map(lambda leaf: twins.get(id(leaf), leaf), (args, kwargs))
        return replaced

    def _twin(self, tensor: Tensor, make: bool) -> Tensor:
        values = host_values(tensor)
        if values not in self._twins:
            if not make:
                raise CaptureError(
                    Finding(Reason.HOST_TENSOR, user_line(), "the values of the runs before", str(values))
                )
            self._twins[values] = _upload(tensor.detach(), self._device)
        return self._twins[values]


@torch.no_grad()
def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor with its strides, without waiting for the device."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    source = without_expanded(tensor)
    source = source.pin_memory() if device.type == "cuda" else source
    without_expanded(twin).copy_(source, non_blocking=True)
    return twin
