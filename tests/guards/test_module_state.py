# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a recording depends on in its modules: each change is found, with the place; what does not matter is not."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_replay import Reason
from lightning_replay.dispatch import Dispatcher
from lightning_replay.engine.tape import TapePool
from lightning_replay.guards import attributes, versions
from lightning_replay.guards.attributes import identities
from lightning_replay.guards.module import (
    RESTLESS_WRITES,
    AttributeWatch,
    ModuleState,
    find_hidden_state,
    find_hooks,
    join,
    recurrent_networks,
)
from lightning_replay.runner.modules import make_region


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.rate = 0.5
        self.name_of_it = "x"
        self.table = {"a": 1, "deep": [1, {"b": 2}]}
        self.rows = [1, 2]
        self.config = SimpleNamespace(size=3)
        self.unread = 1
        self.before = nn.Sequential(nn.Tanh(), nn.ReLU())
        self.after = nn.Sequential(nn.Tanh(), nn.ReLU())
        self.register_buffer("mask", torch.ones(3))

    shadowed = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.after(self.before(inputs * self.shadowed))
        scaled = self.norm(self.layer(inputs)) * self.rate * self.table["a"] * self.rows[0] * self.mask
        return scaled * self.config.size if self.name_of_it else scaled


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Inner(), nn.Linear(3, 2))


def set_nested(module: Any) -> None:
    module[0].table["deep"][1]["b"] = 3


def swap_names(module: Any) -> None:
    """The same parameters in the same order, each under the name of the other."""
    weight, bias = module[1].weight, module[1].bias
    del module[1].weight, module[1].bias
    module[1].bias, module[1].weight = weight, bias


def shadow(module: Any) -> None:
    """As many attributes as before, one of which stands in front of an attribute of the class."""
    del module[0].unread
    module[0].shadowed = 2.0


def move_to_next(module: Any) -> None:
    """The same modules in the same order, the last of one container being the first of the next."""
    moved = module[0].before[-1]
    del module[0].before._modules["1"]
    rest = dict(module[0].after._modules)
    module[0].after._modules.clear()
    module[0].after._modules.update({"1": moved, **rest})


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter replaced": (lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach())), "net.1.weight"),
    "names swapped": (swap_names, "net.1"),
    "attribute of the class": (shadow, "net.0.shadowed"),
    "moved to the next": (move_to_next, "net.0.before"),
    "other attributes": (lambda m: setattr(m[0], "__dict__", {**m[0].__dict__, "rate": 0.25}), "net.0"),
    "parameter removed": (lambda m: m[1].register_parameter("bias", None), "net.1.bias"),
    "parameter added": (lambda m: m[1].register_parameter("new", nn.Parameter(torch.ones(1))), "net.1"),
    "buffer replaced": (lambda m: setattr(m[0], "mask", torch.ones(3)), "net.0.mask"),
    "module replaced": (lambda m: m.__setitem__(1, nn.Linear(3, 2)), "net.1"),
    "module added": (lambda m: m.append(nn.ReLU()), "net"),
    "module added to one without": (lambda m: m[1].add_module("new", nn.ReLU()), "net.1"),
    "buffer added to a module without": (lambda m: m[1].register_buffer("new", torch.ones(1)), "net.1"),
    "equal buffer": (lambda m: setattr(m[0].norm, "num_batches_tracked", torch.tensor(0)), "net.0.norm.num_batches"),
    "last module removed": (lambda m: m.__delitem__(1), "net"),
    "data replaced": (lambda m: setattr(m[1].weight, "data", m[1].weight.data.clone()), "net.1.weight"),
    "dtype": (lambda m: m[1].double(), "net.1.weight"),
    "strides": (lambda m: setattr(m[0].layer.weight, "data", m[0].layer.weight.data.t()), "net.0.layer.weight"),
    "other storage": (lambda m: m[0].mask.set_(torch.ones(3)), "net.0.mask"),
    "size": (lambda m: m[0].mask.resize_(2), "net.0.mask"),
    "transposed": (lambda m: torch.no_grad()(m[0].layer.weight.t_)(), "net.0.layer.weight"),
    "dtype in place": (lambda m: setattr(m[0].mask, "data", m[0].mask.view(torch.int32)), "net.0.mask"),
    "class": (lambda m: setattr(m[0], "__class__", type("Other", (Inner,), {})), "net"),
    "float": (lambda m: setattr(m[0], "rate", 0.25), "net.0.rate"),
    "sign of zero": (lambda m: setattr(m[0], "rate", -0.0), "net.0.rate"),
    "type": (lambda m: setattr(m[0], "rate", 1), "net.0.rate"),
    "string": (lambda m: setattr(m[0], "name_of_it", ""), "net.0.name_of_it"),
    "attribute removed": (lambda m: delattr(m[0], "rate"), "net.0.rate"),
    "item": (lambda m: m[0].table.__setitem__("a", 2), "net.0.table"),
    "item added": (lambda m: m[0].rows.append(3), "net.0.rows"),
    "nested item": (set_nested, "net.0.table"),
    "field": (lambda m: setattr(m[0].config, "size", 4), "net.0.config"),
    "momentum": (lambda m: setattr(m[0].norm, "momentum", 0.3), "net.0.norm.momentum"),
    "forward on the instance": (lambda m: setattr(m[0].layer, "forward", lambda x: x), "net.0.layer"),
}


