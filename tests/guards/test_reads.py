# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What code of a network may read, wherever it lies: each kind of place is found, and a change there is seen."""

import array
import collections
import concurrent.futures
import ctypes
import functools
import mmap
import multiprocessing
import queue
import socket
import sqlite3
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_replay import Reason
from lightning_replay.guards.module import ModuleState
from lightning_replay.guards.reads import find_reads
from tests.guards import elsewhere
from tests.parity.harness import CLASSES, FEATURES, Learner, check_replayed, script

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Holds whatever a test gives it, and does with its inputs what the test says."""

    def __init__(self, use: Callable[[Any, Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.strength = 1.0
        type(self).use = use  # type: ignore[attr-defined]
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, inputs: Tensor) -> Any:
        return self.use(self.layer(inputs))  # type: ignore[attr-defined,operator]


def net(use: Callable[[Any, Tensor], Any], **held: Any) -> Any:
    """Makes a network of a class of its own."""
    return type("Own", (Net,), {"__module__": __name__})(use, **held)


Change = Callable[[Any, pytest.MonkeyPatch], Any]


def setting(target: Any, name: str, value: Any) -> Change:
    return lambda module, monkeypatch: monkeypatch.setattr(target, name, value, raising=False)


def putting(target: Any, key: Any, value: Any) -> Change:
    return lambda module, monkeypatch: monkeypatch.setitem(target, key, value)


def doing(change: Callable[[Any], Any]) -> Change:
    return lambda module, monkeypatch: change(module)


def applied(self: Any, inputs: Tensor) -> Any:
    return elsewhere.Reverse.apply(inputs, self)


def matched(self: Any, inputs: Tensor) -> Any:
    match self.held:
        case elsewhere.Point(height=height):
            return inputs * height


def matched_by_position(self: Any, inputs: Tensor) -> Any:
    match self.held:
        case elsewhere.Sizes(width):
            return inputs * width


def looked_up(self: Any, inputs: Tensor) -> Any:
    return inputs * self.table[self.held]


class Slotted(Net):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__(lambda self, inputs: inputs * self.gain, gain=2.0)


class CalledOtherwise(nn.Linear):
    pass


def elsewheres_property(self: Any, inputs: Tensor) -> Any:
    return inputs * self.computed


class WithProperty(Net):
    @property
    def computed(self) -> float:
        return elsewhere.config.from_class()


class Inner(nn.Linear):
    def embed(self, inputs: Tensor) -> Tensor:
        return elsewhere.scaled(self(inputs))


def first_item(self: Any, inputs: Tensor) -> Any:
    return inputs * self.held[0]


def item_a(self: Any, inputs: Tensor) -> Any:
    return inputs * self.held["a"]


def in_list(self: Any, inputs: Tensor) -> Any:
    return self.held[0](inputs)


def hooked() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda module, arguments, output: elsewhere.scaled(output))
    return module


def unchanged_forward(inputs: Tensor) -> Tensor:
    return inputs


def a_dict() -> dict[str, float]:
    return {"a": 2.0}


def kept() -> tuple[elsewhere.Point, Any]:
    point = elsewhere.Point()
    return point, weakref.ref(point)


PLACES: dict[str, tuple[Callable[[], Any], Change]] = {
    "function of autograd: global in backward": (lambda: net(applied), setting(elsewhere, "factor", 3.0)),
    "function of autograd: class attribute": (lambda: net(applied), setting(elsewhere.Reverse, "alpha", 3.0)),
    "function of autograd: attribute in backward": (
        lambda: net(applied),
        doing(lambda m: setattr(m, "strength", 3.0)),
    ),
    "global of a module's function": (
        lambda: net(lambda self, x: elsewhere.scaled(x)),
        setting(elsewhere, "factor", 3.0),
    ),
    "global behind a property": (lambda: WithProperty(elsewheres_property), setting(elsewhere.Config, "own", 3.0)),
    "method of a part": (
        lambda: net(lambda self, x: self.part.embed(x), part=Inner(3, 3)),
        setting(elsewhere, "factor", 3.0),
    ),
    "inherited class attribute": (
        lambda: net(lambda self, x: x * elsewhere.Config.inherited),
        setting(elsewhere.Base, "inherited", 3.0),
    ),
    "inherited class attribute, set on the subclass": (
        lambda: net(lambda self, x: x * elsewhere.Config.inherited),
        setting(elsewhere.Config, "inherited", 3.0),
    ),
    "class attribute in a class method": (
        lambda: net(lambda self, x: x * elsewhere.Config.from_class()),
        setting(elsewhere.Config, "own", 3.0),
    ),
    "attribute of a metaclass": (
        lambda: net(lambda self, x: x * elsewhere.Config.gain),
        setting(elsewhere.Meta, "gain", 3.0),
    ),
    "class attribute of a global object": (
        lambda: net(lambda self, x: x * elsewhere.config.own),
        setting(elsewhere.Config, "own", 3.0),
    ),
    "global in a method of a global object": (
        lambda: net(lambda self, x: elsewhere.config.method(x)),
        setting(elsewhere, "factor", 3.0),
    ),
    "plain tensor, transposed": (
        lambda: net(lambda self, x: x @ self.held, held=torch.ones(3, 3).tril()),
        doing(lambda m: m.held.t_()),
    ),
    "plain tensor in a list, transposed": (
        lambda: net(lambda self, x: x @ self.held[0], held=[torch.ones(3, 3).tril()]),
        doing(lambda m: m.held[0].t_()),
    ),
    "plain tensor in a tuple, other memory": (
        lambda: net(lambda self, x: x @ self.held[0], held=(torch.ones(3, 3),)),
        doing(lambda m: m.held[0].set_(torch.zeros(3, 3))),
    ),
    "plain tensor, trainable": (
        lambda: net(lambda self, x: x @ self.held, held=torch.ones(3, 3)),
        doing(lambda m: m.held.requires_grad_()),
    ),
    "unregistered module, unfrozen": (
        lambda: net(in_list, held=[nn.Linear(3, 3).requires_grad_(False)]),
        doing(lambda m: m.held[0].requires_grad_()),
    ),
    "unregistered module, forward": (
        lambda: net(in_list, held=[nn.Linear(3, 3)]),
        doing(lambda m: setattr(m.held[0], "forward", unchanged_forward)),
    ),
    "unregistered module, rate of a dropout": (
        lambda: net(in_list, held=[nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Dropout(0.5)))))]),
        doing(lambda m: setattr(m.held[0][0][0][0][0], "p", 0.1)),
    ),
    "unregistered module, hook": (
        lambda: net(in_list, held=[nn.Linear(3, 3)]),
        doing(lambda m: m.held[0].register_forward_hook(lambda *_: None)),
    ),
    "global module, hook": (
        lambda: net(lambda self, x: elsewhere.outside(x)),
        lambda m, monkeypatch: monkeypatch.setitem(elsewhere.outside[0]._forward_hooks, 0, lambda *_: None),
    ),
    "global that a hook of an unregistered module reads": (
        lambda: net(in_list, held=[hooked()]),
        setting(elsewhere, "factor", 3.0),
    ),
    "unregistered module, class": (
        lambda: net(in_list, held=[nn.Linear(3, 3)]),
        doing(lambda m: setattr(m.held[0], "__class__", Inner)),
    ),
    "attribute of a function": (
        lambda: net(lambda self, x: elsewhere.with_attribute(x)),
        setting(elsewhere.with_attribute, "gain", 3.0),
    ),
    "body of a function": (
        lambda: net(lambda self, x: elsewhere.body(x)),
        setting(elsewhere.body, "__code__", elsewhere.other_body.__code__),
    ),
    "default of a keyword": (
        lambda: net(lambda self, x: elsewhere.keyword(x)),
        putting(elsewhere.keyword.__kwdefaults__, "gain", 3.0),
    ),
    "defaults": (lambda: net(lambda self, x: elsewhere.default(x)), setting(elsewhere.default, "__defaults__", (3.0,))),
    "keyword of a partial": (
        lambda: net(lambda self, x: self.held(x), held=functools.partial(F.leaky_relu, negative_slope=0.1)),
        doing(lambda m: m.held.keywords.update(negative_slope=0.9)),
    ),
    "function that is looked up dynamically": (
        lambda: net(lambda self, x: getattr(self, "he" + "ld")(x), held=elsewhere.scaled),
        setting(elsewhere, "factor", 3.0),
    ),
    "global of a module that is held": (
        lambda: net(lambda self, x: x * self.held.factor, held=elsewhere),
        setting(elsewhere, "factor", 3.0),
    ),
    "functions in dicts": (
        lambda: net(lambda self, x: elsewhere.functions["first"](x)),
        setting(elsewhere, "factor", 3.0),
    ),
    "field in an equality": (
        lambda: net(lambda self, x: x if self.held == self.other else -x, held=elsewhere.Sizes(), other=None),
        doing(lambda m: setattr(m.held, "width", 3.0)),
    ),
    "field in a representation": (
        lambda: net(lambda self, x: x * len(f"{self.held}"), held=elsewhere.Sizes()),
        doing(lambda m: setattr(m.held, "width", 3.25)),
    ),
    "field in a hash": (
        lambda: net(looked_up, held=elsewhere.Key(), table={1: 2.0, 2: 3.0}),
        doing(lambda m: setattr(m.held, "hidden", 2)),
    ),
    "keyword of a pattern": (
        lambda: net(matched, held=elsewhere.Point()),
        doing(lambda m: setattr(m.held, "height", 3.0)),
    ),
    "position in a pattern": (
        lambda: net(matched_by_position, held=elsewhere.Sizes()),
        doing(lambda m: setattr(m.held, "width", 3.0)),
    ),
    "UserDict": (lambda: net(item_a, held=collections.UserDict(a=2.0)), doing(lambda m: m.held.update(a=3.0))),
    "UserList": (
        lambda: net(first_item, held=collections.UserList([2.0])),
        doing(lambda m: m.held.__setitem__(0, 3.0)),
    ),
    "ChainMap": (lambda: net(item_a, held=collections.ChainMap(a_dict())), doing(lambda m: m.held.update(a=3.0))),
    "slot of a module": (Slotted, doing(lambda m: setattr(m, "gain", 3.0))),
    "call of a class": (
        lambda: net(in_list, part=CalledOtherwise(3, 3)),
        setting(CalledOtherwise, "__call__", lambda self, inputs: inputs),
    ),
    "call of an instance": (
        lambda: net(in_list),
        doing(lambda m: setattr(m.layer, "_call_impl", unchanged_forward)),
    ),
    "bytearray": (lambda: net(first_item, held=bytearray([2])), doing(lambda m: m.held.__setitem__(0, 3))),
    "array": (lambda: net(first_item, held=array.array("d", [2.0])), doing(lambda m: m.held.__setitem__(0, 3.0))),
    "mapping proxy": (
        lambda: net(item_a, held=types.MappingProxyType(elsewhere.inner_functions)),
        putting(elsewhere.inner_functions, "a", 3.0),
    ),
    "weak reference": (
        lambda: net(lambda self, x: x * self.held[1]().height, held=kept()),
        doing(lambda m: setattr(m.held[1](), "height", 3.0)),
    ),
    "context variable": (
        lambda: net(lambda self, x: x * elsewhere.variable.get()),
        doing(lambda m: elsewhere.variable.set(3.0)),
    ),
    "function of torch": (lambda: net(lambda self, x: F.relu(x)), setting(F, "relu", unchanged_forward)),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = PLACES[name]
    elsewhere.with_attribute.gain = 2.0  # type: ignore[attr-defined]
    module = make()
    state = ModuleState("net", module)
    assert state.find_iterator() is None
    assert state.difference() is None

    change(module, monkeypatch)

    finding = state.difference()
    assert finding is not None
    assert finding.reason is Reason.MODULE_CHANGED


SHARED: dict[str, Callable[[], Any]] = {
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "socket": socket.socket,
    "database": lambda: sqlite3.connect(":memory:"),
    "cursor": lambda: sqlite3.connect(":memory:").cursor(),
    "mapped memory": lambda: mmap.mmap(-1, 8),
    "view of memory": lambda: memoryview(bytearray(8)),
    "C number": lambda: ctypes.c_int(1),
    "C array": lambda: (ctypes.c_int * 2)(),
    "number shared by processes": lambda: multiprocessing.Value("i"),
    "event": threading.Event,
    "threads": concurrent.futures.ThreadPoolExecutor,
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("held", [lambda value: value, lambda value: {"inside": [value]}], ids=["held", "inside"])
def test_what_is_shared_with_others_is_refused(name: str, held: Callable[[Any], Any]) -> None:
    module = net(lambda self, x: x * self.held, held=held(SHARED[name]()), unread=None)
    finding = ModuleState("net", module).find_iterator()

    assert finding is not None
    assert (finding.reason, finding.where) == (Reason.HOST_EFFECT, "net.held")


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_with_others_and_not_used_is_not(name: str) -> None:
    module = net(lambda self, x: x * 2, unread=SHARED[name](), lock=threading.Lock())

    assert ModuleState("net", module).find_iterator() is None


UNREAD: dict[str, tuple[Callable[[], Any], Change]] = {
    "class attribute": (lambda: net(lambda self, x: x * elsewhere.config.own), setting(Net, "other", 3.0)),
    "global": (lambda: net(lambda self, x: elsewhere.body(x)), setting(elsewhere, "factor", 3.0)),
    "global in the code of an attribute that nothing reads": (
        lambda: net(lambda self, x: elsewhere.body(x), unread=elsewhere.scaled),
        setting(elsewhere, "factor", 3.0),
    ),
    "attribute of an object": (
        lambda: net(lambda self, x: x * self.held.height, held=elsewhere.Point()),
        doing(lambda m: setattr(m.held, "count", 1)),
    ),
    "attribute of an unregistered module": (
        lambda: net(in_list, held=[nn.Linear(3, 3)]),
        doing(lambda m: setattr(m.held[0], "count", 1)),
    ),
    "gradient": (
        lambda: net(lambda self, x: x @ self.held, held=torch.ones(3, 3, requires_grad=True)),
        doing(lambda m: setattr(m.held, "grad", torch.ones(3, 3))),
    ),
    "contents of a tensor": (
        lambda: net(lambda self, x: x @ self.held, held=torch.ones(3, 3)),
        doing(lambda m: m.held.mul_(2)),
    ),
    "equal number": (
        lambda: net(lambda self, x: elsewhere.scaled(x)),
        setting(elsewhere, "factor", float("2.0")),
    ),
    "trainability of a parameter in a list": (
        lambda: (made := net(first_item), setattr(made, "held", [made.layer.weight]))[0],
        doing(lambda m: m.layer.weight.requires_grad_(False)),  # another signature, that is
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = UNREAD[name]
    module = make()
    state = ModuleState("net", module)

    change(module, monkeypatch)

    assert state.difference() is None


def test_code_of_installed_packages_is_not_followed() -> None:
    module = net(lambda self, x: x if isinstance(self.held, pytest.Item) else elsewhere.scaled(x), held=None)

    reads = find_reads({type(module)}, [vars(module)])

    assert {function.__module__ for function in reads.functions} == {__name__, elsewhere.__name__}
    assert not any(name.startswith("_pytest.") for name, _ in reads.variables)


class Taking(nn.Module):
    """Uses what it is given beside its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Any, given: Any) -> Any:
        if isinstance(inputs, elsewhere.Batch):
            return inputs.scale(self.layer(inputs.inputs))
        hidden = self.layer(inputs)
        return given(hidden) if callable(given) and not isinstance(given, type) else hidden * given.own


ARGUMENTS: dict[str, tuple[Callable[[Tensor], tuple[Any, Any]], Callable[[float], Any]]] = {
    "dataclass": (lambda x: (elsewhere.Batch(x), None), lambda value: setattr(elsewhere, "factor", value)),
    "function": (lambda x: (x, elsewhere.scaled), lambda value: setattr(elsewhere, "factor", value)),
    "class": (lambda x: (x, elsewhere.Config), lambda value: setattr(elsewhere.Config, "own", value)),
    "member of an enumeration": (
        lambda x: (x, elsewhere.Color.RED),
        lambda value: setattr(elsewhere.Color.RED, "own", value),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_the_code_of_an_argument_reads(name: str) -> None:
    arguments, change = ARGUMENTS[name]

    class Giving(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(*arguments(batch[0])), batch[1])

    def make() -> Learner:
        change(2.0)
        return Giving(Taking(), events={5: lambda module: change(0.5)})

    try:
        trace = check_replayed(make, actions=[*script(6), *script(6)], steps=12)
    finally:
        change(2.0)
    assert trace.report.reasons[Reason.MODULE_CHANGED] == 1
