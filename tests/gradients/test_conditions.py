# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What people put around a step: each is replayed or native as the report says, and trains with native's bits.

Nothing here needs to be recognised in advance: gradients are handed over when autograd is done, to whatever is there.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from lightning_replay import NotReplayedError, Reason
from tests.gradients.counting import check_counts, expected_counts
from tests.helpers.bits import same_bits
from tests.helpers.trace import Trace, TraceResult, run_fit, unequal
from tests.parity.harness import (
    Arm,
    Learner,
    PoisonedStrategy,
    batches,
    check_native,
    check_replayed,
    classify,
    loader,
    mlp,
    run_both,
    script,
    tape,
)

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 7
USUAL = expected_counts(STEPS)
ALL_ADDED = expected_counts(STEPS, in_place=True)


# -- who looks at gradients before they are zeroed


def test_nobody_looks() -> None:
    """The trace of all other tests observes `on_before_zero_grad`; this one does not."""
    make_data = lambda: loader(batches(), STEPS)  # noqa: E731
    native, replay = (
        run_fit(lambda: Learner(mlp()), make_data, strategy, max_epochs=1, trace=Trace("copy"))
        for strategy in ("auto", tape())
    )

    assert unequal(native, replay) == []
    check_counts(replay, USUAL)


# -- gradients that autograd would treat in its own way


def three_parts() -> nn.Sequential:
    """A network of parts that are worth a recording each, with weights of one shape."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), *(nn.Tanh() for _ in range(9)), nn.LayerNorm(6)) for _ in range(3)),
        nn.Linear(6, 3),
    )


def shares(*parts: int) -> Callable[[Any], None]:
    """Returns what gives the weights of some parts of `three_parts` one gradient."""

    def share(module: Any) -> None:
        weights = [module.net[part][0].weight for part in parts]
        for weight in weights[1:]:
            weight.grad = weights[0].grad

    return share


def wants_doubles(parts: nn.Module) -> nn.Module:
    if hasattr(torch.Tensor, "grad_dtype"):
        for parameter in parts[1].parameters():
            parameter.grad_dtype = torch.float64
    return parts


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch knows no grad_dtype")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_gradient_of_another_dtype_is_native(in_place: bool) -> None:
    make = lambda: Learner(wants_doubles(three_parts()), optimizer=lambda p: SGD(p, 0.1), in_place=in_place)  # noqa: E731
    trace = check_native(make, Reason.GRADIENT, where="net.1.0.weight", steps=14)

    assert {recording.region for recording in trace.report.recordings if recording.replays} == {"net.0", "net.2"}


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_gradients_that_share_memory_are_native(accumulate_grad_batches: int) -> None:
    """Of three summands it counts which is added first."""
    make = lambda: Learner(three_parts(), in_place=True, events={0: shares(0, 2)})  # noqa: E731
    trace = check_native(
        make, Reason.GRADIENT, where="net.0.0.weight", steps=14, accumulate_grad_batches=accumulate_grad_batches
    )

    assert {recording.region for recording in trace.report.recordings if recording.replays} == {"net.1"}


def test_gradients_that_come_to_share_memory_are_an_error() -> None:
    native, replay = (
        Arm(lambda: Learner(three_parts(), in_place=True, events={4: shares(0, 2)}), batches(), strategy)
        for strategy in ("auto", tape())
    )

    assert native.error is None
    assert isinstance(replay.error, NotReplayedError)
    assert replay.error.finding.reason is Reason.GRADIENT


class LooksItself(Learner):
    """A module that observes its own gradients."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm() if norms else torch.zeros(()))


def test_a_module_looks() -> None:
    trace = check_replayed(lambda: LooksItself(mlp()))

    assert trace.metrics["norm"] > 0
    check_counts(trace, USUAL)


def test_a_lambda_looks() -> None:
    seen: list[list[Tensor]] = []

    def observers() -> list[Callback]:
        seen.append(norms := [])
        look = lambda trainer, module, optimizer: norms.extend(  # noqa: E731
            p.grad.norm() for p in module.parameters() if p.grad is not None
        )
        return [LambdaCallback(on_before_zero_grad=look), LambdaCallback(on_before_zero_grad=print)]

    check_counts(check_replayed(lambda: Learner(mlp()), callbacks=observers), USUAL)
    assert len(seen[0]) > 0
    assert same_bits(*seen)


