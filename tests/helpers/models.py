# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Modules to train and the data they train on. Each ``*_data`` gives (training loader, validation loader or None)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.helpers.trace import Loaders


class _WithAdamW(LightningModule):
    """AdamW over all parameters.

    Args:
        learning_rate: step size.
        fused: as ``torch.optim.AdamW`` takes it; None leaves the choice to torch. With mixed precision and
            ``gradient_clip_val`` it must not be True: Lightning refuses optimizers that unscale gradients themselves.
        optimizer: another optimizer class, called with the parameters and the learning rate.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        fused: bool | None = None,
        optimizer: type[torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self._learning_rate = learning_rate
        self._fused = fused
        self._optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._optimizer is not None:
            return self._optimizer(self.parameters(), lr=self._learning_rate)  # type: ignore[call-arg]
        fused = self._fused or None  # False would switch the foreach implementation off too
        return torch.optim.AdamW(self.parameters(), lr=self._learning_rate, weight_decay=0.01, fused=fused)


class DigitsCNN(_WithAdamW):
    """A small CNN with BatchNorm and dropout for 8 by 8 images; logs its loss, and loss and accuracy in validation."""

    def __init__(self, width: int = 16, dropout: float = 0.2, **optimizer: Any) -> None:
        super().__init__(**optimizer)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean())


class Classifier(_WithAdamW):
    """Trains any network of one input with cross entropy; the network is called as ``self.net(inputs)``."""

    def __init__(self, net: nn.Module, **optimizer: Any) -> None:
        super().__init__(**optimizer)
        self.net = net

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)


class TimmModule(Classifier):
    """A model of timm, untrained, on images.

    Args:
        name: as timm calls it.
        num_classes: outputs.
        fused_attention: False spells attention out in matrix products, whose gradients are deterministic.
    """

    def __init__(self, name: str, num_classes: int = 1000, fused_attention: bool = True, **optimizer: Any) -> None:
        import timm  # not every environment that imports this file has it

        super().__init__(timm.create_model(name, pretrained=False, num_classes=num_classes), **optimizer)
        if not fused_attention:
            for module in self.net.modules():
                if hasattr(module, "fused_attn"):
                    module.fused_attn = False


class MLPModule(Classifier):
    """Six hidden layers of Linear, LayerNorm and GELU, and a head: 26 parameters, next to no work for a GPU."""

    def __init__(self, width: int = 512, features: int = 512, classes: int = 10, **optimizer: Any) -> None:
        layers: list[nn.Module] = []
        for index in range(6):
            layers += [nn.Linear(features if index == 0 else width, width), nn.LayerNorm(width), nn.GELU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(width, classes)), **optimizer)


class GPTModule(_WithAdamW):
    """A decoder in the manner of GPT-2, predicting the next token.

    Args:
        attention: "fused" calls ``F.scaled_dot_product_attention``; "plain" spells it out in matrix products, whose
            gradients are deterministic in every precision.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 384,
        heads: int = 6,
        context: int = 256,
        vocabulary: int = 4096,
        dropout: float = 0.1,
        attention: Literal["fused", "plain"] = "fused",
        **optimizer: Any,
    ) -> None:
        super().__init__(**optimizer)
        self.net = GPT(layers, width, heads, context, vocabulary, dropout, attention)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.net(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocabulary: int, dropout: float, attention: str
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, context, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_init_gpt)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, context, dropout, attention)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm_1(hidden))
        return hidden + self.mlp(self.norm_2(hidden))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.heads, self.rate, self.kind = heads, dropout, kind
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        future = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(hidden).split(width, dim=2)
        )
        rate = self.rate if self.training else 0.0
        if self.kind == "fused":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=rate)
        else:
            scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
            scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
            mixed = F.dropout(scores.softmax(dim=3), rate, self.training) @ value
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def _init_gpt(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def digits_data(
    batch_size: int = 64, *, ragged: bool = True, validation: bool = True, limit: int | None = None, seed: int = 0
) -> Loaders:
    """The handwritten digits of scikit-learn: four fifths to train on, shuffled each epoch, one fifth to validate.

    Args:
        batch_size: images a batch.
        ragged: keep the smaller last batch of an epoch.
        validation: give a validation loader.
        limit: use only that many training images.
        seed: of the split and of the shuffling, which draws from a generator of its own.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = len(labels) * 4 // 5
    train, held_out = order[:cut][:limit], order[cut:]
    shuffling = torch.Generator().manual_seed(seed + 1)
    loader = DataLoader(
        TensorDataset(images[train], labels[train]),
        batch_size,
        shuffle=True,
        generator=shuffling,
        drop_last=not ragged,
    )
    if not validation:
        return loader, None
    return loader, DataLoader(TensorDataset(images[held_out], labels[held_out]), 2 * batch_size)


class Cycled(Dataset):
    """A dataset of ready batches, given in turn until ``steps`` have been given."""

    def __init__(self, batches: Sequence[Sequence[Tensor]], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Sequence[Tensor]:
        return self.batches[index % len(self.batches)]


def cycled(batches: Iterable[Sequence[Tensor]], steps: int, device: str | torch.device = "cpu") -> Loaders:
    """A loader of one epoch of ``steps`` batches that are made beforehand and, on request, already on the device."""
    ready = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
    return DataLoader(Cycled(ready, steps), batch_size=None), None


def image_batches(
    batch_size: int = 8, size: int = 224, classes: int = 1000, *, count: int = 4, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Random images and labels: ``count`` different batches, so that a stale static input shows."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(batch_size, 3, size, size, generator=generator),
            torch.randint(classes, (batch_size,), generator=generator),
        )
        for _ in range(count)
    ]


def token_batches(
    batch_size: int = 4, length: int = 256, vocabulary: int = 4096, *, count: int = 4, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and the tokens that follow them."""
    generator = torch.Generator().manual_seed(seed)
    text = [torch.randint(vocabulary, (batch_size, length + 1), generator=generator) for _ in range(count)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in text]


def feature_batches(
    batch_size: int = 256, features: int = 512, classes: int = 10, *, count: int = 4, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Random feature vectors and labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(batch_size, features, generator=generator),
            torch.randint(classes, (batch_size,), generator=generator),
        )
        for _ in range(count)
    ]
