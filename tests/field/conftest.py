# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""One fixture: where a scenario runs, on tapes or on CUDA graphs."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_replay import Reason, ReplayStrategy
from tests.helpers.trace import TraceResult
from tests.parity import harness
from tests.parity.scopes import pytest_pyfunc_call, scope  # noqa: F401

# Read when the first cuBLAS handle is made, so it is set before anything starts CUDA.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

torch.set_num_threads(1)  # networks of this size gain nothing from more


class Field:
    """Where a scenario runs.

    Args:
        backend: "tape" on the CPU, or "cuda".
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.accelerator = "cpu" if backend == "tape" else "gpu"
        self.device = torch.device("cpu" if backend == "tape" else "cuda")

    @property
    def on_gpu(self) -> bool:
        return self.backend == "cuda"

    def strategy(self, **options: Any) -> ReplayStrategy:
        if not self.on_gpu:
            return harness.tape(**options)
        fixed = {"backend": "cuda", "scope": harness.SCOPE, "warmup_steps": harness.WARM_UP, "on_native": "ignore"}
        return ReplayStrategy(**{**fixed, **options})

    def both(
        self,
        make: Callable[[], LightningModule],
        data: Any = None,
        strategy: dict[str, Any] | None = None,
        **options: Any,
    ) -> TraceResult:
        """Runs natively and with replay, asserts equality, and returns the replayed trace."""
        _, replay = harness.run_both(make, data, **self._options(strategy), **options)
        assert replay.error is None, replay.error
        assert replay.trace is not None
        return replay.trace

    def replayed(
        self,
        make: Callable[[], LightningModule],
        data: Any = None,
        actions: Sequence[str] | None = None,
        strategy: dict[str, Any] | None = None,
        **options: Any,
    ) -> TraceResult:
        """The run equals native and takes these actions; by default all that can be replayed is."""
        return harness.check_replayed(make, data, actions, **self._options(strategy), **options)

    def native(
        self,
        make: Callable[[], LightningModule],
        reason: Reason,
        data: Any = None,
        strategy: dict[str, Any] | None = None,
        **options: Any,
    ) -> TraceResult:
        """The run equals native, its network as a whole is not recorded, and the report says why."""
        return harness.check_native(make, reason, data, **self._options(strategy), **options)

    def _options(self, strategy: dict[str, Any] | None) -> dict[str, Any]:
        return {"strategy": self.strategy(**(strategy or {})), "accelerator": self.accelerator}


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def field(request: pytest.FixtureRequest) -> Field:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} sees none")
    return Field(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu_field(request: pytest.FixtureRequest) -> Field:
    """For scenarios about memory, streams, threads and libraries of the device."""
    if not torch.cuda.is_available():
        pytest.skip(f"the scenario is about CUDA itself; torch {torch.__version__} sees no device")
    return Field(request.param)