class ChangesGradients(Callback):
    """Changes what is about to be zeroed, and keeps a part of it for the next sum."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_callback_changes_gradients(in_place: bool) -> None:
    trace = check_replayed(lambda: Learner(mlp(), in_place=in_place), callbacks=lambda: [ChangesGradients()])

    check_counts(trace, ALL_ADDED if in_place else USUAL)


class ReplacesGradients(Callback):
    """Puts tensors of its own in the place of gradients, after the backward."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("window", [1, 3])
def test_a_callback_replaces_gradients(window: int) -> None:
    trace = check_replayed(
        lambda: Learner(mlp()), callbacks=lambda: [ReplacesGradients()], accumulate_grad_batches=window
    )

    check_counts(trace, expected_counts(STEPS, window))


class GivesData(Callback):
    """Gives gradients other memory, as old code does."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.data = parameter.grad.data * 0.5


def test_a_callback_gives_gradients_other_memory() -> None:
    trace = check_replayed(lambda: Learner(mlp()), callbacks=lambda: [GivesData()])

    # The buffers are lost to whoever changed them, and nothing is published into them again.
    check_counts(trace, (1, 0, 3))


class ReshapesDiscarded(Callback):
    """Changes the layout of a gradient that nobody needs any more, in place."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for parameter in pl_module.parameters():
            gradient, parameter.grad = parameter.grad, None
            gradient.unsqueeze_(0)


class MakesTrainable(Callback):
    """Has gradients require gradients, as code that differentiates twice does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.requires_grad_(True)


class SeesTrainable(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        assert not any(parameter.grad.requires_grad for parameter in pl_module.parameters())


@pytest.mark.parametrize("changes", [ReshapesDiscarded, MakesTrainable])
def test_a_callback_changes_gradients_in_place(changes: type[Callback]) -> None:
    trace = check_replayed(lambda: Learner(mlp()), callbacks=lambda: [changes(), SeesTrainable()])

    # The first step that publishes is the last one whose gradients are as the buffers were made.
    check_counts(trace, (1, 0, 3))


class FreezesBeforeBackward(Callback):
    """Freezes a parameter between forward and backward."""

    without: list[int]

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step % 2:
            next(pl_module.parameters()).requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = next(pl_module.parameters())
        if batch_idx == 0:
            self.without = []
        if first.grad is None:
            self.without.append(batch_idx)
        first.requires_grad_(True)


@pytest.mark.parametrize(
    ("window", "without", "actions"),
    [
        (1, [1, 3, 5], ["native"] * 2 + ["record"] + ["replay"] * 4),
        # Frozen in the steps that would be recorded: the recording would not be of what the signature says.
        (2, [2, 3, 6], ["native"] * 2 + ["record"] * 3 + ["replay"] * 2),
    ],
)
def test_a_parameter_frozen_before_the_backward(window: int, without: list[int], actions: list[str]) -> None:
    arms: list[FreezesBeforeBackward] = []

    def callbacks() -> list[Callback]:
        arms.append(FreezesBeforeBackward())
        return [arms[-1]]

    check_replayed(
        lambda: Learner(mlp()),
        callbacks=callbacks,
        accumulate_grad_batches=window,
        gradient_clip_val=None,
        actions=actions,
    )

    assert [arm.without for arm in arms] == [without, without]


class SetsSparse(Callback):
    """Sets a sparse gradient for the next one to be added to."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = torch.full_like(parameter.detach(), 0.5).to_sparse()


def test_a_sparse_gradient_is_added_to() -> None:
    trace = check_replayed(lambda: Learner(mlp()), callbacks=lambda: [SetsSparse()], gradient_clip_val=None)

    check_counts(trace, (0, 0, 4))


# -- hooks of the module in place of Lightning's


class NeverZeroes(Learner):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        pass


