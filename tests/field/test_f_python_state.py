# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""F. Python state, control flow, signatures and host data that a recording would freeze."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_replay import Reason, ReplayStrategy
from lightning_replay.runner.steps import MAX_MISSES
from tests.field.conftest import Field
from tests.parity import harness
from tests.parity.harness import CLASSES, FEATURES, STEPS, WARM_UP, Learner, batches, loader, mlp, script

pytestmark = pytest.mark.filterwarnings("ignore")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encode(inputs))


def test_f16_forward_called_by_name(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net.forward(batch[0]), batch[1])

    trace = field.both(lambda: Learner(Encoder(), step))

    assert trace.report.steps_replayed or Reason.NO_REGION in trace.report.reasons


def test_f16_another_entry_point(field: Field) -> None:
    """What it calls is recorded instead, and the report names that."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.net.encode(batch[0]), batch[1])

    trace = field.replayed(lambda: Learner(Encoder(), step))

    assert [recording.region for recording in trace.report.recordings] == ["net.body"]


def test_f16_a_step_without_modules_says_so(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(F.linear(batch[0], module.net[4].weight[:, :FEATURES]), batch[1])

    trace = field.both(lambda: Learner(mlp(), step))

    assert trace.report.reasons == {Reason.NO_REGION: STEPS}


def test_f16_one_strategy_for_several_fits(field: Field) -> None:
    from lightning.pytorch import Trainer

    strategy = field.strategy()
    first, second = Learner(mlp()), Learner(Encoder())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for module in (first, first, second):
        before = strategy.report().steps_replayed
        trainer = Trainer(accelerator=field.accelerator, devices=1, max_epochs=1, strategy=strategy, **quiet)
        trainer.fit(module, loader(batches(), 6)[0])
        assert strategy.report().steps_replayed - before == 6 - WARM_UP - 1
        assert "forward" not in module.net.__dict__
    assert first.net.forward.__func__ is nn.Sequential.forward


@dataclass
class Output:
    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    attentions: Tensor | None = None


class Structured(nn.Module):
    """Takes and gives what a model of the zoo takes and gives."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.net = mlp(0.0)

    def forward(self, batch: dict[str, Any]) -> Any:
        first, (second, nothing) = batch["meta"]
        assert nothing is None
        hidden = batch["img"] + first * second
        return self.kind(logits=self.net(hidden), hidden_states=(hidden, hidden * 2), attentions=None)


@pytest.mark.parametrize("kind", [Output, OrderedDict])
def test_f17_nested_arguments_and_results(field: Field, kind: Any) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        out = module.net({"img": inputs, "meta": [inputs * 0.1, (inputs + batch_idx, None)]})
        assert type(out) is kind
        found = out if kind is OrderedDict else vars(out)
        assert list(found) == ["logits", "hidden_states", "attentions"]
        assert found["attentions"] is None
        assert type(found["hidden_states"]) is tuple
        return F.cross_entropy(found["logits"], labels) + found["hidden_states"][1].mean() * 0.0

    field.replayed(lambda: Learner(Structured(kind), step))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor, mask: Any = None, return_attention: bool = False, scale: float = 1.0) -> Any:
        hidden = inputs * scale if mask is None else inputs * scale * mask
        return (self.net(hidden), hidden) if return_attention else self.net(hidden)


