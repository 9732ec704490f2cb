# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Two arms that train the same network, one natively and one with recorded regions, and what may happen to them.

No Trainer: a loop with the order of Lightning's step (forward, zeroing, backward, update) drives the runner directly.
"""

import contextlib
import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_replay import dispatch
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.errors import NotReplayedError
from lightning_replay.reasons import Finding
from lightning_replay.runner import Runner
from tests.helpers.bits import assert_same
from tests.statemachine import net as network
from tests.statemachine.net import CLASSES, FEATURES, WIDTH, Block, Net, Root

VALUES: tuple[Any, ...] = (1.0, 0.5, -1.0, 0.0, -0.0, 1, True, 1.5)
PATIENT = 10**6


torch.set_num_threads(1)  # tensors of this size gain nothing from more


class Arm:
    """One training run.

    Args:
        replays: Whether it records and replays.
    """

    def __init__(self, replays: bool) -> None:
        self.root = Root()
        self.optimizer = torch.optim.SGD(self.root.parameters(), lr=0.05, momentum=0.5)
        self.findings: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.runner: Runner | None = None
        if replays:
            backend = TapeBackend(torch.device("cpu"), poison=True)
            self.runner = Runner(backend, warmup_steps=1, max_recordings=4, certify="auto", on_finding=self._note)
        self.handles: list[Any] = []
        self.seen: list[Any] = []
        self.seen_gradients: dict[int, list[Any]] = {}
        self.kept: list[Any] = []
        self.rng: Any = None

    def _note(self, finding: Finding) -> None:
        self.findings[finding.reason.value] += 1

    @contextlib.contextmanager
    def own_random(self) -> Iterator[None]:
        """Runs a block with this arm's generators."""
        if self.rng is not None:
            _set_random(self.rng)
        try:
            yield
        finally:
            self.rng = _get_random()

    def remember(self, value: Any) -> None:
        """Keeps a tensor as a user would; the oldest goes after a while."""
        self.kept.append(value)
        del self.kept[:-12]

    def new_optimizer(self) -> None:
        """Makes an optimizer for the parameters as they are now."""
        self.optimizer = torch.optim.SGD(self.root.parameters(), lr=self.optimizer.param_groups[0]["lr"], momentum=0.5)

    def forward_step(self, step: Callable[[], Any], counts: bool) -> Any:
        if self.runner is None:
            return step()
        if not self.runner.regions:
            return self.runner.discover(self.root, step)
        return self.runner.run_step(step, counts)

    def after_step(self) -> None:
        if self.runner is not None:
            self.actions[self.runner.last_action] += 1

    def backward(self, loss: Tensor) -> None:
        with contextlib.nullcontext() if self.runner is None else self.runner.backward(loss):
            loss.backward()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.root.named_parameters()}