class ZeroesSome(Learner):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in list(self.parameters())[::2]:
            parameter.grad = None


class ZeroesByHand(Learner):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("kind", [NeverZeroes, ZeroesSome, ZeroesByHand])
def test_own_zeroing(kind: type[Learner]) -> None:
    check_counts(check_replayed(lambda: kind(mlp())), ALL_ADDED)


class StepsByHand(Learner):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class ClosureFirst(Learner):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()


class EverySecond(Learner):
    """As Lightning's guide does it: the closure runs, the update does not."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class AroundTheClosure(Learner):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            for parameter in self.parameters():
                parameter.grad.add_(0.001)
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("kind", [StepsByHand, ClosureFirst, EverySecond, AroundTheClosure])
def test_own_optimizer_step(kind: type[Learner]) -> None:
    check_counts(check_replayed(lambda: kind(mlp()), gradient_clip_val=None), USUAL)


class Twice(Learner):
    """Two forward and backward passes an update; the first one's gradients are kept for the second."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        first = [parameter.grad for parameter in self.parameters()]
        optimizer_closure()
        for parameter, gradient in zip(self.parameters(), first, strict=True):
            parameter.grad.add_(gradient)
        optimizer.step()


def test_two_closures_an_update() -> None:
    trace = check_replayed(lambda: Twice(mlp()), actions=["native", *["replay"] * 6])

    # Steps 1 to 6: the first pass publishes, the second one finds what it published kept.
    check_counts(trace, (6, 0, 5))


class OwnBackward(Learner):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


def test_own_backward_makes_the_fit_native() -> None:
    _, replay = run_both(lambda: OwnBackward(mlp()))

    assert replay.trace is not None
    assert replay.trace.report.reasons == {Reason.OVERRIDDEN_BACKWARD: STEPS}
    check_counts(replay.trace, (0, 0, 0))


class HooksOfTheModule(Learner):
    def on_after_backward(self) -> None:
        self.log("largest", max(p.grad.abs().max() for p in self.parameters()))

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("loss", loss.detach())

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def test_other_hooks_of_the_module() -> None:
    check_counts(check_replayed(lambda: HooksOfTheModule(mlp())), USUAL)


# -- profilers


class OwnProfiler(Profiler):
    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass


