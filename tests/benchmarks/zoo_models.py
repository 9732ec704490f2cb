# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The models of the zoo: published architectures made small, and hand-written ones. Their packages are imported late.

Every network is the ``net`` of its LightningModule. Nothing is adapted to replay: models are made and called as their
packages document it. Decoders keep no cache while they train, as in the Trainer of transformers.
"""

import copy
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import GPT, feature_batches, image_batches, token_batches

CLASSES = 10
WORDS = 100
LENGTH = 32
BATCH = 4
HIDDEN = 64

Step = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Model:
    """One row of the zoo.

    Args:
        package: the package that it comes from; None for a hand-written one.
        make: takes the size of images in pixels, and gives the network.
        batches: takes the size of images in pixels, and gives a few batches.
        step: the body of `training_step`; takes the LightningModule and a batch.
        around: further submodules of the LightningModule, by name.
    """

    package: str | None
    make: Callable[[int], nn.Module]
    batches: Callable[[int], list[Any]]
    step: Step
    around: Callable[[], dict[str, nn.Module]] = dict

    def module(self, pixels: int) -> LightningModule:
        """Makes what is trained."""
        return Trained(self.make(pixels), self.step, self.around())


class Trained(LightningModule):
    """Trains a network with AdamW.

    Args:
        net: the network.
        step: the body of `training_step`.
        around: further submodules, by name.
    """

    def __init__(self, net: nn.Module, step: Step, around: dict[str, nn.Module]) -> None:
        super().__init__()
        self.net = net
        self.step = step
        for name, module in around.items():
            self.add_module(name, module)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


# -- steps and batches that several models share ---------------------------------------------------------------------


def classify(module: Any, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module.net(inputs), labels)


def with_labels(module: Any, batch: Any) -> Tensor:
    """As transformers has it: the labels go in, the loss comes out."""
    return module.net(**batch).loss


def next_token(module: Any, batch: Any) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(module.net(tokens).flatten(0, 1), targets.flatten())


def images(pixels: int) -> list[Any]:
    return image_batches(BATCH, pixels, CLASSES)


def features(_: int) -> list[Any]:
    return feature_batches(BATCH, HIDDEN, CLASSES)


def text(_: int) -> list[Any]:
    return token_batches(BATCH, LENGTH, WORDS)


def _random(make: Callable[[torch.Generator], Any]) -> list[Any]:
    """Makes four batches that differ, so that a stale input shows."""
    generator = torch.Generator().manual_seed(0)
    return [make(generator) for _ in range(4)]


# -- timm ------------------------------------------------------------------------------------------------------------

_TIMM = (
    "resnet18",
    "resnet50",
    "efficientnet_b0",
    "mobilenetv3_large_100",
    "convnext_atto",
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "regnety_002",
    "densenet121",
    "xcit_nano_12_p16_224",
    "levit_128s",
    "edgenext_xx_small",
    "davit_tiny",
    "hrnet_w18_small",
    "nfnet_l0",
    "pvt_v2_b0",
    "focalnet_tiny_srf",
    "mobilevit_xxs",
    "tnt_s_patch16_224",
    "eva02_tiny_patch14_224",
)
_TIMM_OF_ONE_SIZE = frozenset(
    {
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "xcit_nano_12_p16_224",
        "levit_128s",
        "tnt_s_patch16_224",
        "eva02_tiny_patch14_224",
    }
)


def _timm(name: str, pixels: int) -> nn.Module:
    import timm

    sized = {"img_size": pixels} if name in _TIMM_OF_ONE_SIZE else {}
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **sized)


# -- transformers ----------------------------------------------------------------------------------------------------


def _transformer(architecture: str, configuration: str, options: dict[str, Any], _: int) -> nn.Module:
    import transformers

    config = getattr(transformers, configuration)(**copy.deepcopy(options))
    # In training mode, as a user's own network is: transformers gives models back as they were made.
    return getattr(transformers, architecture)(config).train()


def sequences(_: int) -> list[Any]:
    """Padded sequences with one label each."""

    def make(generator: torch.Generator) -> dict[str, Tensor]:
        lengths = torch.randint(LENGTH // 2, LENGTH, (BATCH, 1), generator=generator)
        return {
            "input_ids": torch.randint(5, WORDS, (BATCH, LENGTH), generator=generator),
            "attention_mask": (torch.arange(LENGTH) < lengths).long(),
            "labels": torch.randint(2, (BATCH,), generator=generator),
        }

    return _random(make)


def documents(_: int) -> list[Any]:
    """Packed sequences whose tokens are the labels."""

    def make(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(5, WORDS, (BATCH, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _random(make)


def pictures(pixels: int) -> list[Any]:
    return [{"pixel_values": inputs, "labels": labels} for inputs, labels in images(pixels)]


def segmented(pixels: int) -> list[Any]:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(BATCH, 3, pixels, pixels, generator=generator),
            "labels": torch.randint(CLASSES, (BATCH, pixels, pixels), generator=generator),
        }

    return _random(make)


def sounds(_: int) -> list[Any]:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "input_values": torch.randn(BATCH, 4000, generator=generator),
            "labels": torch.randint(2, (BATCH,), generator=generator),
        }

    return _random(make)


_ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
_NO_CACHE = {"use_cache": False}
_IMAGE = {"num_channels": 3, "num_labels": CLASSES}

_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], list[Any]]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _ENCODER, sequences),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**_ENCODER, "embedding_size": 32}, sequences),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
        sequences,
    ),
    "xlnet": (
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": WORDS, "d_model": HIDDEN, "n_layer": 2, "n_head": 4, "d_inner": 128},
        sequences,
    ),
    "longformer": (
        "LongformerForSequenceClassification",
        "LongformerConfig",
        {**_ENCODER, "attention_window": 16, "pad_token_id": 1},
        sequences,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_NO_CACHE, "vocab_size": WORDS, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64},
        documents,
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **_NO_CACHE,
            "vocab_size": WORDS,
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 16,
        },
        documents,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {**_NO_CACHE, "vocab_size": WORDS, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
        documents,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_NO_CACHE, **_ENCODER, "num_key_value_heads": 2}, documents),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {**_NO_CACHE, "vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8},
        documents,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_NO_CACHE,
            "vocab_size": WORDS,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        documents,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_NO_CACHE,
            "vocab_size": WORDS,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
        },
        documents,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {**_IMAGE, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        pictures,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            **_IMAGE,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 48, 64],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": HIDDEN,
        },
        segmented,
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **{key: value for key, value in _ENCODER.items() if key != "max_position_embeddings"},
            "conv_dim": [32] * 3,
            "conv_kernel": [10, 5, 5],
            "conv_stride": [5, 4, 4],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "classifier_proj_size": 32,
        },
        sounds,
    ),
}


def _hf_vit(pixels: int) -> nn.Module:
    sizes = {key: value for key, value in _ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")}
    options = {**sizes, **_IMAGE, "image_size": pixels, "patch_size": 16}
    return _transformer("ViTForImageClassification", "ViTConfig", options, pixels)


# -- torchvision -----------------------------------------------------------------------------------------------------


def _torchvision(path: str, options: dict[str, Any], _: int) -> nn.Module:
    folder, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"torchvision.models{folder}"), name)(weights=None, **options)


def _segment(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch["pixel_values"])["out"], batch["labels"])


def _detect(module: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return sum(module.net(inputs, targets).values())


def _flow(module: Any, batch: Any) -> Tensor:
    first, second, target = batch
    return sum((flow - target).abs().mean() for flow in module.net(first, second, num_flow_updates=2))


def _clips(pixels: int) -> list[Any]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        clips = torch.randn(2, 3, 4, pixels, pixels, generator=generator)
        return clips, torch.randint(CLASSES, (2,), generator=generator)

    return _random(make)


def _scenes(pixels: int) -> list[Any]:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        corners = torch.rand(2, 3, 2, generator=generator) * pixels / 2
        boxes = torch.cat([corners, corners + pixels / 3], dim=2)
        labels = torch.randint(1, CLASSES, (2, 3), generator=generator)
        scenes = torch.rand(2, 3, pixels, pixels, generator=generator)
        return list(scenes), [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]

    return _random(make)


def _pairs_of_frames(_: int) -> list[Any]:
    size = 128  # the smallest that RAFT takes

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        first, second = torch.rand(2, 1, 3, size, size, generator=generator) * 2 - 1
        return first, second, torch.randn(1, 2, size, size, generator=generator)

    return _random(make)


_CLASSES = {"num_classes": CLASSES}
_DETECTOR = {"num_classes": CLASSES, "weights_backbone": None, "min_size": 128, "max_size": 128}
_TORCHVISION: dict[str, tuple[str, dict[str, Any], Callable[[int], list[Any]], Step]] = {
    "shufflenet_v2": (".shufflenetv2.shufflenet_v2_x0_5", _CLASSES, images, classify),
    "swin_t": (".swin_transformer.swin_t", _CLASSES, images, classify),
    "r3d_18": (".video.r3d_18", _CLASSES, _clips, classify),
    "fcn_resnet50": (".segmentation.fcn_resnet50", {**_CLASSES, "weights_backbone": None}, segmented, _segment),
    "retinanet": (".detection.retinanet_resnet50_fpn", _DETECTOR, _scenes, _detect),
    "fasterrcnn": (".detection.fasterrcnn_mobilenet_v3_large_fpn", _DETECTOR, _scenes, _detect),
    "raft_small": (".optical_flow.raft_small", {}, _pairs_of_frames, _flow),
}


# -- torch-geometric -------------------------------------------------------------------------------------------------


def _graph_network(name: str, _: int) -> nn.Module:
    import torch_geometric.nn

    # With loops of its own, a layer selects edges by a mask in every step, whose size only the device knows.
    options = {"add_self_loops": False} if name in ("GCN", "GAT") else {}
    make = getattr(torch_geometric.nn, name)
    return make(16, HIDDEN, num_layers=2, out_channels=CLASSES, dropout=0.1, **options)


def _label_nodes(module: Any, batch: Any) -> Tensor:
    nodes, edges, labels = batch
    return F.cross_entropy(module.net(nodes, edges), labels)


def _graphs(_: int) -> list[Any]:
    """Random graphs; every node has its loop, as torch_geometric.transforms.AddSelfLoops gives it once for all."""

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        edges = torch.randint(64, (2, 256), generator=generator)
        return (
            torch.randn(64, 16, generator=generator),
            torch.cat([edges[:, edges[0] != edges[1]][:, :240], torch.arange(64).expand(2, 64)], dim=1),
            torch.randint(CLASSES, (64,), generator=generator),
        )

    return _random(make)


# -- hand-written ----------------------------------------------------------------------------------------------------


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


def _generator() -> nn.Module:
    layers = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    return layers.requires_grad_(False)


def _tell_apart(module: Any, batch: Any) -> Tensor:
    real, _ = batch
    noise = torch.randn(len(real), 8, real.shape[2] // 4, real.shape[3] // 4, device=real.device)
    with torch.no_grad():
        fake = module.generator(noise)
    return F.softplus(-module.net(real)).mean() + F.softplus(module.net(fake)).mean()


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _contrast(module: Any, batch: Any) -> Tensor:
    inputs, labels = batch
    distance = (module.net(inputs) - module.net(inputs.flip(0))).square().mean(dim=1)
    same = (labels == labels.flip(0)).float()
    return (same * distance + (1 - same) * F.relu(1 - distance)).mean()


class _Adapted(nn.Module):
    """A frozen linear layer with a trained difference of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.frozen(inputs) + self.up(self.down(self.dropout(inputs)))


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = _mlp(32, HIDDEN, 16)
        self.inward = nn.Conv2d(3, 16, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.outward = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(16, device=time.device) / 4)
        angles = time[:, None] * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        hidden = self.inward(noisy) + embedded[:, :, None, None]
        return self.outward(hidden + self.middle(hidden))