class World:
    """Both arms, and how their steps are made.

    Args:
        seed: For weights and batches.
        patient: Never give a region up for changing often.
    """

    def __init__(self, seed: int = 0, patient: bool = True) -> None:
        network.GAIN, network.ACTIVATION, Block.bonus = 1.0, torch.tanh, 0.0
        network.TABLE["gains"] = [1.0, [1.0]]
        self._strikes, dispatch.MAX_STRIKES = dispatch.MAX_STRIKES, PATIENT if patient else dispatch.MAX_STRIKES
        self._forward = Block.__dict__["forward"]
        self.seed = seed
        self.arms = []
        for replays in (False, True):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            arm = Arm(replays)
            with arm.own_random():
                pass
            self.arms.append(arm)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        self.over = False
        self.declared: str | None = None
        # how a step is made
        self.size = 4
        self.layout = "plain"
        self.calls = 1
        self.other: str | None = None
        self.weight: Any = 1.0
        self.from_results = "logits"
        self.trainable_input = False
        self.penalty = False
        self.residual = False
        self.peek = False
        self.window = 1
        self.in_place = False
        self.autocast: bool | None = None
        self.counts = True
        self.keep: set[str] = set()
        self.end: str | None = None

    @property
    def native(self) -> Arm:
        return self.arms[0]

    @property
    def replay(self) -> Arm:
        return self.arms[1]

    def close(self) -> None:
        """Puts everything global back."""
        dispatch.MAX_STRIKES = self._strikes
        Block.forward = self._forward  # type: ignore[method-assign]
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        for arm in self.arms:
            for handle in arm.handles:
                handle.remove()
            if arm.runner is not None:
                arm.runner.close()

    # -- steps ---------------------------------------------------------------------------------------------------

    def train(self, steps: int) -> None:
        """Runs some steps in both arms and compares each."""
        for _ in range(steps):
            if self.over:
                return
            self.step()

    def step(self) -> None:
        batches = [self._batch() for _ in range(self.calls)]
        label = self._draw_labels()
        self.steps += 1
        self.declared = None
        native, replay = (self._step(arm, copy.deepcopy(batches), label.clone()) for arm in self.arms)
        if self.declared is not None and "error" not in native:
            self.over = True  # an error that names its cure, where replay cannot be exact any more
            return
        assert_same(native, replay, "step")
        assert_same(self._state(self.native), self._state(self.replay), "state")
        if self.native.rng[1] != self.replay.rng[1]:  # comparing six hundred numbers one by one takes its time
            assert_same(self.native.rng[1], self.replay.rng[1], "Python's random")
        assert_same(self.native.rng[::2], self.replay.rng[::2], "random")
        assert_same(self.native.kept, self.replay.kept, "kept")
        assert_same(self.native.seen, self.replay.seen, "seen by hooks")
        assert_same(self.native.seen_gradients, self.replay.seen_gradients, "seen by hooks on parameters")
        self.end = None

    def _step(self, arm: Arm, batches: list[list[Tensor | None]], label: Tensor) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        with arm.own_random():
            try:
                self._train(arm, batches, label, seen)
            except NotReplayedError as error:
                self.declared = error.finding.reason.value
                seen["error"] = str(error)
            except (ValueError, RuntimeError, TypeError) as error:
                seen["error"] = f"{type(error).__name__}: {error}"
            arm.after_step()
        seen["inputs"] = [[None if t is None else t.detach() for t in batch] for batch in batches]
        seen["input gradients"] = [[None if t is None else t.grad for t in batch] for batch in batches]
        return seen

    def _train(self, arm: Arm, batches: list[list[Tensor | None]], label: Tensor, seen: dict[str, Any]) -> None:
        def training_step() -> Tensor | None:
            losses = [self._loss(arm, batch, label, seen) for batch in batches]
            if self.end == "raise":
                raise ValueError("an error of the training step")
            if self.end == "nothing":
                return None
            return torch.stack(losses).sum()

        context = contextlib.nullcontext()
        if self.autocast is not None:
            context = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.autocast)
        with context:
            loss = arm.forward_step(training_step, self.counts)
        # what is alive between the forward and the zeroing
        seen["live"] = {k: None if g is None else g.clone() for k, g in arm.gradients().items()}
        if self.steps % self.window == 0 or self.window == 1:
            arm.optimizer.zero_grad(set_to_none=not self.in_place)
        if loss is None:
            return
        seen["loss"] = loss.detach().clone()
        arm.backward(loss / self.window)
        seen["gradients"] = {k: None if g is None else g.clone() for k, g in arm.gradients().items()}
        if "gradients" in self.keep:
            arm.remember([p.grad for p in arm.root.parameters()])
        if "views" in self.keep:
            arm.remember([None if p.grad is None else p.grad[:1] for p in arm.root.parameters()])
        if (self.steps + 1) % self.window == 0 or self.window == 1:
            arm.optimizer.step()

    def _loss(self, arm: Arm, batch: list[Tensor | None], label: Tensor, seen: dict[str, Any]) -> Tensor:
        net = arm.root.net
        if self.peek:
            with torch.no_grad():
                seen.setdefault("peeked", []).append(net(batch[0])["logits"])
        results = net(batch[0], other=batch[1], weight=self.weight)
        assert list(results) == ["logits", "hidden", "best", "nothing"]
        assert results["nothing"] is None
        seen.setdefault("best", []).append(results["best"])
        for key in ("logits", "hidden"):
            seen.setdefault(key, []).append(results[key].detach())
        if "outputs" in self.keep:
            arm.remember(results["hidden"].detach()[1:])
        if "graphs" in self.keep:
            arm.remember(results["logits"])
        label = label[: len(results["logits"])]
        loss = results["logits"].new_zeros((), dtype=torch.float32)
        if "logits" in self.from_results:
            loss = loss + F.cross_entropy(results["logits"].float(), label)
        if "hidden" in self.from_results:
            loss = loss + results["hidden"].float().square().mean()
        if self.residual and batch[0] is not None:
            loss = loss + (results["hidden"][:, :FEATURES].float() + batch[0].float()).square().mean()
        if self.penalty:
            loss = loss + 0.1 * net.last.weight.square().sum()
        return loss

    def _batch(self) -> list[Tensor | None]:
        shape = (self.size, FEATURES)
        values = torch.randn(shape, generator=self.generator)
        other = torch.randn(shape, generator=self.generator)
        if self.layout == "transposed":
            values = values.t().contiguous().t()
        elif self.layout == "strided":
            wide = torch.zeros(self.size, 2 * FEATURES)
            wide[:, ::2] = values
            values = wide[:, ::2]
        elif self.layout == "offset":
            flat = torch.zeros(values.numel() + 1)
            flat[1:] = values.flatten()
            values = flat[1:].view(shape)
        elif self.layout == "expanded":
            values = values[:1].expand(shape)
        if self.trainable_input:
            values.requires_grad_()
        if self.other == "same":
            return [values, values]
        if self.other == "view":
            return [values, values.detach()[:]]
        return [values, other if self.other == "another" else None]

    def _draw_labels(self) -> Tensor:
        return torch.randint(CLASSES, (self.size,), generator=self.generator)

    def _state(self, arm: Arm) -> dict[str, Any]:
        root = arm.root
        return {
            "parameters": {k: p.detach() for k, p in root.named_parameters()},
            "gradients": arm.gradients(),
            "buffers": dict(root.named_buffers()),
            "calls": root.net.calls,
            "attributes": {path: sorted(module.__dict__) for path, module in root.named_modules()},
            "momenta": [arm.optimizer.state.get(p, {}).get("momentum_buffer") for p in root.parameters()],
        }

    # -- what events need ----------------------------------------------------------------------------------------

    def fresh(self, like: Tensor) -> Callable[[], Tensor]:
        """Returns a maker of equal new values, one for each arm."""
        values = torch.randn(like.shape, generator=self.generator, dtype=like.dtype) * 0.3
        return lambda: values.clone()