class LooksWhileItProfiles(SimpleProfiler):
    """A profiler that runs code of its own between forward and backward."""

    gradients: Any = ()

    def start(self, action_name: str) -> None:
        super().start(action_name)
        if "backward" in action_name or "zero_grad" in action_name:
            for parameter in self.gradients:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.5)


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler, OwnProfiler, LooksWhileItProfiles])
def test_profilers(profiler: type[Profiler], tmp_path: Any) -> None:
    class Show(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.profiler.gradients = list(pl_module.parameters())

    arguments = {} if profiler is OwnProfiler else {"dirpath": tmp_path, "filename": "profile"}
    arms = [
        Arm(lambda: Learner(mlp()), batches(), strategy, callbacks=[Show()], profiler=profiler(**arguments))
        for strategy in ("auto", tape())
    ]
    assert arms[0].error is arms[1].error is None
    assert unequal(arms[0].trace, arms[1].trace) == []
    check_counts(arms[1].trace, USUAL)


def test_a_profiler_with_a_method_of_its_own() -> None:
    class Customise(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.profiler.profile = types.MethodType(SimpleProfiler.profile, trainer.profiler)

    _, replay = run_both(lambda: Learner(mlp()), callbacks=lambda: [Customise()], profiler="simple")

    assert replay.trace is not None
    assert replay.trace.report.reasons == {Reason.UNKNOWN_CONTRACT: STEPS}


# -- wrappers of the optimizer's step


def with_schedule(optimizer: torch.optim.Optimizer) -> None:
    """LambdaLR wraps `optimizer.step` to count its calls."""
    optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)  # type: ignore[attr-defined]


def _wrap(optimizer: torch.optim.Optimizer, before: Any) -> None:
    native = optimizer.step

    @functools.wraps(native)
    def step(*args: Any, **kwargs: Any) -> Any:
        before(optimizer)
        return native(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def with_noise(optimizer: torch.optim.Optimizer) -> None:
    """Changes gradients while the next closure has not run."""

    def add(optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(1.0)

    _wrap(optimizer, add)


def with_memory(optimizer: torch.optim.Optimizer) -> None:
    """Keeps the last gradients, and writes them to the weights a step later."""
    kept: list[Tensor] = []

    @torch.no_grad()
    def remember(optimizer: torch.optim.Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        for parameter, gradient in zip(parameters, kept, strict=False):
            parameter.sub_(gradient, alpha=0.01)
        kept[:] = [parameter.grad for parameter in parameters if parameter.grad is not None]

    _wrap(optimizer, remember)


@pytest.mark.parametrize(("change", "counts"), [(with_schedule, USUAL), (with_noise, USUAL), (with_memory, (2, 0, 2))])
def test_wrappers_of_the_optimizers_step(change: Any, counts: tuple[int, int, int]) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=0.05)
        change(made)
        return made

    check_counts(check_replayed(lambda: Learner(mlp(), optimizer=optimizer)), counts)


def negate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.neg_()


def test_hooks_of_the_optimizer() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.05)
        made.register_step_pre_hook(negate)
        made.register_step_post_hook(lambda *_: made.zero_grad())
        return made

    check_counts(check_replayed(lambda: Learner(mlp(), optimizer=optimizer)), USUAL)


def test_the_optimizer_zeroes_as_it_likes() -> None:
    class Tenth(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.1)

    check_counts(check_replayed(lambda: Learner(mlp(), optimizer=lambda p: Tenth(p, lr=0.1))), ALL_ADDED)


# -- Lightning changed under way


class Shadow(Callback):
    """Hides a method of the loop from some batch on."""

    def __init__(self, name: str, value: Any, step: int) -> None:
        self.name, self.value, self.step = name, value, step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            setattr(trainer.fit_loop.epoch_loop.automatic_optimization, self.name, self.value)


def nothing_is_zeroed(batch_idx: int, optimizer: Any) -> None:
    return None


def test_a_closure_that_is_shadowed_from_the_start_makes_the_fit_native() -> None:
    shadow = lambda: [Shadow("_make_zero_grad_fn", nothing_is_zeroed, 0)]  # noqa: E731
    _, replay = run_both(lambda: Learner(mlp()), callbacks=shadow)

    assert replay.trace is not None
    assert replay.trace.report.reasons == {Reason.UNKNOWN_CONTRACT: STEPS}


def test_a_closure_that_is_shadowed_later_is_exact_all_the_same() -> None:
    shadow = lambda: [Shadow("_make_zero_grad_fn", nothing_is_zeroed, 5)]  # noqa: E731
    trace = check_replayed(lambda: Learner(mlp()), callbacks=shadow)

    check_counts(trace, (2, 2, 0))


class ScalesTheLoss(Precision):
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return super().pre_backward(tensor * 3, module)


class CastsAround(MixedPrecision):
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context():
            yield


class ScalesGradients(Precision):
    """Changes gradients while the strategy's backward has not ended."""

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, model, optimizer, *args, **kwargs)
        for parameter in model.parameters():
            parameter.grad.mul_(3)


def run_plugin(make_plugin: Any) -> TraceResult:
    arms = [
        Arm(lambda: Learner(mlp()), batches(), strategy, plugins=[make_plugin()], precision=None)
        for strategy in ("auto", tape())
    ]
    assert arms[0].error is arms[1].error is None, (arms[0].error, arms[1].error)
    assert arms[0].trace is not None
    assert arms[1].trace is not None
    assert unequal(arms[0].trace, arms[1].trace) == []
    return arms[1].trace


@pytest.mark.parametrize(
    "make_plugin", [ScalesTheLoss, lambda: CastsAround("bf16-mixed", "cpu")], ids=["loss", "casts"]
)
def test_own_precision_plugin(make_plugin: Any) -> None:
    trace = run_plugin(make_plugin)

    assert trace.actions == script(STEPS)
    check_counts(trace, USUAL)


def test_own_backward_of_the_precision_plugin_makes_the_fit_native() -> None:
    report = run_plugin(ScalesGradients).report

    assert report.reasons == {Reason.OVERRIDDEN_BACKWARD: STEPS}
    assert "ScalesGradients.backward" in report.messages[Reason.OVERRIDDEN_BACKWARD]


def test_a_method_of_the_precision_plugin_is_hidden() -> None:
    class Hide(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            plugin = trainer.precision_plugin
            native = plugin.backward
            plugin.backward = lambda loss, *args, **kwargs: native(loss * 2, *args, **kwargs)

    _, replay = run_both(lambda: Learner(mlp()), callbacks=lambda: [Hide()])

    assert replay.trace is not None
    assert replay.trace.report.reasons == {Reason.UNKNOWN_CONTRACT: STEPS}


# -- parameter groups and forwards that a closure does not know


@pytest.mark.parametrize("window", [1, 2])
def test_a_parameter_that_leaves_its_group(window: int) -> None:
    """Nobody zeroes its gradient any more, so it grows; the others are zeroed as before."""

    def leave(module: Any) -> None:
        module.optimizers().param_groups[0]["params"].pop()

    trace = check_replayed(
        lambda: Learner(mlp(), events={4: leave}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        steps=9,
        accumulate_grad_batches=window,
    )

    check_counts(trace, (2, 4, 0) if window == 1 else (1, 5, 0))
    assert trace.gradients[-1]["net.4.bias"] is not None


class ForwardsOutside(Callback):
    """Calls the network, in training mode, outside of `training_step`, and differentiates it once."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.net(batch[0])

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            pl_module.net(torch.ones(4, 6))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net(torch.ones(3, 6)).sum().backward()


@pytest.mark.parametrize("window", [1, 2])
def test_forwards_outside_of_the_closure(window: int) -> None:
    trace = check_replayed(
        lambda: Learner(mlp()), callbacks=lambda: [ForwardsOutside()], accumulate_grad_batches=window
    )

    check_counts(trace, expected_counts(STEPS, window))


class BackwardBeforeZero(Callback):
    """Adds to the gradients of the last step when they are about to be zeroed, with a forward pass in between."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.net(torch.ones(3, 6)).sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_backward_while_a_replayed_one_is_waiting(in_place: bool) -> None:
    trace = check_replayed(lambda: Learner(mlp(), in_place=in_place), callbacks=lambda: [BackwardBeforeZero()])

    check_counts(trace, ALL_ADDED if in_place else USUAL)


def test_a_custom_objective() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = classify(module, batch, batch_idx)
        return loss.square() + 0.1 * loss.detach() * loss

    check_counts(check_replayed(lambda: Learner(mlp(), step)), USUAL)


# -- hooks on parameters that come and go


class HooksOfOneBackward(Callback):
    """Hooks parameters after the forward of a step, and takes the hooks back after its backward."""

    def __init__(self, seen: list[list[Tensor]]) -> None:
        self.seen = seen

    def on_train_start(self, *_: Any) -> None:
        self.seen.append([])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        first, last = pl_module.net[0].weight, pl_module.net[4].bias
        note = lambda parameter: self.seen[-1].append(parameter.grad.clone())  # noqa: E731
        self.handles = [
            first.register_hook(lambda gradient: gradient * 2),
            last.register_post_accumulate_grad_hook(note),
        ]

    def on_after_backward(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_hooks_that_come_after_the_forward(window: int, in_place: bool) -> None:
    seen: list[list[Tensor]] = []
    check_replayed(
        lambda: Learner(mlp(), in_place=in_place),
        callbacks=lambda: [HooksOfOneBackward(seen)],
        accumulate_grad_batches=window,
    )

    assert len(seen[0]) == STEPS
    assert same_bits(*seen)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        hidden = self.body(inputs)
        return [head(hidden) for head in self.heads]


class HookedHead(Learner):
    """Sees the gradients of one of two heads; some steps train the other one."""

    def __init__(self, kind: str = "tensor", in_place: bool = False) -> None:
        super().__init__(TwoHeads(), in_place=in_place)
        self.seen: list[Any] = []
        head = self.net.heads[0]
        if kind == "several":
            register_multi_grad_hook(list(head.parameters()), lambda gradients: self.seen.append(gradients))
        elif kind == "tensor":
            head.weight.register_hook(self.seen.append)
        else:
            head.weight.register_post_accumulate_grad_hook(lambda weight: self.seen.append(weight.grad.clone()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.net(inputs)[batch_idx in (4, 6)], labels)


class SetBeforeBackward(Callback):
    """Freezes or unfreezes a bias between forward and backward pass of a step that trains the other head."""

    def __init__(self, trainable: bool) -> None:
        self.trainable = trainable

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.net.body[4].bias.requires_grad_(not self.trainable)

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 4:
            module.net.body[4].bias.requires_grad_(self.trainable)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_call_that_is_differentiated_anew_reaches_what_was_trainable_in_its_forward_pass(trainable: bool) -> None:
    _, replay = run_both(lambda: HookedHead(), callbacks=lambda: [SetBeforeBackward(trainable)])

    assert replay.trace is not None, replay.error
    assert replay.trace.actions[4] == "replay"
    assert replay.trace.report.reasons[Reason.COTANGENTS] >= 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "after", "several"])
def test_a_hook_is_not_called_where_no_gradient_comes(kind: str, in_place: bool) -> None:
    native, replay = run_both(lambda: HookedHead(kind, in_place))

    assert replay.trace is not None, replay.error
    assert replay.trace.report.reasons[Reason.COTANGENTS] == 2
    seen = [arm.modules[0].seen for arm in (native, replay)]
    if kind == "several":  # torch's own hook of several tensors is told that there is nothing
        seen[1] = [gradients for gradients in seen[1] if gradients != [None, None]]
    assert len(seen[0]) == STEPS - 2
    assert same_bits(*seen)


class HookBesideNativeUse(Callback):
    """Sees the gradient of a weight that the loss uses too, from between forward and backward pass on."""

    def __init__(self) -> None:
        self.seen: list[Tensor | None] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 4:
            module.net[4].weight.register_hook(self.seen.append)


def test_a_hook_that_comes_too_late_for_a_shared_weight_is_not_called_in_vain() -> None:
    hook = HookBesideNativeUse()
    step = lambda module, batch, _: classify(module, batch, 0) + module.net[4].weight.square().sum()  # noqa: E731
    replay = Arm(lambda: Learner(mlp(), step), batches(), tape(), callbacks=[hook])

    assert isinstance(replay.error, NotReplayedError)
    assert hook.seen == []


# -- the strategy itself, extended


class Extends:
    """What a strategy of one's own may do around a backward and an update."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)  # type: ignore[misc]
        self.lightning_module.log("before", closure_loss.detach())  # type: ignore[attr-defined]

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)  # type: ignore[misc]
        for parameter in self.lightning_module.parameters():  # type: ignore[attr-defined]
            parameter.grad.mul_(0.5)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss * 3, *args, **kwargs)  # type: ignore[misc]
        for parameter in self.lightning_module.parameters():  # type: ignore[attr-defined]
            parameter.grad = parameter.grad.neg()
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        for parameter in self.lightning_module.parameters():  # type: ignore[attr-defined]
            parameter.grad.zero_()
        return result


class ExtendedNative(Extends, SingleDeviceStrategy):
    pass


class ExtendedReplay(Extends, PoisonedStrategy):
    pass


def test_own_strategy() -> None:
    replaying = ExtendedReplay(backend="tape", warmup_steps=2, on_native="ignore")
    native, replay = (
        Arm(lambda: Learner(mlp()), batches(), strategy, accelerator="cpu")
        for strategy in (ExtendedNative(device="cpu"), replaying)
    )
    assert native.error is replay.error is None, (native.error, replay.error)
    assert native.trace is not None
    assert replay.trace is not None
    assert unequal(native.trace, replay.trace) == []
    assert replay.trace.actions == script(STEPS)
    check_counts(replay.trace, USUAL)
