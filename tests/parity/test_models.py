# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Networks of every kind: each replays, or is native for the reason given, and equals native either way."""

import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_replay import Reason
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    Learner,
    batches,
    check_native,
    check_replayed,
    mlp,
    tokens,
)

# torch and Lightning deprecate, and advise, while these networks are built; parity is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


class Last(nn.Module):
    """Takes what a recurrent network returns to logits."""

    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.rnn(inputs)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed, _ = self.attention(inputs, inputs, inputs)
        return self.head(mixed.mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs).mean(1))


class Tied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8, padding_idx=padding_idx)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(inputs)))).mean(1)


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8, **options)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embedding(inputs).mean(1))


class Checkpointed(nn.Module):
    """Activation checkpointing inside of the network, perhaps with dropout in the recomputed part."""

    def __init__(self, reentrant: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.first(inputs), use_reentrant=self.reentrant))


class WithLock(nn.Module):
    """Holds what cannot be copied, compared or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.lock = threading.Lock()
        self.me = weakref.ref(self)

    def forward(self, inputs: Tensor) -> Tensor:
        with self.lock:
            return self.me().inner(inputs)


class WithSlots(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale


class WithProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self._scale = 2.0

    @property
    def scale(self) -> float:
        return self._scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale


class Wrapper(nn.Module):
    """Passes everything on, as the data-parallel wrappers do, attributes included."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Residual(nn.Module):
    """Views, in-place activations, a chunk and a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu_(self.first(inputs))
        left, right = self.second(hidden).chunk(2, dim=1)
        mixed = torch.cat([left.sigmoid() * right, right.neg()], dim=1)
        mixed += hidden
        mixed[:, 0] = 0
        return self.head(mixed)


class EMABuffers(nn.Module):
    """Keeps running statistics in buffers, in place, and a step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
            self.seen += 1
        return self.inner(inputs - self.mean)


class DoubleUse(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.shared(torch.tanh(self.shared(self.first(inputs)))))


class Outer(nn.Module):
    """A parameter used by itself, an unused one, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(CLASSES)) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale + self.listed[0]


class CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return gradient * (inputs.abs() < 1.5)


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(CustomFunction.apply(self.first(inputs)))


class Detached(nn.Module):
    """Half of the network gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.left(inputs) + self.right(inputs).detach())


def sequence(net: Callable[[], nn.Module], width: int = 8) -> tuple[Callable[[], nn.Module], Any]:
    return net, lambda: batches(4, width)


def conv(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(64, CLASSES))


def images() -> Any:
    return batches(2, 4, 4)


def with_eval_norm() -> nn.Module:
    net = mlp()
    net[1].eval()
    return net