def _get_random() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


# -- events ------------------------------------------------------------------------------------------------------

Event = Callable[[World, int], None]
EVENTS: dict[str, Event] = {}
WILD = frozenset({"habit"})
"""Events after which a region may stay native for good; not in every sequence."""


def event(function: Event) -> Event:
    EVENTS[function.__name__] = function
    return function


def pick(values: Any, choice: int) -> Any:
    values = list(values)
    return values[choice % len(values)]


def each_net(act: Callable[[Net], None]) -> Event:
    def run(world: World, choice: int) -> None:
        for arm in world.arms:
            act(arm.root.net)

    return run


@event
def nothing(world: World, choice: int) -> None:
    """Steps without an event, so that recordings are made and used."""


@event
def shape(world: World, choice: int) -> None:
    world.size = pick((4, 3, 6, 2), choice)


@event
def layout(world: World, choice: int) -> None:
    world.layout = pick(("plain", "transposed", "strided", "offset", "expanded"), choice)
    if world.layout == "expanded":
        world.trainable_input = False


@event
def second_input(world: World, choice: int) -> None:
    world.other = pick((None, "another", "same", "view"), choice)


@event
def trainable_input(world: World, choice: int) -> None:
    world.trainable_input = not world.trainable_input and world.layout == "plain"


@event
def python_argument(world: World, choice: int) -> None:
    world.weight = pick(VALUES, choice)


@event
def results_used(world: World, choice: int) -> None:
    world.from_results = pick(("logits", "hidden", "logits hidden"), choice)


@event
def freeze(world: World, choice: int) -> None:
    for arm in world.arms:
        parameters = [p for n, p in arm.root.named_parameters() if not n.startswith("net.last")]
        parameter = pick(parameters, choice)
        parameter.requires_grad_(not parameter.requires_grad)


@event
def freeze_most(world: World, choice: int) -> None:
    for arm in world.arms:
        for parameter in arm.root.net.layers.parameters():
            parameter.requires_grad_(choice % 2 == 0)


