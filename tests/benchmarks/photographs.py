# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Images to detect objects in: crops of the two photographs of scikit-learn, with shapes drawn on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.detector import STRIDES

KINDS = 3
"""Rectangles, ellipses and frames."""

_OBJECTS = 8


def detection_batches(size: int, batch_size: int = 4, *, count: int = 4, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Batches of images with the dense targets of ``detector.dense_loss``.

    Args:
        size: pixels of a side, a multiple of the largest stride.
        batch_size: images a batch.
        count: different batches.
        seed: of crops, shapes and colours.
    """
    from sklearn.datasets import load_sample_images

    photographs = [torch.tensor(image).permute(2, 0, 1).float() / 255 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        examples = [_example(photographs[index % len(photographs)], size, generator) for index in range(batch_size)]
        batches.append(tuple(torch.stack(parts) for parts in zip(*examples, strict=True)))
    return batches


def _example(photograph: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """One image, and its classes, distances and positive points."""
    _, height, width = photograph.shape
    side = int(torch.randint(height // 2, height + 1, (), generator=generator))
    top = int(torch.randint(height - side + 1, (), generator=generator))
    left = int(torch.randint(width - side + 1, (), generator=generator))
    crop = photograph[None, :, top : top + side, left : left + side]
    image = F.interpolate(crop, (size, size), mode="bilinear", align_corners=False)[0]
    # Many small ones and a few large ones, as photographs have them.
    spans = size * (0.04 + 0.4 * torch.rand(_OBJECTS, 2, generator=generator).square())
    corners = (size - spans) * torch.rand(_OBJECTS, 2, generator=generator)
    boxes = torch.cat([corners, corners + spans], dim=1)
    kinds = torch.randint(KINDS, (_OBJECTS,), generator=generator)
    # Small ones last, so that none is covered whole.
    order = spans.prod(dim=1).argsort(descending=True)
    boxes, kinds = boxes[order], kinds[order]
    for box, kind in zip(boxes, kinds.tolist(), strict=True):
        _draw(image, box, kind, torch.rand(3, 1, generator=generator))
    return image, *dense_targets(boxes, kinds, size)


def _draw(image: Tensor, box: Tensor, kind: int, colour: Tensor) -> None:
    """Draws a rectangle, an ellipse or a frame into a box, with sides left, top, right, bottom."""
    pixels = torch.arange(image.shape[1]) + 0.5
    centre, radius = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2
    # From -1 to 1 across the box.
    across = ((pixels - centre[0]) / radius[0])[None, :]
    down = ((pixels - centre[1]) / radius[1])[:, None]
    furthest = torch.maximum(across.abs(), down.abs())
    inside = (furthest <= 1, across.square() + down.square() <= 1, (furthest <= 1) & (furthest > 0.8))[kind]
    image[:, inside] = colour


def dense_targets(boxes: Tensor, kinds: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assigns objects to the points of all levels.

    A point has the smallest object whose middle half it is in, at the level that suits the size of the object.

    Args:
        boxes: left, top, right, bottom in pixels, shape (objects, 4), the largest first.
        kinds: of the objects.
        size: pixels of a side of the image.
    """
    spans = (boxes[:, 2:] - boxes[:, :2]).amax(dim=1)
    suited = torch.bucketize(spans, torch.tensor([size / 8, size / 4]))
    classes, distances, positive = [], [], []
    for level, stride in enumerate(STRIDES):
        steps = (torch.arange(size // stride) + 0.5) * stride
        points = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=2).view(-1, 1, 2)
        sides = torch.cat([points - boxes[:, :2], boxes[:, 2:] - points], dim=2)
        middle = ((points - (boxes[:, :2] + boxes[:, 2:]) / 2).abs() <= (boxes[:, 2:] - boxes[:, :2]) / 4).all(dim=2)
        belongs = middle & (suited == level)
        # Of several, the last: they are sorted by size.
        last = (belongs * torch.arange(1, len(boxes) + 1)).amax(dim=1) - 1
        has = (last >= 0).float()
        classes.append(F.one_hot(kinds[last], KINDS) * has[:, None])
        distances.append(sides[torch.arange(len(sides)), last] / stride * has[:, None])
        positive.append(has)
    return torch.cat(classes), torch.cat(distances), torch.cat(positive)