def _denoise(module: Any, batch: Any) -> Tensor:
    clean, _ = batch
    noise = torch.randn_like(clean)
    time = torch.rand(len(clean), device=clean.device)
    share = time[:, None, None, None]
    return F.mse_loss(module.net((1 - share) * clean + share * noise, 100 * time), noise)


class _Tied(GPT):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__(2, HIDDEN, 4, LENGTH, WORDS, 0.1, "plain")
        self.head.weight = self.tokens.weight


class _Checkpointed(nn.Module):
    """Activations of each block are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


def _normalised() -> nn.Module:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 16, 3, stride=2)),
        nn.ReLU(),
        weight_norm(nn.Conv2d(16, 16, 3, stride=2)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        spectral_norm(nn.Linear(16, CLASSES)),
    )


_WRITTEN: dict[str, Model] = {
    "lstm_dropout": Model(None, lambda _: _LSTM(), text, next_token),
    "gan_discriminator": Model(None, lambda _: _critic(), images, _tell_apart, lambda: {"generator": _generator()}),
    "siamese": Model(None, lambda _: _mlp(HIDDEN, HIDDEN, 16), features, _contrast),
    "lora": Model(
        None,
        lambda _: nn.Sequential(_Adapted(HIDDEN, HIDDEN), nn.GELU(), _Adapted(HIDDEN, CLASSES)),
        features,
        classify,
    ),
    "diffusion": Model(None, lambda _: _Denoiser(), images, _denoise),
    "tied_weights": Model(None, lambda _: _Tied(), text, next_token),
    "activation_checkpointing": Model(None, lambda _: _Checkpointed(), features, classify),
    "spectral_and_weight_norm": Model(None, lambda _: _normalised(), images, classify),
}


def _zoo() -> dict[str, Model]:
    zoo = {name: Model("timm", partial(_timm, name), images, classify) for name in _TIMM}
    for name, (architecture, configuration, options, batches) in _TRANSFORMERS.items():
        make = partial(_transformer, architecture, configuration, options)
        zoo[f"hf_{name}"] = Model("transformers", make, batches, with_labels)
    zoo["hf_vit"] = Model("transformers", _hf_vit, pictures, with_labels)
    for name, (path, options, batches, step) in _TORCHVISION.items():
        zoo[f"tv_{name}"] = Model("torchvision", partial(_torchvision, path, options), batches, step)
    for name in ("GCN", "GAT", "GraphSAGE", "GIN"):
        zoo[f"pyg_{name.lower()}"] = Model("torch_geometric", partial(_graph_network, name), _graphs, _label_nodes)
    return {**zoo, **_WRITTEN}


ZOO = _zoo()
