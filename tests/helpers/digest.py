# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Fingerprints of many tensors without reading them back to the host.

A traced run on a GPU must not be slowed to a crawl, nor change its timing much, by copying every gradient to the host
at every step. ``Fingerprint`` reduces each tensor to 128 bits on its own device; the words stay there until the run
has ended.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.bits import bits

# splitmix64's constants, as the signed numbers that int64 arithmetic wraps around to.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_WORDS = 2


def sha256(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, dtype and shape."""
    raw = bits(tensor).cpu()
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


class Fingerprint:
    """Hashes lists of tensors on their device: one row of two int64 words for each tensor.

    A multilinear hash over the integer view: each 8- to 64-bit element is multiplied by a pseudo-random 64-bit weight
    of its position and summed modulo 2**64. Integer sums do not depend on their order, so equal bits always give equal
    words; two unequal float32 tensors share one word with a probability below 2**-32, both below 2**-64. Weights are
    computed from positions: no random generator is touched.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[torch.device, int], Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns an int64 tensor of shape (len(tensors), 2)."""
        rows: list[Tensor | None] = [None] * len(tensors)
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(position)
        for positions in groups.values():
            words = self._group([tensors[position] for position in positions])
            for position, row in zip(positions, words.unbind(0), strict=True):
                rows[position] = row
        return torch.stack([row for row in rows if row is not None]) if rows else torch.empty(0, _WORDS)

    def _group(self, tensors: Sequence[Tensor]) -> Tensor:
        """Hashes tensors of one device and dtype with a handful of kernels, however many tensors there are."""
        flat = torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])
        # Plus one, so that a tensor of zeros is told from a shorter one.
        values = bits(flat).reshape(-1).to(torch.int64) + 1
        per_element = values.numel() // max(1, flat.numel())
        ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0) * per_element
        ends = ends.to(values.device)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        words = []
        for weights in self._weights_for(values.device, values.numel()):
            # A prefix sum wraps around modulo 2**64 as the sums do, so differences of it are the sums of the pieces.
            running = torch.cat([values.new_zeros(1), (values * weights).cumsum(0)])
            words.append(running[ends] - running[starts])
        return torch.stack(words, dim=1)

    def _weights_for(self, device: torch.device, count: int) -> Tensor:
        key = (device, count)
        if key not in self._weights:
            self._weights[key] = torch.stack([_splitmix(device, count, word) for word in range(_WORDS)])
        return self._weights[key]


def _splitmix(device: torch.device, count: int, word: int) -> Tensor:
    state = (torch.arange(count, device=device) + (1 + word * (1 << 40))) * _STEP
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    return state ^ (state >> 31)
