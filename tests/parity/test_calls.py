# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""How a network is called: any arguments, any results, several times, in any shape."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_replay import Reason
from tests.parity.harness import (
    CLASSES,
    FEATURES,
    STEPS,
    Learner,
    batches,
    check_native,
    check_replayed,
    loader,
    mlp,
    run_both,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None
    scale: float = 1.0


class Pair(NamedTuple):
    logits: Tensor
    extra: Any


class ModelOutput(OrderedDict):
    """Keys, attributes and order, in the manner of transformers; None entries are left out."""

    def __init__(self, **items: Any) -> None:
        super().__init__({key: value for key, value in items.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


torch.utils._pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: ModelOutput(**dict(zip(keys, values, strict=True))),
    serialized_type_name=f"{__name__}.ModelOutput",
)


class Shaped(nn.Module):
    """Wraps a network with a function of its own for arguments and results."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = mlp(), call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.inner, *args, **kwargs)


def keyword(net: Any, batch: Any) -> Tensor:
    return net(inputs=batch[0], scale=2.0, mask=None)


def dictionary(net: Any, batch: Any) -> Tensor:
    result = net({"b": batch[0], "a": [batch[0] * 2, (None, "text", 3)]})
    assert list(result) == ["z", "a"]
    assert type(result["a"]) is list
    return result["z"] + result["a"][0]


def data_class(net: Any, batch: Any) -> Tensor:
    result = net(Output(batch[0], scale=0.5))
    assert type(result) is Output
    assert result.hidden is None
    return result.logits * result.scale


def named_tuple(net: Any, batch: Any) -> Tensor:
    result = net(Pair(batch[0], None))
    assert type(result) is Pair
    assert result.extra == {"n": 1}
    return result.logits


def model_output(net: Any, batch: Any) -> Tensor:
    result = net(batch[0])
    assert type(result) is ModelOutput
    assert list(result) == ["logits", "hidden"]
    return result.logits + result["hidden"].mean()


def same_twice(net: Any, batch: Any) -> Tensor:
    first, second = net(batch[0])
    assert first is second
    return first


def given_back(net: Any, batch: Any) -> Tensor:
    logits, inputs = net(batch[0])
    assert inputs is batch[0]
    return logits


def unused(net: Any, batch: Any) -> Tensor:
    return net(batch[0])[0]


def not_differentiable(net: Any, batch: Any) -> Tensor:
    logits, best, count = net(batch[0])
    assert not best.requires_grad
    assert not count.requires_grad
    return logits * count


def views(net: Any, batch: Any) -> Tensor:
    left, right = net(batch[0])
    return torch.cat([left, right], dim=1)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Tensor]]] = {
    "keyword": (lambda net, *, inputs, scale, mask: net(inputs) * scale, keyword),
    "dictionary": (
        lambda net, batch: {"z": net(batch["b"]), "a": [net[4](net[0](batch["a"][0])) * batch["a"][1][2]]},
        dictionary,
    ),
    "data class": (lambda net, given: Output(net(given.logits), scale=given.scale), data_class),
    "named tuple": (lambda net, given: Pair(net(given.logits), {"n": 1}), named_tuple),
    "model output": (
        lambda net, x: ModelOutput(logits=net(x), loss=None, hidden=net[0](x)),
        model_output,
    ),
    "one tensor twice": (lambda net, x: (lambda y: (y, y))(net(x)), same_twice),
    "its own argument": (lambda net, x: (net(x), x), given_back),
    "unused results": (lambda net, x: (net(x), net[0](x), {"more": net[0](x).sum()}), unused),
    "results without gradient": (
        lambda net, x: (lambda y: (y, y.argmax(1), torch.ones((), device=x.device)))(net(x)),
        not_differentiable,
    ),
    "views of one tensor": (lambda net, x: (lambda y: (y[:, :1], y[:, 1:]))(net(x)), views),
    "transposed result": (lambda net, x: net(x).t().contiguous().t(), lambda net, batch: net(batch[0])),
    "expanded result": (
        lambda net, x: (net(x), net[0](x).sum().expand(5, CLASSES)),
        lambda net, batch: sum(net(batch[0])),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_and_results(name: str) -> None:
    call, use = CALLS[name]

    check_replayed(
        lambda: Learner(Shaped(call), lambda module, batch, _: F.cross_entropy(use(module.net, batch), batch[1]))
    )


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view_as(x),
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "double": lambda x: x.double().float(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_layouts_of_inputs(name: str) -> None:
    data = [(INPUTS[name](inputs), labels) for inputs, labels in batches()]
    assert [tuple(given.shape) for given, _ in data] == [(5, FEATURES)] * 3

    # A loader's copies would straighten the strides: the layout is made in the step.
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net(INPUTS[name](batch[0])), batch[1])

    check_replayed(lambda: Learner(mlp(), step))


def test_layouts_get_recordings_of_their_own() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].t().contiguous().t() if batch_idx % 2 else batch[0]
        return F.cross_entropy(module.net(inputs), batch[1])

    trace = check_replayed(
        lambda: Learner(mlp(), step), actions=["native"] * 4 + ["record"] * 2 + ["replay"] * 4, steps=10
    )

    assert len(trace.report.recordings) == 2


def test_values_are_part_of_the_signature() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor, scale: float) -> Tensor:
            return self.inner(inputs) * scale

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net(batch[0], 2.0 if batch_idx in (4, 5) else 1.0), batch[1])

    check_replayed(
        lambda: Learner(Scaled(), step), actions=[*script(4), "native", "native", "replay", "replay"], steps=8
    )


def test_opaque_argument_is_native() -> None:
    other = object()

    check_native(
        lambda: Learner(
            Shaped(lambda net, x, other: net(x)),
            lambda m, batch, _: F.cross_entropy(m.net(batch[0], other), batch[1]),
        ),
        Reason.ARGUMENT,
        where="object",
    )


def with_penalty(net: Any, inputs: Tensor) -> Tensor:
    logits = net(inputs)
    logits.penalty = logits.square().mean()
    return logits


def penalized(module: Any, batch: Any, batch_idx: int) -> Tensor:
    logits = module.net(batch[0])
    return F.cross_entropy(logits, batch[1]) + logits.penalty


def test_result_with_an_attribute_is_native() -> None:
    check_native(lambda: Learner(Shaped(with_penalty), penalized), Reason.RESULT, where="penalty")


def scaled_by_attribute(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs = batch[0].clone()
    inputs.scale = float(batch[1].float().mean())
    return F.cross_entropy(module.net(inputs), batch[1])


def test_argument_with_an_attribute_is_native() -> None:
    network = lambda: Shaped(lambda net, inputs: net(inputs) * inputs.scale)  # noqa: E731

    check_native(lambda: Learner(network(), scaled_by_attribute), Reason.ARGUMENT, where="scale")


def test_result_that_is_the_parameter_is_native() -> None:
    call = lambda net, x: (net(x), net[0].bias)  # noqa: E731

    check_native(
        lambda: Learner(
            Shaped(call),
            lambda m, batch, _: F.cross_entropy(m.net(batch[0])[0], batch[1]) + m.net.inner[0].bias.square().sum(),
        ),
        Reason.OUTPUT_ALIAS,
        where="net.inner.0.bias",
    )


def test_result_that_views_an_argument_is_native() -> None:
    check_native(
        lambda: Learner(
            Shaped(lambda net, x: (net(x), x[1:])), lambda m, batch, _: F.cross_entropy(m.net(batch[0])[0], batch[1])
        ),
        Reason.OUTPUT_ALIAS,
    )


# -- several calls a step


def siamese(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module.net(inputs) - module.net(inputs.flip(0)), labels)


def unequal(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module.net(inputs), labels) + module.net(inputs[:3]).square().mean()


def three(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    return sum(F.cross_entropy(module.net(inputs * k), labels) for k in (1, 2, 3))


def chained(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    hidden = module.net(inputs)
    return F.cross_entropy(module.net(torch.cat([hidden, hidden], 1)), labels)


def sometimes(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    loss = F.cross_entropy(module.net(inputs), labels)
    return loss + module.net(inputs * 2).square().mean() if batch_idx % 2 else loss


def one_without_gradient(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    with torch.no_grad():
        target = module.net(inputs.flip(0))
    return F.cross_entropy(module.net(inputs), labels) + (module.net(inputs * 2) - target).square().mean()


def discarded(module: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    module.net(inputs * 2)
    return F.cross_entropy(module.net(inputs), labels)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("step", [siamese, unequal, three, chained, one_without_gradient, discarded])
def test_several_calls(step: Any, window: int) -> None:
    trace = check_replayed(lambda: Learner(mlp(), step), accumulate_grad_batches=window, actions=script(8), steps=8)

    assert trace.report.recordings


def test_several_calls_now_and_then() -> None:
    _, replay = run_both(lambda: Learner(mlp(), sometimes), steps=12)

    assert replay.trace is not None
    assert replay.trace.actions[-2:] == ["replay", "replay"]


def test_several_calls_of_a_network_with_a_layer_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(torch.tanh(self.first(inputs))))

    check_native(lambda: Learner(Twice(), siamese), Reason.SHARED_PARAMETER, where="net.first")


def test_two_networks() -> None:
    class Two(Learner):
        def __init__(self) -> None:
            super().__init__(nn.Linear(FEATURES, 8), self.two)
            self.heads = nn.ModuleDict({"a": nn.Linear(8, CLASSES), "b": nn.Sequential(nn.Linear(8, CLASSES))})

        @staticmethod
        def two(module: Any, batch: Any, batch_idx: int) -> Tensor:
            hidden = module.net(batch[0]).relu()
            return sum(F.cross_entropy(head(hidden), batch[1]) for head in module.heads.values())

    trace = check_replayed(Two)

    assert {recording.region for recording in trace.report.recordings} == {"net", "heads.a", "heads.b"}


def test_two_networks_that_share_a_layer() -> None:
    class Shared(Learner):
        def __init__(self) -> None:
            first = nn.Linear(FEATURES, 8)
            super().__init__(nn.Sequential(first, nn.ReLU(), nn.Linear(8, CLASSES)), self.two)
            self.other = nn.Sequential(first, nn.Tanh(), nn.Linear(8, CLASSES))

        @staticmethod
        def two(module: Any, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(module.net(batch[0]) + module.other(batch[0]), batch[1])

    check_replayed(Shared)
    check_replayed(Shared, accumulate_grad_batches=2)


def test_own_forward() -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trace = check_replayed(Own)

    assert [recording.region for recording in trace.report.recordings] == ["self"]


def test_named_modules() -> None:
    trace = check_replayed(lambda: Learner(mlp()), strategy=tape(modules=["net.0", "net.4"]))

    assert {recording.region for recording in trace.report.recordings} == {"net.0", "net.4"}


def test_call_outside_of_modules_is_native() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        net = module.net
        return F.cross_entropy(F.linear(batch[0], net.weight, net.bias), batch[1])

    check_native(lambda: Learner(nn.Linear(FEATURES, CLASSES), step), Reason.NO_REGION)


def test_forward_called_directly_is_seen() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net.forward(batch[0]), batch[1])

    check_replayed(lambda: Learner(mlp(), step))


# -- shapes


def test_shapes() -> None:
    data = [*batches(size=4, count=1), *batches(size=5, count=1), *batches(size=6, count=1)]

    trace = check_replayed(
        lambda: Learner(mlp()), data, actions=["native"] * 6 + ["record"] * 3 + ["replay"] * 6, steps=15
    )

    assert len(trace.report.recordings) == 3


def test_shapes_beyond_the_budget_are_native() -> None:
    data = [*batches(size=4, count=1), *batches(size=5, count=1), *batches(size=6, count=1)]

    trace = check_replayed(
        lambda: Learner(mlp()),
        data,
        actions=["native"] * 6 + ["record", "record", "native"] + ["replay", "replay", "native"] * 2,
        strategy=tape(max_recordings=2),
        steps=15,
    )

    assert trace.report.reasons[Reason.BUDGET] == 3


def test_ragged_last_batch() -> None:
    data = [*batches(count=4), *batches(size=2, count=1)]

    trace = check_replayed(
        lambda: Learner(mlp()),
        lambda: loader(data, 5),
        actions=[*script(4), "native", *(["replay"] * 4 + ["native"]) * 3],
        max_epochs=4,
    )

    assert trace.report.reasons[Reason.LAST_BATCH] == 4


def test_empty_batch() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return module.net(batch[0]).sum()

    empty = [(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.long))]

    check_replayed(lambda: Learner(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3)), step), empty)


def test_one_batch_epochs() -> None:
    check_replayed(lambda: Learner(mlp()), steps=1, max_epochs=STEPS, actions=script())
