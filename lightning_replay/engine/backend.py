# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What the engine needs from a backend: pools, capture, replay and the device's random state."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """A recorded sequence of launches with frozen addresses and frozen Python.

    A replay that raises has launched nothing, unless the graph has an attribute `atomic` that is false.
    """

    def replay(self) -> None:
        """Launches the sequence again on the current stream."""


class Pool(Protocol):
    """Memory that graphs of one slot share. Graphs of a pool may overwrite each other's results."""

    def bytes(self) -> int:
        """Returns the device memory that the pool holds, in bytes."""


class GraphBackend(Protocol):
    """Makes graphs on one device.

    Attributes:
        name: "cuda" or "tape".
        device: The device that it records.
    """

    name: str
    device: torch.device

    def new_pool(self) -> Pool:
        """Returns an empty pool."""

    def prepare(self) -> None:
        """Gets ready for the warm-up and the captures of a recording. No mode of torch is active."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs a callable where captures run, without recording it, and waits for it."""

    def capture(self, pool: Any, run: Callable[[], T], *, overwrites_pool: bool = False) -> tuple[Graph, T]:
        """Records what a callable launches.

        Memory that `run` allocates comes from `pool`. Random state and tensors written in place may have moved
        afterwards; the caller puts them back.

        Args:
            pool: What `new_pool` returned.
            run: The callable.
            overwrites_pool: A replay may write any memory of the pool, results of its other graphs included.

        Raises:
            CaptureError: If the callable did something that a graph cannot hold.
            Exception: Whatever `run` raised. The device, the allocator and the generator are usable in either case.
        """

    def allocate(self, pool: Any, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Runs a callable that only allocates, out of a pool: no graph of it writes there while the memory is in use.

        Args:
            pool: What `new_pool` returned.
            make: The callable; each of its tensors has memory of its own.

        Raises:
            Exception: As `capture`.
        """

    def clear(self, pool: Any) -> None:
        """Fills a pool with zeros, so that nothing a capture left there passes for the result of a replay.

        What came from `allocate` keeps its values: it may be in use, whoever made it.

        Args:
            pool: What `new_pool` returned.
        """

    def unnoticed(self) -> AbstractContextManager[None]:
        """Surrounds code inside of a capture that must not find out that it is being captured."""

    def random_state(self) -> torch.Tensor:
        """Returns the state of the device's default generator."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Puts the state of the device's default generator back."""

    def trim(self) -> None:
        """Returns memory that is cached and unused to the device."""

    def close(self) -> None:
        """Gives everything back. Graphs made here must not be replayed afterwards."""