def test_f18_keyword_arguments_of_changing_kind(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        mask = None if batch_idx % 3 == 0 else (batch[0] > 0).float()
        out = module.net(batch[0], mask=mask, return_attention=batch_idx % 2 == 0, scale=0.5)
        logits = out[0] if batch_idx % 2 == 0 else out
        return F.cross_entropy(logits, batch[1])

    trace = field.both(lambda: Learner(Masked(), step), steps=24)

    assert len(trace.report.recordings) == 4
    assert trace.actions[-6:] == ["replay"] * 6


class LooksAtMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and bool((mask == 1).all()):
            mask = None
        return self.net(inputs if mask is None else inputs * mask)


def test_f19_a_branch_on_the_contents_of_a_mask(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.ones_like(batch[0])
        mask[:, batch_idx % 2 * 3 :] = 0 if batch_idx % 2 else 1
        return F.cross_entropy(module.net(batch[0], mask), batch[1])

    trace = field.native(lambda: Learner(LooksAtMask(), step), Reason.HOST_READ, steps=14)

    assert {recording.region for recording in trace.report.recordings} <= {"net.net"}


FULL, PADDED = (6, 6, 6, 6, 6), (6, 3, 4, 5, 2)


def masked(*lengths: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Batches with masks, as tokenizers make them."""
    masks = [(torch.arange(FEATURES) < torch.tensor(rows).unsqueeze(1)).long() for rows in lengths]
    return [(*batch, mask) for batch, mask in zip(batches(count=len(masks)), masks, strict=True)]


def with_mask(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(module.net(batch[0], batch[2]), batch[1])


def fit_masked(field: Field, *lengths: tuple[int, ...]) -> Any:
    data = masked(*lengths)
    return field.both(lambda: Learner(LooksAtMask(), with_mask), lambda: loader(data, len(data)), steps=len(data))


def test_f19_padded_batches_are_replayed(field: Field) -> None:
    trace = fit_masked(field, *[PADDED] * 10)

    assert trace.actions == script(10)
    assert Reason.HOST_READ not in trace.report.reasons


def test_f19_a_batch_without_padding_among_others_is_native(field: Field) -> None:
    trace = fit_masked(field, *[PADDED] * 6, FULL, PADDED, FULL, PADDED)

    assert trace.actions == [*script(6), "native", "replay", "native", "replay"]
    assert trace.report.reasons[Reason.HOST_READ] == 2


def test_f19_a_batch_without_padding_at_first_only_delays_the_recording(field: Field) -> None:
    trace = fit_masked(field, *[PADDED] * (WARM_UP - 1), FULL, *[PADDED] * 8)

    assert trace.actions[WARM_UP:] == ["native", "native", "record", *["replay"] * 5]
    assert trace.report.reasons[Reason.HOST_READ] == 1


def test_f19_a_recording_that_is_not_met_again_is_made_anew(field: Field) -> None:
    trace = fit_masked(field, *[FULL] * 6, *[PADDED] * 14)

    assert trace.actions[:6] == script(6)
    assert trace.actions[6 : 6 + MAX_MISSES] == ["native"] * MAX_MISSES
    assert trace.actions[6 + MAX_MISSES :] == script(14 - MAX_MISSES)
    assert len(trace.report.recordings) == 2


class ChecksItsNorm(nn.Module):
    """Looks at statistics that the norm has just updated, which no schema says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(FEATURES, momentum=0.9), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(inputs * 4)
        return self.net(hidden * 2 if (self.norm.running_mean > 0.5).any() else hidden)


def test_f19_a_read_of_what_the_forward_pass_has_written_is_native(field: Field) -> None:
    field.native(lambda: Learner(ChecksItsNorm()), Reason.HOST_SYNC, lambda: loader(batches(count=9), 9), steps=9)


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_f19_a_step_without_a_loss_for_an_unusual_batch(field: Field, skipped: int) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor | None:
        if torch.isnan(batch[0]).any():
            return None
        return F.cross_entropy(module.net(batch[0]), batch[1])

    data = batches(count=12)
    data[skipped][0][0, 0] = torch.nan
    trace = field.both(lambda: Learner(mlp(), step), lambda: loader(data, 12), steps=12)

    assert trace.actions[-3:] == ["replay"] * 3
    assert Reason.RESULT not in trace.report.reasons


class ChecksItsInput(nn.Module):
    """Reads what no training with good data ever changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scaled", torch.tensor(True))

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.isnan(inputs).any():
            raise ValueError("not a number")
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        if not (positions.diff() == 1).all():
            inputs = inputs + 1
        return self.net(inputs * 2 if self.scaled else inputs)


def test_f19_checks_of_the_input_are_made_before_each_replay(field: Field) -> None:
    trace = field.replayed(lambda: Learner(ChecksItsInput()))
    assert Reason.HOST_READ not in trace.report.reasons

    data = batches(count=8)
    data[6][0][2, 1] = torch.nan
    native, replay = harness.run_both(
        lambda: Learner(ChecksItsInput()),
        lambda: loader(data, 8),
        strategy=field.strategy(),
        accelerator=field.accelerator,
        steps=8,
    )
    assert str(native.error) == str(replay.error) == "not a number"


class Graph(nn.Module):
    """Multiplies with a sparse matrix, which lies at no single address; the rest of it is a network of its own."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(), nn.LayerNorm(CLASSES), nn.GELU(), nn.Linear(CLASSES, CLASSES))
        self.register_buffer("edges", (torch.eye(5) + torch.eye(5).roll(1, 0)).to_sparse(layout=layout))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, self.net(inputs))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_f21_a_sparse_buffer(field: Field, layout: torch.layout) -> None:
    trace = field.native(lambda: Learner(Graph(layout)), Reason.UNSUPPORTED_TENSOR, steps=14)

    assert {recording.region for recording in trace.report.recordings if recording.replays} == {"net.net"}


class AsksForCaptures(nn.Module):
    """Takes another way while it is captured, as libraries do that know of CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        captured = inputs.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.net(inputs * 3 if captured else inputs)


def test_f19_a_network_does_not_find_out_that_it_is_captured(field: Field) -> None:
    field.replayed(lambda: Learner(AsksForCaptures()))


class Checkpointing(nn.Module):
    """Saves the generators before a computation, and sets them when it is run again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        self.last = nn.Linear(CLASSES, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(checkpoint(self.first, inputs, use_reentrant=False)))


def test_f19_generators_set_where_nothing_is_drawn(field: Field) -> None:
    field.replayed(lambda: Learner(Checkpointing(dropout=0.0)))


@pytest.mark.parametrize("seed", [torch.manual_seed, random.seed])
def test_f19_a_generator_seeded_in_the_step(field: Field, seed: Any) -> None:
    """Nothing is drawn in the step, but what comes after it begins anew each time."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        seed(5)
        return F.cross_entropy(module.net(batch[0]), batch[1])

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, CLASSES))

        def forward(self, inputs: Tensor) -> Tensor:
            seed(5)
            return self.net(inputs)

    field.native(lambda: Learner(Seeded()), Reason.HOST_RANDOM)
    field.both(lambda: Learner(mlp(dropout=0.0), step))


def test_f19_generators_set_where_something_is_drawn(field: Field) -> None:
    field.native(lambda: Learner(Checkpointing(dropout=0.2)), Reason.HOST_RANDOM)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(FEATURES, 8)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        return self.head(self.decoder(hidden, hidden, tgt_mask=mask).mean(1))


class PaddedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(FEATURES, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        padding = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        padding[:, -1] = True
        return self.head(self.encoder(self.embed(inputs), src_key_padding_mask=padding).nan_to_num().mean(1))


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("net", [Decoder, PaddedEncoder])
def test_f20_stock_transformers_with_masks(field: Field, net: Any) -> None:
    def data() -> Any:
        return loader(batches(4, FEATURES), 9)[0], loader(batches(4, FEATURES, seed=1), 2)[0]

    trace = field.both(lambda: Validated(net()), data, max_epochs=2)

    if net is Decoder:
        assert "net" not in {recording.region for recording in trace.report.recordings}
        assert Reason.HOST_SYNC in trace.report.reasons
    assert "replay" in trace.actions


class HostScalars(nn.Module):
    """Multiplies with CPU scalars: a constant of its own, or an attribute that was left on the CPU."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = mlp()
        self.kind = kind
        self.half = torch.tensor(0.5)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "constant":
            return self.net(inputs * torch.tensor(0.5))
        if self.kind == "attribute":
            return self.net(inputs * self.half)
        if inputs.sum().item() > 1e9:
            print("a debug print")
        return self.net(inputs)


@pytest.mark.parametrize("kind", ["constant", "attribute", "read"])
def test_f21_scalars_on_the_host(field: Field, kind: str) -> None:
    trace = field.both(lambda: Learner(HostScalars(kind)), steps=8)

    reasons = set(trace.report.reasons)
    if kind == "read":
        assert Reason.HOST_SYNC in reasons
    elif kind == "attribute" and field.on_gpu:  # a CPU tensor is no stranger on the CPU
        assert Reason.HOST_TENSOR in reasons
    else:
        assert trace.actions == script(8)


class HostConstants(nn.Module):
    """Makes what it needs of constants on the host and takes it to the device, as many published networks do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = mlp()
        self.kind = kind

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device
        if self.kind == "filled":
            inputs = inputs + torch.full((FEATURES,), 0.5).to(device)
        elif self.kind == "positions":
            positions = torch.arange(FEATURES, dtype=torch.float32)
            inputs = inputs + (positions / FEATURES).sin().to(device, inputs.dtype)
        elif self.kind == "slopes":
            inputs = inputs * torch.tensor([2.0**-i for i in range(FEATURES)], device=device)
        elif self.kind == "new_tensor":
            inputs = inputs * inputs.new_tensor(0.5)
        elif self.kind == "numpy":
            inputs = inputs + torch.from_numpy(np.linspace(0, 1, FEATURES, dtype=np.float32)).to(device)
        elif self.kind == "where":
            inputs = torch.where(inputs > 0, inputs, torch.tensor(-0.5))
        elif self.kind == "index":
            inputs = inputs[:, torch.tensor([5, 4, 3, 2, 1, 0])]
        elif self.kind == "list":
            inputs = inputs[:, [1, 0, 3, 2, 5, 4]]
        elif self.kind == "written":
            mask = torch.tensor([1.0] * FEATURES, device=device)
            mask[:2] = torch.tensor([0.5, 0.25])
            inputs = inputs * mask.mul_(2)
        elif self.kind == "pinned":
            mask = torch.full((FEATURES,), 0.5)
            inputs = inputs * (mask.pin_memory() if device.type == "cuda" else mask).to(device, non_blocking=True)
        elif self.kind == "double":
            inputs = inputs * torch.tensor(0.1, dtype=torch.float64)
        return self.net(inputs)


KINDS = [
    "filled",
    "positions",
    "slopes",
    "new_tensor",
    "numpy",
    "where",
    "index",
    "list",
    "written",
    "double",
]


def test_f21_pinned_memory_on_its_way_to_the_device(field: Field) -> None:
    """A copy that a graph could hold, of memory that the host reuses; but it may be unable to pin memory."""
    trace = field.both(lambda: Learner(HostConstants("pinned")))

    assert trace.actions == script() or (field.on_gpu and Reason.CAPTURE_FAILED in trace.report.reasons)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_f21_constants_of_the_host_are_replayed(field: Field, kind: str, precision: str) -> None:
    trace = field.replayed(lambda: Learner(HostConstants(kind)), precision=precision)

    assert [recording.region for recording in trace.report.recordings] == ["net"]


TABLE = np.zeros(100_000, dtype=np.float32)  # too large to be compared by the guards


class FromTable(nn.Module):
    """Copies a table of numbers that no guard watches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs + torch.tensor(TABLE[:FEATURES]).to(inputs.device))


def test_f21_host_values_that_differ_between_two_steps(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        TABLE[0] = batch_idx
        return F.cross_entropy(module.net(batch[0]), batch[1])

    trace = field.native(lambda: Learner(FromTable(), step), Reason.HOST_TENSOR)

    assert "test_f_python_state.py" in trace.report.messages[Reason.HOST_TENSOR], "the line that copies"


def test_f21_an_audit_sees_other_host_values(field: Field) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        TABLE[0] = batch_idx >= 5
        if batch_idx == 5 and isinstance(module.trainer.strategy, ReplayStrategy):
            module.trainer.strategy.audit()  # before the first replay that would deviate
        return F.cross_entropy(module.net(batch[0]), batch[1])

    actions = [*script(5), *script(4)[:1], *script(4)]
    trace = field.replayed(lambda: Learner(FromTable(), step), actions=actions, steps=10)

    assert trace.report.reasons[Reason.HOST_TENSOR] == 1
    assert "test_f_python_state.py" in trace.report.messages[Reason.HOST_TENSOR]


@pytest.mark.parametrize("held", ["attribute", "buffer left behind", "global"])
def test_f21_a_host_tensor_that_may_change(gpu_field: Field, held: str) -> None:
    """Its values are not compared before a replay, so it is no constant."""
    outside = torch.linspace(0, 1, FEATURES)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.row = torch.linspace(0, 1, FEATURES)

        def forward(self, inputs: Tensor) -> Tensor:
            row = outside if held == "global" else self.row
            return self.net(inputs + row.to(inputs.device))

    def make() -> Learner:
        module = Learner(Holder())
        if held == "buffer left behind":
            module.on_fit_start = lambda: module.net.register_buffer("row", module.net.__dict__.pop("row"))
        return module

    gpu_field.native(make, Reason.HOST_TENSOR)


class MaskedLayer(nn.Linear):
    """Prunes its weight in the forward."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("mask", (torch.arange(FEATURES * CLASSES).view(CLASSES, FEATURES) % 3 != 0).float())

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(inputs)


def test_f22_weights_pruned_in_the_forward(field: Field) -> None:
    trace = field.native(
        lambda: Learner(MaskedLayer(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        Reason.PARAMETER_WRITTEN,
        steps=20,
    )

    assert trace.report.steps_replayed == 0
