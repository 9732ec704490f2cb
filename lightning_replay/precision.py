# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Precision plugins that clip the gradient norm from a recording."""

import contextlib
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_replay import compat
from lightning_replay.arguments import argument_message, backend_message, check_backend, check_choice, check_kind
from lightning_replay.compat import seams
from lightning_replay.guards.gradients import WHERE
from lightning_replay.norm import BackendName, NormClipper
from lightning_replay.reasons import Finding, Reason

_NATIVE: dict[str, type[Precision]] = {
    "32-true": Precision,
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": HalfPrecision,
    "16-true": HalfPrecision,
    "64-true": DoublePrecision,
}
_MIXED = ("bf16-mixed", "16-mixed")
_ATTRIBUTE = "_replay_clipper"
_COMPOSED: dict[tuple[type, type], type[Precision]] = {}

if TYPE_CHECKING:
    _Base = Precision
else:
    _Base = object


class ReplayClipMixin(_Base):
    """What a precision plugin gains: clipping by norm from a recording. Everything else stays its own."""

    _replay_clipper: NormClipper

    @property
    def last_gradient_norm(self) -> Tensor | None:
        """The total norm that the last clipping by norm found, before scaling; None before the first.

        A scalar on the training device: reading it here, or giving it to `self.log`, does not wait for the device.
        """
        return self._replay_clipper.last_norm

    @property
    def norm_replays(self) -> int:
        """How often clipping was replayed."""
        return self._replay_clipper.replays

    @property
    def norm_native(self) -> dict[Reason, int]:
        """How often clipping was native, by reason."""
        return dict(self._replay_clipper.native)

    @property
    def norm_messages(self) -> dict[Reason, str]:
        """For each of these reasons, the message of its first finding."""
        return self._replay_clipper.messages

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Starts a fit with nothing recorded."""
        self._replay_clipper.begin()
        verdict = compat.check()
        if not verdict.known:
            finding = Finding(Reason.UNKNOWN_CONTRACT, verdict.where, verdict.expected, verdict.actual)
            self._replay_clipper.refuse(finding, say=False)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own ones
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Steps as Lightning does, and counts a step whose clipping never came here."""
        clipper = self._replay_clipper
        before = clipper.arrivals
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if clipper.arrivals == before and (finding := _find_bypass(model)) is not None:
            clipper.count(finding)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips by norm as Lightning does, from the recording if there is one."""
        clipper = self._replay_clipper
        parameters = list(self.main_params(optimizer))
        refusal = clipper.refusal
        unknown = refusal is not None and refusal.reason is Reason.UNKNOWN_CONTRACT
        if parameters and not unknown:
            clipper.clip(parameters, clip_val)
            return
        if unknown and refusal is not None:
            clipper.count(refusal)
        super().clip_grad_by_norm(optimizer, clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips by value as Lightning does, and counts it."""
        self._replay_clipper.count(Finding(Reason.NORM_VALUE, "Precision.clip_grad_by_value", "norm", "value"))
        super().clip_grad_by_value(optimizer, clip_val)

    @override
    def teardown(self) -> None:
        """Gives the recordings back."""
        self._replay_clipper.end()
        super().teardown()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles as what it was made of; what a strategy attached stays behind."""
        made_by, native = type(self)._replay_parts  # type: ignore[attr-defined]
        state = dict(self.__dict__)
        if made_by is ReplayClipMixin:
            del state[_ATTRIBUTE]
            return _restore, (native, None), state
        state[_ATTRIBUTE] = copy(self._replay_clipper.previous or self._replay_clipper)
        return _restore, (native, made_by), state


def _restore(native: type[Precision], made_by: type | None) -> Precision:
    kind = native if made_by is None else _compose(made_by, native)
    return object.__new__(kind)


def _compose(first: type, native: type[Precision]) -> type[Precision]:
    """Returns a class with the methods of both under the name of the native one, which checkpoints key on."""
    if (known := _COMPOSED.get((first, native))) is not None:
        return known
    bases = (first,) if issubclass(first, native) else (first, native)
    names = {"__qualname__": native.__qualname__, "__module__": native.__module__, "_replay_parts": (first, native)}
    made = cast("type[Precision]", type(native.__name__, bases, {"__doc__": native.__doc__, **names}))
    return _COMPOSED.setdefault((first, native), made)


class ReplayPrecision(ReplayClipMixin, Precision):
    """One of Lightning's precision plugins, which clips the gradient norm from a recording.

    Use it as `Trainer(plugins=[ReplayPrecision("bf16-mixed")])` with any single-device strategy. `ReplayStrategy` does
    the same to whatever plugin its Trainer has. An object made here is an instance of Lightning's class too (for
    example `MixedPrecision`), carries its name, and reads and writes its checkpoints.

    Costs: a copy of all gradients if they lie elsewhere in each step. Native steps mostly give them the same memory
    again.

    Args:
        precision: As `Trainer(precision=...)` takes it.
        device: For the "-mixed" ones, the device type of autocast and scaler; None takes "cuda" where there is one.
        scaler: A gradient scaler for "16-mixed".
        backend: "auto" (CUDA graphs on a CUDA device, native elsewhere), "cuda", or "tape", a slow stand-in for tests.

    Raises:
        ValueError: If an argument has a value that is not accepted.
        TypeError: If an argument has a type that is not accepted.
    """

    def __new__(cls, precision: str = "32-true", *args: Any, **kwargs: Any) -> "ReplayPrecision":
        """Makes an instance of Lightning's class for this precision as well."""
        check_choice("precision", precision, tuple(_NATIVE), owner="ReplayPrecision")
        return cast(ReplayPrecision, object.__new__(_compose(cls, _NATIVE[precision])))

    def __init__(
        self,
        precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] = "32-true",
        *,
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        backend: BackendName = "auto",
    ) -> None:
        check_backend(backend, owner="ReplayPrecision")
        check_kind("scaler", scaler, torch.amp.GradScaler, owner="ReplayPrecision")
        for name, given, for_those in (("device", device, _MIXED), ("scaler", scaler, ("16-mixed",))):
            if given is not None and precision not in for_those:
                accepted = f"None with precision={precision!r}"
                cure = f"leave it out, or use precision={' or '.join(map(repr, for_those))}"
                raise ValueError(argument_message(name, given, accepted, cure, "ReplayPrecision"))
        native: Any = super()
        if precision in _MIXED:
            if device is None:
                device = "cuda" if torch.cuda.is_available() else "cpu"
            _check_device_type(device)
            native.__init__(precision, device, scaler)
        elif precision in ("bf16-true", "16-true"):
            native.__init__(precision)
        else:
            native.__init__()
        self._replay_clipper = NormClipper(backend)

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Starts a fit with nothing recorded.

        Raises:
            ValueError: If CUDA graphs were asked for, and the model is on another device.
        """
        device = next((parameter.device for parameter in model.parameters()), None)
        if self._replay_clipper.backend == "cuda" and device is not None and device.type != "cuda":
            raise ValueError(backend_message(device, owner="ReplayPrecision"))
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def __repr__(self) -> str:
        """Names what was made: the class goes by the name of Lightning's, which checkpoints key on."""
        made_by, _ = type(self)._replay_parts  # type: ignore[attr-defined]
        return f"{made_by.__name__}({self.precision!r})"


