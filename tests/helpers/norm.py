# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Clipping by norm, recorded against native, on gradients made to order. Shared by the tape and the CUDA tests."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_replay.norm import STABLE_CALLS, BackendName, NormClipper
from lightning_replay.reasons import Reason
from tests.helpers.bits import assert_same, bits

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COUNTS = (62, 213, 600)  # resnet18, efficientnet_b0 and a network with many small parts
LEVELS = ("above", "below", "equal", "inf", "nan", "zero")
Level = Literal["above", "below", "equal", "inf", "nan", "zero"]

Where = Literal["buffers", "same_memory", "new_memory"]
WHERE: tuple[Where, ...] = ("buffers", "same_memory", "new_memory")

NATIVE_CALLS = 3
"""Two that see the same gradients again after the first; the last of them records."""


class Twins:
    """Two lists of equal parameters that get equal gradients: one is clipped natively, the other by a clipper.

    Args:
        clipper: the clipper.
        count: number of parameters.
        where: whether the gradients of the clipper's side are the same tensors in each step, new tensors in the same
            memory, as a steady allocator gives it, or tensors in memory of their own.
        large: elements of the largest parameter.
    """

    def __init__(
        self, clipper: NormClipper, count: int, dtype: torch.dtype, device: str, where: Where, large: int = 300
    ) -> None:
        self.clipper, self.where = clipper, where
        self.buffers: dict[int, Tensor] = {}
        self.held: list[Tensor] = []  # what is alive is not handed out again
        self._generator = torch.Generator().manual_seed(count)
        shapes = [(1,), (7,), (3, 5), (2, 3, 3, 3), (16, 4), (large,)]
        self.native = [self._make(shapes[i % len(shapes)], dtype, device) for i in range(count)]
        self.native[3 % count].data = self.native[3 % count].data.contiguous(memory_format=torch.channels_last)
        self.replayed = [nn.Parameter(p.detach().clone()) for p in self.native]
        self.optimizers = [torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True) for p in (self.native, self.replayed)]

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=self._generator).to(device, dtype))

    def give(self, level: Level, absent: frozenset[int] = frozenset()) -> None:
        """Gives every parameter a new gradient, but those at some positions."""
        values = torch.randn(sum(p.numel() for p in self.native), generator=self._generator)
        if level == "zero":
            values.zero_()
        elif level in ("inf", "nan"):
            values[3] = float(level)
        pieces = values.to(self.native[0].device).split([p.numel() for p in self.native])
        with torch.no_grad():
            for i, (piece, left, right) in enumerate(zip(pieces, self.native, self.replayed, strict=True)):
                gradient = torch.empty_like(left)
                gradient.copy_(piece.view(left.shape))
                left.grad = None if i in absent else gradient.clone()
                right.grad = None if i in absent else self._placed(i, gradient)

    def _placed(self, position: int, gradient: Tensor) -> Tensor:
        if self.where == "new_memory":
            self.held.append(gradient.clone())
            return self.held[-1]
        buffer = self.buffers.setdefault(position, torch.empty_like(gradient))
        buffer.copy_(gradient)
        return buffer if self.where == "buffers" else buffer.detach()

    def limit(self, level: Level) -> float:
        """Returns the limit that puts the norm of the gradients where the level says."""
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.native if p.grad is not None]))
        return {"above": 0.5 * norm, "below": 2.0 * norm, "equal": norm}.get(level, 1.0)

    def step(self, level: Level = "above", limit: float | None = None, absent: frozenset[int] = frozenset()) -> None:
        """Clips and updates both sides, and asserts that norm, gradients and weights are the same bits."""
        self.give(level, absent)
        limit = self.limit(level) if limit is None else limit
        norm = torch.nn.utils.clip_grad_norm_(self.native, limit)
        self.clipper.clip(self.replayed, limit)
        assert_same(norm, self.clipper.last_norm, "the norm")
        assert_same_quickly([p.grad for p in self.native], [p.grad for p in self.replayed], "gradients")
        for optimizer in self.optimizers:
            optimizer.step()
        assert_same_quickly(self.native, self.replayed, "weights")


def assert_same_quickly(native: Sequence[Tensor | None], replayed: Sequence[Tensor | None], what: str) -> None:
    """Asserts equal bits, all tensors at once; looks for the first difference only if there is one."""
    if _bytes(native).equal(_bytes(replayed)) and _kinds(native) == _kinds(replayed):
        return
    assert_same(list(native), list(replayed), what)
    raise AssertionError(f"{what} differ")


def _bytes(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([bits(tensor).view(-1).view(torch.uint8) for tensor in tensors if tensor is not None])


def _kinds(tensors: Sequence[Tensor | None]) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def check_bits(
    backend: BackendName, device: str, dtype: torch.dtype, count: int, level: Level, where: Where, large: int = 300
) -> None:
    """Asserts the bits of three replays with gradients, limits and weights of their own, and that they were replays."""
    clipper = NormClipper(backend, STABLE_CALLS)
    clipper.begin()
    twins = Twins(clipper, count, dtype, device, where, large)
    for _ in range(NATIVE_CALLS):
        twins.step("above")
    assert (clipper.replays, clipper.refusal) == (0, None)
    for _ in range(2):
        twins.step(level)
    twins.step("above")
    assert clipper.native == {Reason.WARM_UP: 2, Reason.RECORDING: 1}
    assert (clipper.replays, clipper.copied) == (3, 3 if where == "new_memory" else 0)
    clipper.end()
    assert not clipper.is_engaged


def check_limits(device: str, dtype: torch.dtype, norms: list[float], limits: list[float]) -> None:
    """Asserts the scaling under a limit on the device for each norm with each limit."""
    from lightning_replay.norm import _scale

    static = torch.empty((), dtype=torch.float64, device=device)
    for value in norms:
        norm = torch.tensor(value, device=device).to(dtype)
        for limit in limits:
            holder = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
            holder.grad = torch.ones_like(holder)
            torch.nn.utils.clip_grads_with_norm_([holder], limit, norm)
            scaled = torch.ones(1, device=device, dtype=dtype)
            with torch.no_grad():
                _scale([scaled], norm, static.fill_(limit))
            assert_same(holder.grad, scaled, f"{dtype}, norm {value!r}, limit {limit!r}")
