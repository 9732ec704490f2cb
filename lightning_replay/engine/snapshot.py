# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Random states and tensor values at one moment, to be put back or compared."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.bits import same_bits
from lightning_replay.engine.layout import clone_exactly, without_expanded


class HostRandom:
    """The states of the generators that a graph cannot hold: Python's, NumPy's and torch's CPU generator.

    Args:
        device: On a CPU, torch's generator is the device's own and left out here.
    """

    def __init__(self, device: torch.device) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = None if device.type == "cpu" else torch.get_rng_state()

    def restore(self) -> None:
        """Puts the states back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._torch is not None:
            torch.set_rng_state(self._torch)

    def moved_since(self, earlier: "HostRandom") -> str | None:
        """Names the generator that was drawn from since, or None."""
        if self._python != earlier._python:
            return "Python's random"
        if any(not np.array_equal(a, b) for a, b in zip(self._numpy, earlier._numpy, strict=True)):
            return "NumPy's global generator"
        if self._torch is not None and earlier._torch is not None and not torch.equal(self._torch, earlier._torch):
            return "torch's CPU generator"
        return None


class Snapshot:
    """Random states and the values of tensors at one moment.

    Args:
        backend: Gives the device's generator.
        tensors: The tensors, by dotted name. Values are copied; the tensors themselves are kept.
    """

    def __init__(self, backend: GraphBackend, tensors: Mapping[str, Tensor]) -> None:
        self._backend = backend
        self._tensors = dict(tensors)
        self._values = {name: clone_exactly(tensor) for name, tensor in tensors.items()}
        self.device_random = backend.random_state()
        self.host_random = HostRandom(backend.device)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts values and states back, in place and without a trace in version counters."""
        for name, value in self._values.items():
            without_expanded(self._tensors[name].data).copy_(without_expanded(value))
        self._backend.set_random_state(self.device_random)
        self.host_random.restore()

    def names_changed_since(self, earlier: "Snapshot") -> list[str]:
        """Returns the names of all tensors with other values."""
        return [n for n, value in self._values.items() if not same_bits(value, earlier._values[n])]

    def drew_since(self, earlier: "Snapshot") -> bool:
        """Tells whether the device's generator moved."""
        return not torch.equal(self.device_random, earlier.device_random)
