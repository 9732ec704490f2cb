# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A `forward` that is replaced, on an instance or on its class, before or in the middle of a run."""

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_replay import Reason
from tests.parity.harness import CLASSES, FEATURES, Learner, check_native, check_replayed, mlp, script

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 10


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def doubled(module: nn.Module) -> Any:
    forward = type(module).forward
    return lambda *args: forward(module, *args) * 2


def replace(path: str) -> Any:
    def act(module: Any) -> None:
        target = module.get_submodule(path)
        target.forward = doubled(target)

    return act


def put_back(path: str) -> Any:
    return lambda module: module.get_submodule(path).__dict__.pop("forward")


def test_on_the_network() -> None:
    trace = check_replayed(
        lambda: Learner(Plain(), events={4: replace("net"), 6: put_back("net")}),
        actions=[*script(5), "native", "native", "replay", "replay", "replay"],
        steps=STEPS,
    )

    assert trace.report.reasons[Reason.REPLACED_FORWARD] == 2


def test_inside_of_the_network() -> None:
    check_replayed(
        lambda: Learner(Plain(), events={4: replace("net.inner.0")}),
        actions=[*script(5), "native", "native", "record", "replay", "replay"],
        steps=STEPS,
    )


def test_before_the_fit() -> None:
    def make() -> Learner:
        module = Learner(Plain())
        module.net.forward = doubled(module.net)
        return module

    check_native(make, Reason.REPLACED_FORWARD, where="net")


def test_before_the_fit_inside() -> None:
    def make() -> Learner:
        module = Learner(Plain())
        module.net.inner[0].forward = doubled(module.net.inner[0])
        return module

    # While calls are being discovered the attribute is hidden; once it is seen, the warm-up begins.
    check_replayed(make, actions=["native", *script(STEPS - 1)], steps=STEPS)


@pytest.mark.parametrize("inside", [False, True])
def test_on_the_class(inside: bool) -> None:
    class Layer(nn.Linear):
        pass

    class Net(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner[0] = Layer(FEATURES, 8)

    cls, own = (Layer, nn.Linear.forward) if inside else (Net, Plain.forward)

    def patch(module: Any) -> None:
        cls.forward = lambda self, inputs: own(self, inputs) * 2

    def make() -> Learner:
        cls.__dict__.get("forward") and delattr(cls, "forward")
        return Learner(Net(), events={4: patch})

    check_replayed(make, actions=[*script(5), "native", "native", "record", "replay", "replay"], steps=STEPS)


def test_class_of_the_network() -> None:
    class Other(Plain):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs) * 2

    check_replayed(
        lambda: Learner(Plain(), events={4: lambda module: setattr(module.net, "__class__", Other)}),
        actions=[*script(5), "native", "native", "record", "replay", "replay"],
        steps=STEPS,
    )


def test_network_removed() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        net = module.net if hasattr(module, "net") else module.head
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    def make() -> Learner:
        module = Learner(Plain(), step, events={4: lambda m: delattr(m, "net")})
        module.head = nn.Linear(FEATURES, CLASSES)
        return module

    check_replayed(make, actions=[*script(5), "native", "native", "record", "replay", "replay"], steps=STEPS)