class FrozenNorm(nn.Sequential):
    """Keeps its norms in evaluation mode, whatever is asked for."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()
        return self


REPLAYED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (mlp, batches),
    "lstm": (lambda: Last(nn.LSTM(8, 6, num_layers=2, batch_first=True), 6), lambda: batches(4, 8)),
    "lstm with dropout": (
        lambda: Last(nn.LSTM(8, 6, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True), 12),
        lambda: batches(4, 8),
    ),
    "lstm with projection": (lambda: Last(nn.LSTM(8, 6, proj_size=3, batch_first=True), 3), lambda: batches(4, 8)),
    "gru": (lambda: Last(nn.GRU(8, 6, batch_first=True), 6), lambda: batches(4, 8)),
    "rnn": (lambda: Last(nn.RNN(8, 6, batch_first=True), 6), lambda: batches(4, 8)),
    "attention": (Attention, lambda: batches(4, 8)),
    "attention with dropout": (lambda: Attention(0.2), lambda: batches(4, 8)),
    "transformer encoder": (Encoder, lambda: batches(4, 8)),
    "tied weights": (Tied, tokens),
    "tied weights with padding": (lambda: Tied(padding_idx=0), tokens),
    "embedding": (Embedded, tokens),
    "embedding with padding": (lambda: Embedded(padding_idx=1), tokens),
    "embedding scaled by frequency": (lambda: Embedded(scale_grad_by_freq=True), tokens),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))), batches),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES))), batches),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(FEATURES, CLASSES))), batches),
    "batch norm without statistics": (lambda: conv(nn.BatchNorm2d(4, track_running_stats=False)), images),
    "batch norm without affine": (lambda: conv(nn.BatchNorm2d(4, affine=False)), images),
    "frozen batch norm": (lambda: FrozenNorm(*mlp()), batches),
    "sync batch norm": (lambda: conv(nn.SyncBatchNorm(4)), images),
    "instance and group norm": (lambda: conv(nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)), images),
    "channels last": (lambda: conv(nn.Conv2d(4, 4, 3, padding=1)).to(memory_format=torch.channels_last), images),
    "in-place activations": (Residual, batches),
    "buffers in place": (EMABuffers, batches),
    "a layer used twice": (DoubleUse, batches),
    "loose parameters": (Outer, batches),
    "custom function": (StraightThrough, batches),
    "detached branch": (Detached, batches),
    "lock and weak reference": (WithLock, batches),
    "slots": (WithSlots, batches),
    "property": (WithProperty, batches),
    "wrapper": (lambda: Wrapper(mlp()), batches),
    "wrapper twice": (lambda: Wrapper(Wrapper(mlp())), batches),
    "dropout of every kind": (
        lambda: conv(nn.Dropout2d(0.3), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.RReLU()),
        images,
    ),
    "pooling and upsampling": (
        lambda: conv(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(4)),
        images,
    ),
    "checkpointed": (Checkpointed, batches),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed(name: str) -> None:
    make, data = REPLAYED[name]

    check_replayed(lambda: Learner(make()), data())


@pytest.mark.parametrize("name", ["mlp", "lstm with dropout", "transformer encoder", "tied weights", "spectral norm"])
def test_replayed_under_autocast(name: str) -> None:
    make, data = REPLAYED[name]

    check_replayed(lambda: Learner(make()), data(), precision="bf16-mixed")


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_replayed_in_true_precision(precision: str) -> None:
    check_replayed(lambda: Learner(mlp()), precision=precision)


class Sync(nn.Module):
    """Asks the device for a value."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.ask = mlp(), ask

    def forward(self, inputs: Tensor) -> Tensor:
        self.ask(inputs)
        return self.inner(inputs)


class Scripted(nn.Module):
    """Calls a function at one point of its forward, with itself and the hidden values."""

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.act = mlp(), act
        self.calls = 0
        self.seen: list[float] = []
        self.register_buffer("state", torch.zeros(FEATURES))
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        given = self.act(self, inputs)
        return self.inner((inputs if given is None else given) * self.weight)


def _count(module: Any, inputs: Tensor) -> None:
    module.calls += 1


def _append(module: Any, inputs: Tensor) -> None:
    module.seen.append(0.5)


def _rebind(module: Any, inputs: Tensor) -> None:
    module.state = module.state + 1


def _write_parameter(module: Any, inputs: Tensor) -> None:
    with torch.no_grad():
        module.weight.mul_(0.99)


def _write_parameter_data(module: Any, inputs: Tensor) -> None:
    module.weight.data.mul_(0.99)


def _move_parameter(module: Any, inputs: Tensor) -> None:
    module.weight.data = module.weight.data * 0.99


def _replace_parameter(module: Any, inputs: Tensor) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 0.99)


def _write_input(module: Any, inputs: Tensor) -> None:
    inputs.mul_(0.5)


def _python_random(module: Any, inputs: Tensor) -> Tensor:
    return inputs * random.random()


def _numpy_random(module: Any, inputs: Tensor) -> Tensor:
    return inputs * np.random.rand()


def _own_generator(module: Any, inputs: Tensor) -> Tensor:
    return inputs * torch.rand(FEATURES, generator=torch.Generator().manual_seed(3))


def _set_seed(module: Any, inputs: Tensor) -> Tensor:
    torch.manual_seed(5)
    return inputs * torch.rand(FEATURES)


def _alternate(module: Any, inputs: Tensor) -> Tensor | None:
    module.calls = 1 - module.calls
    return inputs * 2 if module.calls else None


def _toggle_training(module: Any, inputs: Tensor) -> None:
    module.inner[3].train(not module.inner[3].training)


def _freeze(module: Any, inputs: Tensor) -> None:
    module.inner[0].bias.requires_grad_(not module.inner[0].bias.requires_grad)


def _add_hook(module: Any, inputs: Tensor) -> None:
    module.inner[0].register_forward_hook(lambda *_: None)


