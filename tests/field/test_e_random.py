# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""E. Random numbers of the device, of Python and NumPy, and of cuDNN."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, Learner, batches, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")


def test_f12_noise_drawn_in_the_step(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        time = torch.rand(len(batch[0]), 1, device=batch[0].device)
        noise = torch.randn_like(batch[0])
        return F.cross_entropy(module.net(batch[0] * (1 - time) + noise * time), batch[1])

    field.replayed(lambda: Learner(mlp(), step))


class Mixing(nn.Module):
    """Draws its mixing weights from a Beta distribution inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        ones = torch.ones_like(inputs[:, :1])
        # torch.compile switches the checks of all distributions off for the process.
        weight = torch.distributions.Beta(ones, ones, validate_args=True).sample()
        return self.net(inputs * weight + inputs.flip(0) * (1 - weight))


def test_f12_a_distribution_inside_the_network(field: Field) -> None:
    """Equal in any case; its checks of arguments read values, so the whole cannot be recorded."""
    field.native(lambda: Learner(Mixing()), Reason.HOST_SYNC)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            for _ in range(6)
        )
        self.last = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            if random.random() < 0.3:
                continue
            hidden = hidden + layer(hidden)
        return self.last(hidden)


class TimeMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*inputs.shape) > 0.2).to(inputs.device)
        return self.net(inputs * mask)


@pytest.mark.parametrize("net", [LayerDrop, TimeMask])
def test_f13_decisions_of_the_host_are_made_anew_each_step(field: Field, net: Any) -> None:
    field.native(lambda: Learner(net()), Reason.HOST_RANDOM, steps=12)


def test_f13_layers_are_recorded_where_the_whole_cannot_be(field: Field) -> None:
    trace = field.both(lambda: Learner(LayerDrop()), steps=16)

    assert {recording.region for recording in trace.report.recordings} & {f"net.layers.{i}" for i in range(6)}
    assert "replay" in trace.actions


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.generators: dict[str, torch.Generator] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        generator = GENERATORS.setdefault(str(inputs.device), torch.Generator(inputs.device).manual_seed(3))
        return self.net(inputs + torch.randn(inputs.shape, generator=generator, device=inputs.device))


GENERATORS: dict[str, torch.Generator] = {}


def test_f14_a_generator_of_the_networks_own(field: Field) -> None:
    states = []

    def make() -> Learner:
        states.extend(generator.get_state() for generator in GENERATORS.values())
        GENERATORS.clear()
        GENERATORS[str(field.device if not field.on_gpu else torch.device("cuda:0"))] = torch.Generator(
            field.device
        ).manual_seed(3)
        return Learner(OwnGenerator())

    field.native(make, Reason.HOST_RANDOM)

    states.extend(generator.get_state() for generator in GENERATORS.values())
    GENERATORS.clear()
    assert len(states) == 2
    assert torch.equal(*states)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(FEATURES, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.rnn(inputs)[0][:, -1])


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_f15_dropout_of_a_recurrent_network(field: Field) -> None:
    def data() -> Any:
        odd = batches(4, FEATURES, size=3, count=1)
        train = [*batches(4, FEATURES, count=4), *odd, *batches(4, FEATURES, count=3, seed=1)]
        return loader(train, 8)[0], loader(batches(4, FEATURES, count=2, seed=2), 2)[0]

    trace = field.both(lambda: Validated(Recurrent()), data, max_epochs=2)

    _check_hidden_state(field, trace)


def _check_hidden_state(field: Field, trace: Any) -> None:
    """The generator of cuDNN lives where nothing can put it back."""
    if field.on_gpu:
        assert set(trace.actions[-4:]) == {"native"}
        assert trace.report.reasons[Reason.HIDDEN_STATE] >= 4
    else:
        assert "replay" in trace.actions


class Beside(Validated):
    """Calls an RNN outside of the network, which alone could be recorded; it may train only later."""

    def __init__(self, since: int) -> None:
        super().__init__(mlp())
        self.rnn = nn.LSTM(FEATURES, FEATURES, num_layers=2, dropout=0.5)
        self.since = since

    def on_train_epoch_start(self) -> None:
        self.rnn.train(self.current_epoch >= self.since)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = self.rnn(batch[0])[0] if self.rnn.training else batch[0]
        return F.cross_entropy(self.net(inputs), batch[1])


@pytest.mark.parametrize("since", [0, 1])
def test_f15_a_recurrent_network_beside_the_one_that_is_recorded(field: Field, since: int) -> None:
    trace = field.both(lambda: Beside(since), lambda: _loaders(), max_epochs=3)

    _check_hidden_state(field, trace)


def _loaders() -> Any:
    return loader(batches(FEATURES, count=8), 8)[0], loader(batches(FEATURES, count=2, seed=2), 2)[0]