@pytest.fixture(params=["counted", "restless", "uncounted"])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether Python counts what is written to modules, and whether they are written to all the time."""
    if request.param != "uncounted" and not versions._CAN_COUNT:
        pytest.skip("this Python does not count what is set on modules")
    if request.param == "uncounted":
        monkeypatch.setattr(versions, "_CAN_COUNT", False)
    return str(request.param)


def take_state(module: nn.Module, counting: str) -> ModuleState:
    state = ModuleState("net", module)
    for inner in module.modules() if counting == "restless" else ():
        for step in range(RESTLESS_WRITES):
            inner.step: Any = step
            assert state.difference() is None
    assert state._versions.are_same() == (counting != "uncounted")
    assert len(state._restless) == (len(list(module.modules())) if counting == "restless" else 1)
    return state


@pytest.mark.parametrize("name", CHANGES)
def test_found(name: str, counting: str) -> None:
    module, (change, where) = net(), CHANGES[name]
    state = take_state(module, counting)
    assert state.difference() is None

    change(module)

    finding = state.difference()
    assert finding is not None
    assert finding.reason is Reason.MODULE_CHANGED
    assert where in finding.where
    assert finding.expected != finding.actual or "recorded" in finding.expected


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].layer.weight.data.mul_(2),
        lambda m: m[0].mask.zero_(),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
        lambda m: setattr(m[0], "unread", 2),
        lambda m: setattr(m[0], "rate", float("0.5")),
        lambda m: setattr(m[0].layer.weight, "grad", torch.ones(3, 3)),
    ],
    ids=["parameter written", "buffer written", "state loaded", "unread", "equal", "gradient"],
)
def test_not_found(change: Callable[[Any], Any], counting: str) -> None:
    module = net()
    state = take_state(module, counting)

    change(module)

    assert state.difference() is None
    assert state.difference() is None


def test_flags(counting: str) -> None:
    module = net()
    state = take_state(module, counting)

    def flags() -> Any:
        assert state.difference() is None  # they are part of the signature, not a change
        return state.flags()

    before = flags()
    module[0].norm.eval()
    assert flags() != before
    module[0].norm.train()
    assert flags() == before
    module[1].bias.requires_grad_(False)
    assert flags() != before
    module[1].bias.requires_grad_(True)
    assert flags() == before
    module[1].bias.requires_grad_(False)
    assert "net.1.bias" not in state.trainable()


@pytest.mark.parametrize(
    "register",
    [
        lambda m, f: m.register_forward_hook(f),
        lambda m, f: m.register_forward_pre_hook(f),
        lambda m, f: m.register_full_backward_hook(f),
        lambda m, f: m.register_full_backward_pre_hook(f),
    ],
    ids=["forward", "forward pre", "backward", "backward pre"],
)
def test_hooks(register: Callable[..., Any]) -> None:
    module = net()
    state = ModuleState("net", module)
    assert find_hooks("net", module) is None

    handle = register(module[0].layer, lambda *_: None)

    for finding in (state.difference(), find_hooks("net", module)):
        assert finding is not None
        assert (finding.reason, finding.where) == (Reason.HOOKS, "net.0.layer")
    handle.remove()
    assert state.difference() is None


def test_hooks_in_a_dict_of_their_own(counting: str) -> None:
    module = net()
    state = take_state(module, counting)

    module[0].layer._forward_hooks = OrderedDict()
    assert state.difference() is None
    module[0].layer.register_forward_hook(lambda *_: None)

    finding = state.difference()
    assert finding is not None
    assert (finding.reason, finding.where) == (Reason.HOOKS, "net.0.layer")


def test_hooks_that_come_and_go_with_their_dict(counting: str) -> None:
    module = net()
    state = take_state(module, counting)
    layer = module[0].layer
    own, layer._forward_hooks = layer._forward_hooks, OrderedDict({0: lambda *_: None})
    assert state.difference() is not None
    layer._forward_hooks = own
    assert state.difference() is None

    layer.weight.data = layer.weight.data.clone()

    finding = state.difference()
    assert finding is not None
    assert (finding.reason, finding.where) == (Reason.MODULE_CHANGED, "net.0.layer.weight")


def test_hooks_of_a_module_that_is_always_in_one_mode(counting: str) -> None:
    class Always(nn.Linear):
        training = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]

    module = nn.Sequential(Always(3, 3), nn.ReLU())
    state = take_state(module, counting)
    module[0]._forward_hooks = OrderedDict()
    assert state.difference() is None
    module[0].register_forward_hook(lambda *_: None)

    finding = state.difference()
    assert finding is not None
    assert (finding.reason, finding.where) == (Reason.HOOKS, "net.0")


def test_order_of_modules(counting: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU(), nn.Tanh())
    module._modules = OrderedDict(module._modules)  # as removing one from a container does
    state = take_state(module, counting)
    assert state.difference() is None

    module._modules.move_to_end("1")

    finding = state.difference()
    assert finding is not None
    assert (finding.reason, finding.where) == (Reason.MODULE_CHANGED, "net")


@pytest.mark.skipif(not versions._CAN_COUNT, reason="this Python does not count what is set on modules")
def test_what_is_written_all_the_time_is_compared_with_the_last_value() -> None:
    module = net()
    state = take_state(module, "restless")
    for step in range(3):
        module[0].unread = step
        assert state.difference() is None

    module[0].rate = 0.75

    assert (found := state.difference()) is not None
    assert found.where == "net.0.rate"


@pytest.mark.skipif(not versions._CAN_COUNT, reason="this Python does not count what is set on modules")
def test_a_fit_with_validation_counts_no_module_as_restless() -> None:
    module = net()
    state = take_state(module, "counted")
    for _ in range(2 * RESTLESS_WRITES):
        module.eval()
        module.train()
        assert state.difference() is None
        assert state._versions.are_same()

    assert len(state._restless) == 1


def test_global_hooks() -> None:
    module = net()
    state = ModuleState("net", module)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        finding = state.difference()
        assert finding is not None
        assert finding.reason is Reason.HOOKS
    finally:
        handle.remove()
    assert state.difference() is None


def test_hidden_state() -> None:
    cuda = torch.device("cuda")
    rnn = nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.5))
    networks = recurrent_networks("net", rnn)
    found = find_hidden_state(networks, cuda)

    assert found is not None
    assert (found.reason, found.where) == (Reason.HIDDEN_STATE, "net.0")
    assert find_hidden_state(networks, torch.device("cpu")) is None
    rnn.eval()
    assert find_hidden_state(networks, cuda) is None
    assert find_hidden_state([("net", nn.LSTM(2, 2, num_layers=2))], cuda) is None


@pytest.mark.parametrize("when", [0, 5], ids=["from the first step", "later"])
def test_hidden_state_anywhere_makes_every_call_native_for_good(when: int) -> None:
    dispatcher = Dispatcher(torch.device("cuda"), TapePool, warmup_steps=1, max_recordings=1)
    rnn = nn.GRU(2, 2, num_layers=2, dropout=0.5).eval()
    region = make_region("net", nn.Linear(2, 2))
    for step in range(8):
        rnn.train(step == when)
        dispatcher.look_for_hidden_state(recurrent_networks("rnn", rnn))
        decision = dispatcher.decide(region, (), {}, counts=True)
        assert decision.finding is not None
        assert (decision.finding.reason is Reason.HIDDEN_STATE) == (step >= when)


WRITES: dict[str, tuple[Callable[[Any], Any], Reason, str]] = {
    "attribute": (lambda m: setattr(m[0], "unread", 2), Reason.ATTRIBUTE_WRITTEN, "net.0.unread"),
    "new attribute": (lambda m: setattr(m[0], "cache", 2), Reason.ATTRIBUTE_WRITTEN, "net.0.cache"),
    "container": (lambda m: m[0].rows.append(1), Reason.ATTRIBUTE_WRITTEN, "net.0.rows"),
    "buffer": (lambda m: setattr(m[0], "mask", torch.zeros(3)), Reason.BUFFER_REBOUND, "net.0.mask"),
    "parameter in place": (
        lambda m: torch.no_grad()(m[1].weight.mul_)(2),
        Reason.PARAMETER_WRITTEN,
        "net.1.weight",
    ),
    "training": (lambda m: m[0].norm.eval(), Reason.ATTRIBUTE_WRITTEN, "net.0.norm.training"),
    "trainable": (lambda m: m[1].bias.requires_grad_(False), Reason.ATTRIBUTE_WRITTEN, "net.1.bias.requires_grad"),
    "hook": (lambda m: m[1].register_forward_hook(lambda *_: None), Reason.HOOKS, "net.1"),
}


@pytest.mark.parametrize("name", WRITES)
def test_watch(name: str) -> None:
    module, (write, reason, where) = net(), WRITES[name]
    watch = AttributeWatch("net", module)
    assert watch.difference() is None

    write(module)

    finding = watch.difference()
    assert finding is not None
    assert (finding.reason, finding.where) == (reason, where)
    if reason in (Reason.ATTRIBUTE_WRITTEN,):
        watch.restore()
        assert AttributeWatch("net", module).difference() is None
        assert watch.difference() is None


def test_join() -> None:
    assert [join("a", "b"), join("", "b"), join("a", ""), join("", "")] == ["a.b", "b", "a", ""]


@pytest.mark.parametrize("is_new", [True, False])
def test_identities_tell_objects_apart_that_are_equal(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "_HAS_OBJECTS_FROM_ITERATORS", is_new)  # NumPy >= 1.23
    objects = [torch.ones(2), torch.ones(2), None, True, {}, {}]

    assert identities(iter(objects)) == identities(objects)
    assert identities(objects) != identities([objects[1], objects[0], *objects[2:]])
    assert identities(objects) != identities([*objects[:4], objects[5], objects[4]])
    assert identities(objects) != identities(objects[:-1])
    assert identities([]) == b""