NATIVE: dict[str, tuple[Callable[[], nn.Module], Any, Reason, str]] = {
    "item": (lambda: Sync(lambda x: x.sum().item()), batches, Reason.HOST_SYNC, "test_models.py"),
    "branch": (lambda: Sync(lambda x: bool(x.sum() > 0)), batches, Reason.HOST_SYNC, "test_models.py"),
    "mask": (lambda: Sync(lambda x: x[x > 0]), batches, Reason.HOST_SYNC, "test_models.py"),
    "nonzero": (lambda: Sync(lambda x: x.nonzero()), batches, Reason.HOST_SYNC, "test_models.py"),
    "tolist": (lambda: Sync(lambda x: x.tolist()), batches, Reason.HOST_SYNC, "test_models.py"),
    "batch norm without momentum": (
        lambda: conv(nn.BatchNorm2d(4, momentum=None)),
        images,
        Reason.HOST_SYNC,
        "batchnorm.py",
    ),
    "checkpointed around dropout": (lambda: Checkpointed(dropout=0.2), batches, Reason.HOST_RANDOM, "in dropout"),
    "checkpointed the old way": (lambda: Checkpointed(reentrant=True), batches, Reason.CAPTURE_FAILED, "net"),
    "counter": (lambda: Scripted(_count), batches, Reason.ATTRIBUTE_WRITTEN, "net.calls"),
    "list": (lambda: Scripted(_append), batches, Reason.ATTRIBUTE_WRITTEN, "net.seen"),
    "buffer rebound": (lambda: Scripted(_rebind), batches, Reason.BUFFER_REBOUND, "net.state"),
    "parameter written": (lambda: Scripted(_write_parameter), batches, Reason.PARAMETER_WRITTEN, "net.weight"),
    "parameter written past autograd": (
        lambda: Scripted(_write_parameter_data),
        batches,
        Reason.PARAMETER_WRITTEN,
        "",
    ),
    "parameter moved": (lambda: Scripted(_move_parameter), batches, Reason.ATTRIBUTE_WRITTEN, "net.weight"),
    "parameter replaced": (lambda: Scripted(_replace_parameter), batches, Reason.ATTRIBUTE_WRITTEN, "net.weight"),
    "input written": (lambda: Scripted(_write_input), batches, Reason.INPUT_WRITTEN, "net"),
    "python random": (lambda: Scripted(_python_random), batches, Reason.HOST_RANDOM, "test_models.py"),
    "numpy random": (lambda: Scripted(_numpy_random), batches, Reason.HOST_RANDOM, "net"),
    "private generator": (lambda: Scripted(_own_generator), batches, Reason.HOST_RANDOM, "test_models.py"),
    "seed set": (lambda: Scripted(_set_seed), batches, Reason.HOST_RANDOM, "test_models.py"),
    "alternates": (lambda: Scripted(_alternate), batches, Reason.ATTRIBUTE_WRITTEN, "net.calls"),
    "training flag toggled": (lambda: Scripted(_toggle_training), batches, Reason.ATTRIBUTE_WRITTEN, "net.inner.3"),
    "parameter frozen": (lambda: Scripted(_freeze), batches, Reason.ATTRIBUTE_WRITTEN, "net.inner.0.bias"),
    "hook added": (lambda: Scripted(_add_hook), batches, Reason.HOOKS, "net.inner.0"),
    "old weight norm": (
        lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(FEATURES, CLASSES))),
        batches,
        Reason.HOOKS,
        "net.0",
    ),
    "old spectral norm": (
        lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(FEATURES, CLASSES))),
        batches,
        Reason.HOOKS,
        "net.0",
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native(name: str) -> None:
    make, data, reason, where = NATIVE[name]

    check_native(lambda: Learner(make()), reason, data(), where=where)


def test_sparse_gradients_are_native() -> None:
    check_native(
        lambda: Learner(Embedded(sparse=True), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        Reason.UNSUPPORTED_TENSOR,
        tokens(),
        where="net",
    )


def test_a_lazy_network_is_recorded_once_it_is_there() -> None:
    trace = check_replayed(
        lambda: Learner(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(CLASSES))),
        actions=["native"] * 3 + ["record"] + ["replay"] * 3,
    )

    assert trace.report.reasons[Reason.HOOKS] == 1