@event
def forward_hook(world: World, choice: int) -> None:
    for arm in world.arms:
        module = pick(arm.root.net.modules(), choice // 4)
        register = pick(
            (
                module.register_forward_hook,
                module.register_forward_pre_hook,
                module.register_full_backward_hook,
                module.register_full_backward_pre_hook,
            ),
            choice,
        )
        arm.handles.append(register(functools.partial(_note, arm.seen)))


def _note(seen: list[Any], module: nn.Module, *_: Any) -> None:
    seen.append(type(module).__name__)


def _note_gradient(seen: list[Any], parameter: Tensor) -> None:
    assert parameter.grad is not None
    seen.append(parameter.grad.detach().clone())


@event
def parameter_hook(world: World, choice: int) -> None:
    for arm in world.arms:
        parameter = pick([p for p in arm.root.parameters() if p.requires_grad], choice // 2)
        if choice % 2:
            arm.handles.append(parameter.register_hook(lambda g: g * 0.5))
        else:
            # The hooks of one parameter; those of several run in another order (docs/limits.md).
            place = next(i for i, other in enumerate(arm.root.parameters()) if other is parameter)
            see = functools.partial(_note_gradient, arm.seen_gradients.setdefault(place, []))
            arm.handles.append(parameter.register_post_accumulate_grad_hook(see))


@event
def global_hook(world: World, choice: int) -> None:
    register = pick((torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook), choice)
    arms = world.arms

    def note(module: nn.Module, *_: Any) -> None:
        for arm in arms:
            if any(module is other for other in arm.root.modules()):
                arm.seen.append(type(module).__name__)

    arms[0].handles.append(register(note))


@event
def remove_hooks(world: World, choice: int) -> None:
    for arm in world.arms:
        while arm.handles:
            arm.handles.pop().remove()


@event
def attribute(world: World, choice: int) -> None:
    value = pick(VALUES, choice // 3)
    for arm in world.arms:
        target, name = pick(
            ((arm.root.net, "scale"), (arm.root.net.layers[0], "factor"), (arm.root.net.drop, "p")), choice
        )
        setattr(target, name, abs(value) / 4 if name == "p" else value)


@event
def attribute_of_object(world: World, choice: int) -> None:
    for arm in world.arms:
        arm.root.net.layers[0].settings.gain = pick(VALUES, choice)


@event
def inside_container(world: World, choice: int) -> None:
    for arm in world.arms:
        gains = arm.root.net.layers[choice // 3 % 2].gains
        if choice % 3 == 0:
            gains[0] = pick(VALUES, choice)
        elif choice % 3 == 1:
            gains[1]["inner"] = pick(VALUES, choice)
        else:
            gains[1] = {"inner": pick(VALUES, choice)}


@event
def new_attribute(world: World, choice: int) -> None:
    for arm in world.arms:
        if choice % 2:
            arm.root.net.layers[0].bonus = pick(VALUES, choice)
        else:
            arm.root.net.layers[0].__dict__.pop("bonus", None)


@event
def class_attribute(world: World, choice: int) -> None:
    Block.bonus = pick(VALUES, choice)


@event
def global_number(world: World, choice: int) -> None:
    if choice % 3 == 0:
        network.GAIN = pick(VALUES, choice // 3)
    elif choice % 3 == 1:
        network.TABLE["gains"][0] = pick(VALUES, choice // 3)
    else:
        network.TABLE["gains"][1][0] = pick(VALUES, choice // 3)


@event
def global_function(world: World, choice: int) -> None:
    network.ACTIVATION = pick((torch.tanh, torch.relu, F.silu, torch.sigmoid), choice)


@event
def closure_variable(world: World, choice: int) -> None:
    for arm in world.arms:
        arm.root.change_closure(pick(VALUES, choice))


@event
def class_forward(world: World, choice: int) -> None:
    original = world._forward
    Block.forward = (lambda self, inputs: original(self, inputs) * 0.5) if choice % 2 else original  # type: ignore


@event
def instance_forward(world: World, choice: int) -> None:
    for arm in world.arms:
        module = pick((arm.root.net.layers[0], arm.root.net.first), choice // 2)
        if "forward" in module.__dict__:
            del module.__dict__["forward"]
        elif choice % 2:
            forward = type(module).forward
            module.forward = lambda inputs, m=module, f=forward: f(m, inputs) * 2


@event
def buffer_rebound(world: World, choice: int) -> None:
    block = world.native.root.net.layers[0]
    make = world.fresh(block.shift)
    for arm in world.arms:
        arm.root.net.layers[choice % len(arm.root.net.layers)].shift = make()


@event
def buffer_written(world: World, choice: int) -> None:
    make = world.fresh(world.native.root.net.layers[0].shift)
    for arm in world.arms:
        arm.root.net.layers[choice % len(arm.root.net.layers)].shift.copy_(make())


@event
def load_state(world: World, choice: int) -> None:
    state = {k: v.clone() * 0.9 if v.is_floating_point() else v for k, v in world.native.root.state_dict().items()}
    for arm in world.arms:
        assign = choice % 2 == 1
        arm.root.load_state_dict(copy.deepcopy(state), assign=assign)
        if assign:
            for parameter, like in zip(arm.root.parameters(), world.native.root.parameters(), strict=True):
                parameter.requires_grad_(like.requires_grad)
            arm.new_optimizer()


@event
def new_data(world: World, choice: int) -> None:
    parameter = pick(world.native.root.parameters(), choice)
    make = world.fresh(parameter)
    for arm in world.arms:
        pick(arm.root.parameters(), choice).data = make()


@event
def new_layout(world: World, choice: int) -> None:
    for arm in world.arms:
        weight = arm.root.net.layers[0].linear.weight
        weight.data = weight.data.t().contiguous().t()
        weight.grad = None


@event
def parameter_written(world: World, choice: int) -> None:
    for arm in world.arms:
        with torch.no_grad():
            pick(arm.root.parameters(), choice).mul_(0.9)


@event
def parameter_replaced(world: World, choice: int) -> None:
    make = world.fresh(world.native.root.net.last.bias)
    for arm in world.arms:
        arm.root.net.last.bias = nn.Parameter(make())
        if choice % 2:
            arm.new_optimizer()


@event
def tie(world: World, choice: int) -> None:
    for arm in world.arms:
        blocks = arm.root.net.layers
        if blocks[0].linear.weight is blocks[1].linear.weight:
            blocks[1].linear.weight = nn.Parameter(blocks[0].linear.weight.detach().clone())
        else:
            blocks[1].linear.weight = blocks[0].linear.weight
        arm.new_optimizer()


@event
def zeroing(world: World, choice: int) -> None:
    world.in_place = not world.in_place


@event
def accumulation(world: World, choice: int) -> None:
    world.window = pick((1, 2, 3), choice)


@event
def submodule_mode(world: World, choice: int) -> None:
    for arm in world.arms:
        module = pick((arm.root.net.drop, arm.root.net.layers[0].norm, arm.root.net.layers[1], arm.root.net), choice)
        module.train(not module.training)


@event
def all_train(world: World, choice: int) -> None:
    for arm in world.arms:
        arm.root.train()


@event
def validation(world: World, choice: int) -> None:
    values = torch.randn(pick((4, 5), choice), FEATURES, generator=world.generator)
    found = []
    for arm in world.arms:
        modes = [module.training for module in arm.root.modules()]
        with arm.own_random(), torch.inference_mode() if choice % 2 else torch.no_grad():
            if choice % 4 < 2:
                arm.root.eval()
            found.append(_outcome(lambda net=arm.root.net: net(values.clone())["logits"]))
        for module, mode in zip(arm.root.modules(), modes, strict=True):
            module.training = mode
    assert_same(*found, "validation")


def _outcome(run: Callable[[], Any]) -> Any:
    """Returns what a call gives or raises; both arms must agree on either."""
    try:
        return run()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@event
def peeking(world: World, choice: int) -> None:
    world.peek = not world.peek


@event
def exception(world: World, choice: int) -> None:
    world.end = "raise"


@event
def no_loss(world: World, choice: int) -> None:
    world.end = "nothing"


@event
def deep_copy(world: World, choice: int) -> None:
    found = []
    values = torch.randn(4, FEATURES, generator=world.generator)
    for arm in world.arms:
        made = copy.deepcopy(arm.root.net)

        def differentiate(made: Net = made) -> Any:
            loss = made(values.clone())["logits"].sum()
            loss.backward()
            return loss.detach(), {k: p.grad for k, p in made.named_parameters()}, dict(made.state_dict())

        with arm.own_random():
            found.append(_outcome(differentiate))
    assert_same(*found, "copy")


@event
def reseed(world: World, choice: int) -> None:
    for arm in world.arms:
        with arm.own_random():
            torch.manual_seed(choice)
            random.seed(choice)
            np.random.seed(choice % 2**31)


@event
def learning_rate(world: World, choice: int) -> None:
    for arm in world.arms:
        arm.optimizer.param_groups[0]["lr"] = pick((0.05, 0.01, 0.0, 0.1), choice)


@event
def calls(world: World, choice: int) -> None:
    world.calls = pick((1, 2, 3), choice)


@event
def penalty(world: World, choice: int) -> None:
    world.penalty = not world.penalty


@event
def residual(world: World, choice: int) -> None:
    world.residual = not world.residual


@event
def layer_replaced(world: World, choice: int) -> None:
    for arm in world.arms:
        torch_state = torch.get_rng_state()
        torch.manual_seed(choice)
        if choice % 4 == 0:
            arm.root.net.layers[0] = Block()
        elif choice % 4 == 1:
            arm.root.net.first = nn.Linear(FEATURES, WIDTH)
        elif choice % 4 == 2:
            arm.root.net.last = nn.Linear(WIDTH, CLASSES, bias=True)
        else:
            arm.root.net.drop = nn.Dropout(0.5) if choice % 8 < 4 else nn.Identity()
        torch.set_rng_state(torch_state)
        arm.new_optimizer()


@event
def layers_swapped(world: World, choice: int) -> None:
    for arm in world.arms:
        first, second = arm.root.net.layers[0], arm.root.net.layers[1]
        arm.root.net.layers[0], arm.root.net.layers[1] = second, first


@event
def layer_shadowed(world: World, choice: int) -> None:
    """The members stay, their roles change."""
    for arm in world.arms:
        arm.root.net.last, arm.root.net.spare = arm.root.net.spare, arm.root.net.last


@event
def layer_count(world: World, choice: int) -> None:
    for arm in world.arms:
        layers = arm.root.net.layers
        if len(layers) == 2:
            torch_state = torch.get_rng_state()
            torch.manual_seed(choice)
            layers.append(Block())
            torch.set_rng_state(torch_state)
        else:
            del layers[2]
        arm.new_optimizer()


@event
def network_replaced(world: World, choice: int) -> None:
    for arm in world.arms:
        torch_state = torch.get_rng_state()
        torch.manual_seed(choice)
        arm.root.net = Net(arm.root.net.closure)
        torch.set_rng_state(torch_state)
        arm.new_optimizer()


@event
def keeping(world: World, choice: int) -> None:
    world.keep ^= {pick(("gradients", "views", "outputs", "graphs"), choice)}


@event
def let_go(world: World, choice: int) -> None:
    world.keep.clear()
    for arm in world.arms:
        arm.kept.clear()


@event
def own_gradient(world: World, choice: int) -> None:
    parameter = pick(world.native.root.parameters(), choice // 3)
    make = world.fresh(parameter)
    for arm in world.arms:
        target = pick(arm.root.parameters(), choice // 3)
        if choice % 3 == 0:
            target.grad = make()
        elif choice % 3 == 1:
            target.grad = None
        elif target.grad is not None:
            target.grad.mul_(0.5)


@event
def own_gradients(world: World, choice: int) -> None:
    for arm in world.arms:
        for parameter in arm.root.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


@event
def habit(world: World, choice: int) -> None:
    for arm in world.arms:
        habits = (None, "reads", "draws", "counts", "writes", "rebinds", "raises", "prunes")
        arm.root.net.habit = pick(habits, choice)


@event
def autocast(world: World, choice: int) -> None:
    world.autocast = pick((None, True, False), choice)


@event
def default_dtype(world: World, choice: int) -> None:
    torch.set_default_dtype(pick((torch.float32, torch.float64), choice))


@event
def deterministic(world: World, choice: int) -> None:
    torch.use_deterministic_algorithms(choice % 2 == 1)


@event
def last_batches(world: World, choice: int) -> None:
    world.counts = not world.counts


@event
def audit(world: World, choice: int) -> None:
    assert world.replay.runner is not None
    world.replay.runner.request_audit()


@event
def signed_zero(world: World, choice: int) -> None:
    for arm in world.arms:
        with torch.no_grad():
            arm.root.net.last.weight.copy_(torch.zeros(CLASSES, WIDTH) * (-1.0 if choice % 2 else 1.0))


@event
def shared_modules(world: World, choice: int) -> None:
    """One block at both places, or two of them."""
    for arm in world.arms:
        layers = arm.root.net.layers
        layers[1] = layers[0] if layers[0] is not layers[1] else copy.deepcopy(layers[0])
        arm.new_optimizer()
