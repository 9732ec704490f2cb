# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Equality of bits, not of values.

``torch.testing.assert_close(rtol=0, atol=0)`` takes 0.0 for -0.0 and refuses two equal NaNs. A replay must give the
very bytes of the native run, so tensors are compared through integer views of their memory.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Returns a contiguous integer copy of a tensor's memory, in logical order, whatever its dtype.

    Complex numbers give one trailing dimension of two (real, imaginary).
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    copy = plain.clone(memory_format=torch.contiguous_format)
    return copy.view(_INTEGER_OF_SIZE[copy.element_size()])


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two tensors, or two nested structures, are the same to the last bit. None is not zeros."""
    return next(differences(a, b), None) is None


def assert_same(native: Any, replay: Any, what: str = "value") -> None:
    """Asserts that two nested structures are equal as bits.

    Raises:
        AssertionError: naming the dotted path, the first differing index and both values.
    """
    difference = next(differences(native, replay, what), None)
    if difference is not None:
        raise AssertionError(difference)


def differences(native: Any, replay: Any, path: str = "value") -> Iterator[str]:
    """Yields one sentence for each leaf that differs, in the order of the native structure."""
    if (native is None) != (replay is None):
        yield f"{path}: native {_brief(native)}, replay {_brief(replay)}"
        return
    if type(native) is not type(replay) and not (isinstance(native, Tensor) and isinstance(replay, Tensor)):
        yield f"{path}: native is a {type(native).__name__}, replay a {type(replay).__name__}"
        return
    compare = next((compare for kind, compare in _COMPARISONS if isinstance(native, kind)), None)
    if compare is not None:
        yield from compare(native, replay, path)
    elif dataclasses.is_dataclass(native):
        for field in dataclasses.fields(native):
            yield from differences(getattr(native, field.name), getattr(replay, field.name), f"{path}.{field.name}")
    elif native != replay:
        yield f"{path}: native {native!r}, replay {replay!r}"


def _tensors(native: Tensor, replay: Tensor, path: str) -> Iterator[str]:
    if native.dtype != replay.dtype or native.shape != replay.shape:
        yield f"{path}: native {_brief(native)}, replay {_brief(replay)}"
        return
    left, right = bits(native), bits(replay)
    if left.device != right.device:
        left, right = left.cpu(), right.cpu()
    if torch.equal(left, right):
        return
    unequal = (left != right).reshape(native.numel(), -1).any(dim=1)
    first = int(unequal.nonzero()[0])
    index = tuple(int(i) for i in np.unravel_index(first, tuple(native.shape))) if native.dim() else ()
    yield (
        f"{path}{list(index) or ''}: native {_spelled(native[index])}, replay {_spelled(replay[index])}"
        f" ({int(unequal.sum())} of {native.numel()} elements differ)"
    )


def _arrays(native: np.ndarray, replay: np.ndarray, path: str) -> Iterator[str]:
    if native.dtype != replay.dtype or native.shape != replay.shape:
        yield f"{path}: native {native.dtype}{native.shape}, replay {replay.dtype}{replay.shape}"
    elif native.tobytes() != replay.tobytes():
        width = native.dtype.itemsize
        left, right = (np.frombuffer(a.tobytes(), np.uint8).reshape(-1, width) for a in (native, replay))
        first = int((left != right).any(axis=1).argmax())
        index = [int(i) for i in np.unravel_index(first, native.shape)] if native.ndim else []
        yield f"{path}{index}: native {native.reshape(-1)[first]!r}, replay {replay.reshape(-1)[first]!r}"


def _mappings(native: Mapping[Any, Any], replay: Mapping[Any, Any], path: str) -> Iterator[str]:
    if list(native) != list(replay):
        # Order counts: checkpoints and optimizers iterate over it.
        only_native, only_replay = set(native) - set(replay), set(replay) - set(native)
        detail = f"only in native {sorted(map(str, only_native))}, only in replay {sorted(map(str, only_replay))}"
        yield f"{path}: keys differ, {detail if only_native or only_replay else 'in their order'}"
    for key in native:
        if key in replay:
            yield from differences(native[key], replay[key], f"{path}.{key}")


def _sequences(native: Any, replay: Any, path: str) -> Iterator[str]:
    if len(native) != len(replay):
        yield f"{path}: native has {len(native)} items, replay {len(replay)}"
    for index, (left, right) in enumerate(zip(native, replay, strict=False)):
        yield from differences(left, right, f"{path}.{index}")


def _floats(native: float, replay: float, path: str) -> Iterator[str]:
    if struct.pack("<d", native) != struct.pack("<d", replay):
        yield f"{path}: native {native!r} ({native.hex()}), replay {replay!r} ({replay.hex()})"


_COMPARISONS: tuple[tuple[type | tuple[type, ...], Callable[[Any, Any, str], Iterator[str]]], ...] = (
    (Tensor, _tensors),
    (np.ndarray, _arrays),
    (Mapping, _mappings),
    ((list, tuple), _sequences),
    (float, _floats),
)


def _spelled(element: Tensor) -> str:
    """Writes one element as its value and its bits, so that 0.0 and -0.0 or two NaNs can be told apart."""
    raw = bits(element).reshape(-1).tolist()
    width = 2 * bits(element).element_size()
    return f"{element.item()!r} (0x{'_'.join(f'{word & (16**width - 1):0{width}x}' for word in raw)})"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
