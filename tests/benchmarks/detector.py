# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A small one-stage detector: a residual backbone, a feature pyramid, and a head with two outputs at each level."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

STRIDES = (8, 16, 32)
"""Pixels between the points of a level."""

DEPTHS = (9, 15, 18, 9)
"""Residual blocks at strides 4, 8, 16 and 32: with these the network has about 400 parameters."""

Outputs = tuple[tuple[Tensor, Tensor], ...]


class Detector(LightningModule):
    """Trains the network on dense targets; everything that it computes stays on the device.

    Args:
        depths: residual blocks at each stride.
        width: channels at stride 4.
        classes: kinds of objects.
        fused: as AdamW takes it.
    """

    def __init__(
        self, depths: Sequence[int] = DEPTHS, width: int = 16, classes: int = 3, fused: bool | None = None
    ) -> None:
        super().__init__()
        self.net = Pyramid(depths, width, classes)
        self._fused = fused or None

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, *targets = batch
        return dense_loss(self.net(images), *targets)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, *targets = batch
        self.log("val_loss", dense_loss(self.net(images), *targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01, fused=self._fused)


def dense_loss(outputs: Outputs, classes: Tensor, distances: Tensor, positive: Tensor) -> Tensor:
    """Returns the sum of focal, L1 and GIoU losses.

    Args:
        outputs: of the network.
        classes: which kinds of objects are at each point, shape (batch, points, kinds).
        distances: from each point to the sides of its object, in strides, shape (batch, points, 4).
        positive: 1 where a point has an object, shape (batch, points).
    """
    logits = torch.cat([level.flatten(2) for level, _ in outputs], dim=2).transpose(1, 2).float()
    predicted = F.softplus(torch.cat([level.flatten(2) for _, level in outputs], dim=2).transpose(1, 2).float())
    objects = positive.sum().clamp(min=1)
    entropy = F.binary_cross_entropy_with_logits(logits, classes, reduction="none")
    focal = (entropy * (classes - logits.sigmoid()).square()).sum()
    l1 = ((predicted - distances).abs().mean(dim=2) * positive).sum()
    giou = ((1 - generalized_iou(predicted, distances)) * positive).sum()
    return (focal + l1 + giou) / objects


def generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """Returns the generalized IoU of boxes around the same points, given by distances to their four sides."""
    both = torch.minimum(first, second)
    hull = torch.maximum(first, second)
    overlap = _area(both)
    union = _area(first) + _area(second) - overlap
    around = _area(hull)
    return overlap / (union + 1e-6) - (around - union) / (around + 1e-6)


def _area(sides: Tensor) -> Tensor:
    left, top, right, bottom = sides.unbind(dim=-1)
    return (left + right) * (top + bottom)


class Pyramid(nn.Module):
    """Class logits and distances to the sides of an object, at each of three strides."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, stride=2), _conv(width, width, stride=2))
        widths = [width * 2**stage for stage in range(len(depths))]
        self.stages = nn.ModuleList(
            nn.Sequential(
                *([] if stage == 0 else [_conv(widths[stage - 1], widths[stage], stride=2)]),
                *(_Block(widths[stage]) for _ in range(depth)),
            )
            for stage, depth in enumerate(depths)
        )
        inner = 2 * width
        self.lateral = nn.ModuleList(_conv(channels, inner, kernel=1) for channels in widths[1:])
        self.down = nn.ModuleList(_conv(inner, inner, stride=2) for _ in STRIDES[1:])
        self.smooth = nn.ModuleList(_conv(inner, inner) for _ in STRIDES)
        self.merge = nn.ModuleList(_conv(inner, inner) for _ in STRIDES[1:])
        self.kinds = nn.ModuleList(_tower(inner, classes, bias=-4.0) for _ in STRIDES)
        self.sides = nn.ModuleList(_tower(inner, 4, bias=1.0) for _ in STRIDES)

    def forward(self, images: Tensor) -> Outputs:
        hidden = self.stages[0](self.stem(images))
        levels = []
        for stage, lateral in zip(self.stages[1:], self.lateral, strict=True):
            hidden = stage(hidden)
            levels.append(lateral(hidden))
        for fine in reversed(range(len(levels) - 1)):
            levels[fine] = levels[fine] + F.interpolate(levels[fine + 1], scale_factor=2.0, mode="nearest")
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        for coarse, (down, merge) in enumerate(zip(self.down, self.merge, strict=True), start=1):
            levels[coarse] = merge(levels[coarse] + down(levels[coarse - 1]))
        return tuple(
            (kinds(level), sides(level)) for kinds, sides, level in zip(self.kinds, self.sides, levels, strict=True)
        )


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


def _tower(width: int, outputs: int, bias: float) -> nn.Sequential:
    """Ends in what a point says before it has learnt anything: no object, but if there is one, of some size."""
    last = nn.Conv2d(width, outputs, 1)
    nn.init.constant_(last.bias, bias)
    return nn.Sequential(_conv(width, width), _conv(width, width), last)