def _check_device_type(device: object) -> None:
    """Raises ValueError unless autocast knows a type of device."""
    with contextlib.suppress(RuntimeError):
        if isinstance(device, str) and device.isalnum() and torch.amp.is_autocast_available(device):
            return
    cure = "pass the type of the device that trains, or leave it out"
    raise ValueError(argument_message("device", device, 'a type of device such as "cuda"', cure, "ReplayPrecision"))


def attach(plugin: Precision, clipper: NormClipper) -> Finding | None:
    """Makes a plugin clip with a clipper until `detach`.

    Args:
        plugin: The plugin of a Trainer.
        clipper: The clipper.

    Returns:
        Why the plugin was left as it is: it clips in a way of its own.
    """
    if isinstance(plugin, ReplayClipMixin):
        clipper.begin()  # whatever raises before the plugin does that, no earlier fit is counted once more
        clipper.previous = plugin._replay_clipper
        plugin._replay_clipper = clipper
        return None
    kind = type(plugin)
    for name in ("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients", "main_params"):
        owner = next(owner for owner in kind.__mro__ if name in vars(owner))
        if not owner.__module__.startswith("lightning.") or name in vars(plugin):
            actual = f"one of {owner.__module__}.{owner.__qualname__}"
            return Finding(Reason.NORM_PRECISION, f"{kind.__qualname__}.{name}", "Lightning's own", actual)
    if kind.clip_grad_by_norm is not Precision.clip_grad_by_norm:
        return Finding(Reason.NORM_PRECISION, f"{kind.__qualname__}.clip_grad_by_norm", WHERE, "another")
    try:
        plugin.__class__ = _compose(ReplayClipMixin, kind)
    except TypeError as error:  # a class with slots, or made by another metaclass
        return Finding(Reason.NORM_PRECISION, kind.__qualname__, "an ordinary class", str(error))
    plugin._replay_clipper = clipper  # type: ignore[attr-defined]
    return None


def detach(plugin: Precision) -> None:
    """Makes a plugin what it was before `attach`."""
    clipper = vars(plugin).get(_ATTRIBUTE)
    if clipper is None:
        return
    if clipper.previous is not None:
        clipper.previous.take(clipper)
        vars(plugin)[_ATTRIBUTE] = clipper.previous
        clipper.previous = None
    elif type(plugin)._replay_parts[0] is ReplayClipMixin:  # type: ignore[attr-defined]
        plugin.__class__ = type(plugin)._replay_parts[1]  # type: ignore[attr-defined]
        delattr(plugin, _ATTRIBUTE)


def _find_bypass(model: LightningModule) -> Finding | None:
    """Finds why the clipping of a step never came to the plugin: there was none, or an override did it."""
    if not model.automatic_optimization:
        return None
    if not asks_for_clipping(model):
        limit = repr(model.trainer.gradient_clip_val)
        return Finding(Reason.NORM_NO_LIMIT, "Trainer(gradient_clip_val=...)", "a limit above 0", limit)
    if not seams.has_own_hook(model, "configure_gradient_clipping", LightningModule):
        return None
    where = f"{type(model).__name__}.configure_gradient_clipping"
    return Finding(Reason.NORM_OVERRIDDEN, where, "a call of self.clip_gradients", "none")


def asks_for_clipping(model: LightningModule | None) -> bool:
    """Tells whether the Trainer of a model was told to clip."""
    try:
        return model is not None and (model.trainer.gradient_clip_val or 0) > 0
    except RuntimeError:  # it has left its Trainer
        return False
