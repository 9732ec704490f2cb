# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What is timed: a LightningModule with its network in ``net``, and batches that are on the device beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.benchmarks.detector import Detector
from tests.benchmarks.photographs import detection_batches
from tests.helpers.models import (
    GPTModule,
    MLPModule,
    TimmModule,
    feature_batches,
    image_batches,
    token_batches,
)


@dataclass(frozen=True)
class Workload:
    """One row of a benchmark.

    Args:
        what: the workload in words, for the receipt.
        make_module: takes ``fused``, whether AdamW is to be the fused one.
        make_batches: gives the batches that are cycled through.
        make_validation: gives the batches that a complete fit validates on.
    """

    what: str
    make_module: Callable[[bool], LightningModule]
    make_batches: Callable[[], Sequence[Sequence[Tensor]]]
    make_validation: Callable[[], Sequence[Sequence[Tensor]]] = tuple


class Empty(LightningModule):
    """Nothing but a loss: what is left of a step is Lightning's own."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._fused = fused or None

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=self._fused)


USUAL = ("resnet18", "efficientnet_b0", "vit_tiny", "gpt", "mlp")
"""What step times are published for."""

WORKLOADS = {
    "resnet18": Workload(
        "timm resnet18, batch 8, 224 px", lambda fused: TimmModule("resnet18", fused=fused), image_batches
    ),
    "efficientnet_b0": Workload(
        "timm efficientnet_b0, batch 8, 224 px", lambda fused: TimmModule("efficientnet_b0", fused=fused), image_batches
    ),
    "vit_tiny": Workload(
        "timm vit_tiny_patch16_224, batch 8, 224 px",
        lambda fused: TimmModule("vit_tiny_patch16_224", fused=fused),
        image_batches,
    ),
    "gpt": Workload(
        "GPT, 12 layers of 384, dropout 0.1, batch 4, 256 tokens", lambda fused: GPTModule(fused=fused), token_batches
    ),
    "mlp": Workload(
        "MLP, 6 hidden layers of 512 with LayerNorm, batch 256", lambda fused: MLPModule(fused=fused), feature_batches
    ),
    "resnet50": Workload(
        "timm resnet50, batch 32, 224 px", lambda fused: TimmModule("resnet50", fused=fused), lambda: image_batches(32)
    ),
    "densenet121": Workload(
        "timm densenet121, batch 8, 224 px", lambda fused: TimmModule("densenet121", fused=fused), image_batches
    ),
    "gpt32": Workload(
        "GPT, 12 layers of 384, dropout 0.1, batch 32, 256 tokens",
        lambda fused: GPTModule(fused=fused),
        lambda: token_batches(32),
    ),
    "empty": Workload("an empty step of one parameter", Empty, lambda: feature_batches(1, 1)),
    "detector": Workload(
        "one-stage detector of about 400 parameters, batch 4, 640 px, photographs with shapes drawn on them",
        lambda fused: Detector(fused=fused),
        lambda: detection_batches(640),
        lambda: detection_batches(640, count=2, seed=1),
    ),
    "tiny_detector": Workload(
        "one-stage detector, one block a stage, batch 2, 128 px",
        lambda fused: Detector((1, 1, 1, 1), width=4, fused=fused),
        lambda: detection_batches(128, 2, count=2),
        lambda: detection_batches(128, 2, count=1, seed=1),
    ),
    # Small enough for a CPU: for trying the harness, not for figures.
    "tiny": Workload(
        "MLP, 6 hidden layers of 16, batch 4",
        lambda fused: MLPModule(width=16, features=8, fused=fused),
        lambda: feature_batches(4, 8),
    ),
}


SIZES = tuple(2**power for power in range(9))
"""Batch sizes of a sweep."""


def sized(model: str, size: int) -> str:
    """The name of a workload with another batch size."""
    return f"{model}/{size}"


_OF_ANY_SIZE: dict[str, tuple[str, Callable[[int], Sequence[Sequence[Tensor]]]]] = {
    "resnet18": ("timm resnet18, 224 px", lambda size: image_batches(size, count=2)),
    "gpt": ("GPT, 12 layers of 384, dropout 0.1, 256 tokens", lambda size: token_batches(size, count=2)),
    "tiny": ("MLP, 6 hidden layers of 16", lambda size: feature_batches(size, 8)),
}
SWEPT = tuple(_OF_ANY_SIZE)
WORKLOADS |= {
    sized(model, size): Workload(f"{what}, batch {size}", WORKLOADS[model].make_module, partial(make_batches, size))
    for model, (what, make_batches) in _OF_ANY_SIZE.items()
    for size in SIZES
}
