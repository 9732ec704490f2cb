# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The limit: a training step written by hand, outside of Lightning, and captured whole as one CUDA graph.

Forward, loss, backward, clipping and update are launched at once; all that a step costs the host is to copy the batch
and launch. It serves one shape, one model and one limit, has no hooks, and logs nothing.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from tests.benchmarks.clock import StepClock

WARMUP = 3


def train(
    module: LightningModule, batches: Iterable[Sequence[Tensor]], precision: str, clip: float, clock: StepClock
) -> None:
    """Trains on batches of one shape that are on the device: some eagerly, the rest by replaying one graph.

    Args:
        module: its ``training_step`` may not log.
        batches: one batch a step.
        precision: "bf16-mixed" or "32-true".
        clip: gradient norm to clip to; 0 clips nothing.
        clock: is told the end of every step.
    """
    feed = iter(batches)
    first = next(feed)
    device = first[0].device
    if device.type != "cuda":
        raise RuntimeError("a full-iteration CUDA graph needs a CUDA device")
    iteration = Iteration(module.to(device).train(), precision, clip)
    static = tuple(tensor.clone() for tensor in first)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for step in range(WARMUP):
            _copy(static, first if step == 0 else next(feed))
            clock.tick(device, iteration(static).detach().clone())
    torch.cuda.current_stream(device).wait_stream(side)
    # Without gradients at its start, the capture allocates them in the graph's own memory.
    iteration.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = iteration.launch(static)
    for batch in feed:
        _copy(static, batch)
        graph.replay()
        clock.tick(device, loss.detach().clone())
    clock.end(device)


class Iteration:
    """One training step as Lightning would do it.

    Args:
        module: the module, on its device.
        precision: "bf16-mixed" or "32-true".
        clip: gradient norm to clip to; 0 clips nothing.
    """

    def __init__(self, module: LightningModule, precision: str, clip: float) -> None:
        self.module, self.precision, self.clip = module, precision, clip
        self.device_type = next(module.parameters()).device.type
        self.optimizer = module.configure_optimizers()
        for group in self.optimizer.param_groups:
            # The count of updates has to lie on the device, or a replay would repeat the recorded one.
            group["capturable"] = self.device_type == "cuda"

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """Runs one step and returns its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        return self.launch(batch)

    def launch(self, batch: Sequence[Tensor]) -> Tensor:
        """Launches all of a step; there are no gradients yet."""
        with self._autocast():
            loss = self.module.training_step(batch, 0)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        return loss

    def _autocast(self) -> AbstractContextManager[None]:
        """Lightning's own context: its weight cache is on in some releases and off in others."""
        if self.precision == "32-true":
            return nullcontext()
        if self.precision != "bf16-mixed":
            raise ValueError(f"the full iteration is written for bf16-mixed and 32-true, not {self.precision}")
        return MixedPrecision("bf16-mixed", self.device_type).forward_context()


def _copy(static: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
    for target, source in zip(static, batch, strict=True):
        target.copy_(source)
