# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The strategy: the only place that meets the Trainer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_replay import compat
from lightning_replay.arguments import (
    argument_message,
    as_device,
    backend_message,
    check_backend,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_names,
    check_text,
    named_modules,
)
from lightning_replay.compat import seams
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.cuda import CudaGraphBackend
from lightning_replay.engine.interposition import Shadowed, Standing
from lightning_replay.engine.tape import TapeBackend
from lightning_replay.errors import ContractError, NotReplayedError, warn
from lightning_replay.fit import find_fit_reason
from lightning_replay.norm import NormClipper
from lightning_replay.precision import asks_for_clipping, attach, detach
from lightning_replay.reasons import Finding, Reason
from lightning_replay.report import RecordingStats, ReplayReport
from lightning_replay.runner import Runner, StepAction
from lightning_replay.whole_step import WholeStep, is_outsider, watched_trainer

_RECORDED = ("_clipper", "_runner", "_whole", "_whole_runner", "_ran", "_log")
_FROM_CONNECTOR = ("_accelerator", "_precision_plugin", "_checkpoint_io", "_root_device")


class ReplayStrategy(SingleDeviceStrategy):
    """Trains on a single device and replays what a training step launches as CUDA graphs, bit for bit the same.

    Use it as `Trainer(strategy=ReplayStrategy())`, or `strategy="replay"` once `lightning_replay` is imported. Whatever
    cannot be replayed exactly runs as it would with Lightning's own strategy; `report()` says what and why.

    Args:
        device: The device, such as "cuda:1" or 1. None takes the one that the Trainer chose.
        scope: What is recorded as one unit. "network": the calls of modules made by `training_step`. "step": all of
            `training_step`, with loss and logging; what cannot be recorded so is recorded as with "network", and
            reported. "auto": the same, without a warning.
        modules: Dotted names of the modules whose calls are recorded, such as ["net"]; "self" is the LightningModule's
            own forward. None discovers the outermost calls.
        warmup_steps: Native steps with a signature before it is recorded; at least 1.
        max_recordings: Signatures (shapes, dtypes, modes) recorded for each module; more run natively. At least 1.
        certify: Compare a trial replay of a real batch with the native result before a recording is used. "bitwise"
            demands equal bits; "auto" accepts native's own spread where native does not repeat itself; "off" trusts.
        capture_gradient_norm: Record clipping by norm too. False leaves the precision plugin untouched.
        on_native: What happens when a step runs natively for a reason other than warm-up: "warn" once a reason, raise
            an "error", or "ignore".
        backend: "auto" (CUDA graphs on a CUDA device, native elsewhere), "cuda", or "tape", a slow stand-in that runs
            everything but the speed-up on any device.
        accelerator: As in Lightning's strategies.
        checkpoint_io: As in Lightning's strategies.
        precision_plugin: As in Lightning's strategies.

    Raises:
        ValueError: If an argument has a value that is not accepted.
        TypeError: If an argument has a type that is not accepted.
    """

    strategy_name = "replay"

    def __init__(
        self,
        device: int | str | torch.device | None = None,
        *,
        scope: Literal["network", "step", "auto"] = "network",
        modules: Sequence[str] | None = None,
        warmup_steps: int = 3,
        max_recordings: int = 8,
        certify: Literal["auto", "bitwise", "off"] = "auto",
        capture_gradient_norm: bool = True,
        on_native: Literal["warn", "error", "ignore"] = "warn",
        backend: Literal["auto", "cuda", "tape"] = "auto",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_choice("scope", scope, ("network", "step", "auto"))
        check_choice("certify", certify, ("auto", "bitwise", "off"))
        check_choice("on_native", on_native, ("warn", "error", "ignore"))
        check_backend(backend)
        check_count("warmup_steps", warmup_steps)
        check_count("max_recordings", max_recordings)
        check_names(modules)
        check_flag("capture_gradient_norm", capture_gradient_norm)
        check_kind("accelerator", accelerator, Accelerator)
        check_kind("checkpoint_io", checkpoint_io, CheckpointIO)
        check_kind("precision_plugin", precision_plugin, Precision)
        self._explicit_device = None if device is None else as_device(device)
        super().__init__(
            device=self._explicit_device or torch.device("cpu"),
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._given_accelerator = accelerator
        self._given_precision = precision_plugin
        self._given_checkpoint_io = checkpoint_io
        self._scope = scope
        self._modules = None if modules is None else tuple(modules)
        self._warmup_steps = warmup_steps
        self._max_recordings = max_recordings
        self._certify: Literal["auto", "bitwise", "off"] = certify
        self._on_native = on_native
        self._backend: Literal["auto", "cuda", "tape"] = backend
        self._capture_gradient_norm = capture_gradient_norm
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Sets what an object has that has not trained yet."""
        self._clipper: NormClipper | None = None
        if self._capture_gradient_norm:
            # Without replayed steps gradients never lie still, and are worth a recording on copies only then.
            patience = self._warmup_steps + 5
            self._clipper = NormClipper(self._backend, patience, self._meet_norm, self._expecting_references)
        self._norm_finding: Finding | None = None
        self._runner: Runner | None = None
        self._whole: WholeStep | None = None
        self._whole_runner: Runner | None = None
        self._ran: Runner | None = None
        self._log: Callable[..., None] | None = None
        self._fit_finding: Finding | None = None
        self._fit_checked = False
        self._steps_aside = 0
        self._aside: Finding | None = None
        self._warned: set[Reason] = set()
        self._last_action: StepAction = "native"
        self._reset_counts()

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is recorded and counted: a copy, or what is read from a pickle, begins anew."""
        return {name: value for name, value in super().__getstate__().items() if name not in _RECORDED}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_anew()

    # -- what the Trainer sets -----------------------------------------------------------------------------------

    _kept: Mapping[str, Any] = MappingProxyType({})
    """What the last Trainer's connector had set, until that Trainer runs again or another one sets its own."""

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        """The accelerator; of all that is kept here, a new Trainer sets it first."""
        kept: Accelerator | None = self._kept.get("_accelerator", self._accelerator)
        return kept

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._kept = {}
        self._accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> Precision:
        """The precision plugin."""
        kept: Precision | None = self._kept.get("_precision_plugin", self._precision_plugin)
        return Precision() if kept is None else kept

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints."""
        kept: CheckpointIO | None = self._kept.get("_checkpoint_io")
        return super().checkpoint_io if kept is None else kept

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def connect(self, model: LightningModule) -> None:
        """Begins a run of the Trainer, perhaps not its first."""
        vars(self).update(self._kept)
        self._kept = {}
        super().connect(model)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Always None: Lightning assigns the chosen devices here, and must be free to do so for each Trainer."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if not devices:
            return
        if len(devices) > 1:
            raise ValueError(
                argument_message(
                    "devices",
                    len(devices),
                    "devices=1 or a list of one index",
                    "pass devices=1 or devices=[0] to the Trainer, which takes all devices where none are named",
                )
            )
        if self._explicit_device is None:
            self._root_device = devices[0]
        elif self._explicit_device.type != devices[0].type:
            raise ValueError(
                argument_message(
                    "device",
                    str(self._explicit_device),
                    f"a {devices[0].type} device, as the Trainer's accelerator",
                    "leave device out, or pass the matching accelerator to the Trainer",
                )
            )

    @property
    def num_nodes(self) -> int:
        """The number of nodes, always 1; Lightning assigns the Trainer's value here."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count != 1:
            raise ValueError(argument_message("num_nodes", count, "1", "train on one node, or use a DDP strategy"))

    @property
    def _layer_sync(self) -> None:
        return None

    @_layer_sync.setter
    def _layer_sync(self, value: object) -> None:
        if value is not None:
            raise ValueError(
                argument_message(
                    "sync_batchnorm", True, "False", "with a single device there is nothing to synchronize"
                )
            )

    # -- life of a fit -------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        self._drop_recordings()
        self._fit_checked = False
        self._warned.clear()
        if self._clipper is not None and trainer.state.fn == TrainerFn.FITTING:
            self._norm_finding = attach(self.precision_plugin, self._clipper)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        self._drop_recordings()
        try:
            super().teardown()
        finally:
            self._release_norm()
        self._fit_finding = None
        self._fit_checked = False
        self._steps_aside = 0
        # Lightning refuses a strategy that still carries what an earlier Trainer's connector put on it; but that
        # Trainer may save a checkpoint, or run again.
        self._kept = {name: getattr(self, name) for name in _FROM_CONNECTOR}
        self._accelerator = self._given_accelerator
        self._precision_plugin = self._given_precision
        self._checkpoint_io = self._given_checkpoint_io
        if self._explicit_device is None:
            self._root_device = torch.device("cpu")

    def _release_norm(self) -> None:
        """Gives the precision plugin back as it was."""
        detach(self.precision_plugin)
        finding, self._norm_finding = self._norm_finding, None
        if finding is not None and self._clipper is not None and asks_for_clipping(self.lightning_module):
            self._meet_norm(finding)

    def _drop_recordings(self) -> None:
        """Gives all recordings back, keeping what is reported of them."""
        for runner in self._runners():
            self._take_counts(runner)
            runner.close()
        self._runner = self._whole_runner = self._ran = self._whole = self._log = None

    def _runners(self) -> list[Runner]:
        """Returns the runners of this fit: of whole steps, and of networks."""
        return [runner for runner in (self._whole_runner, self._runner) if runner is not None]

    def _start(self) -> Runner | None:
        """Checks the fit at its first step, and makes the runner unless the whole fit is native."""
        if not self._fit_checked:
            self._fit_checked = True
            module = self._module()
            self._fit_finding = (
                self._device_finding() or _contract_finding(module.trainer) or find_fit_reason(module.trainer, module)
            )
            if self._fit_finding is None:
                self._runner = self._make_runner(self._meet, watching=self._watching_network)
                for name, named in named_modules(module, self._modules or ()).items():
                    self._runner.add_region(name, named)
                if self._scope != "network":
                    on_finding = self._meet if self._scope == "step" else self._count
                    self._whole_runner = self._make_runner(on_finding)
                    self._whole = WholeStep(module, self._whole_runner, super().training_step, on_finding)
        return self._runner

    def _make_runner(self, on_finding: Callable[[Finding], None], **options: Any) -> Runner:
        return Runner(
            self._make_backend(),
            warmup_steps=self._warmup_steps,
            max_recordings=self._max_recordings,
            certify=self._certify,
            on_finding=on_finding,
            root=self._module(),
            recordings=self._recordings,
            is_outsider=is_outsider,
            **options,
        )

    def _watching_network(self, refuse: Callable[[Finding], None]) -> AbstractContextManager[None]:
        """Surrounds an observed call of a network: one that reads the Trainer depends on more than its modules."""
        return watched_trainer(self._module(), refuse)

    def _device_finding(self) -> Finding | None:
        if self._backend == "tape" or self.root_device.type == "cuda":
            return None
        if self._backend == "cuda":
            raise ValueError(backend_message(self.root_device))
        return Finding(Reason.NO_CUDA, "Trainer(accelerator=...)", "a CUDA device", f"{self.root_device}")

    def _make_backend(self) -> GraphBackend:
        if self._backend == "tape":
            return TapeBackend(self.root_device)
        return CudaGraphBackend(self.root_device)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- steps ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._start()
        self._steps_total += 1
        self._last_action = "native"
        step = partial(super().training_step, *args, **kwargs)
        if runner is None:
            assert self._fit_finding is not None
            self._meet(self._fit_finding)
            return step()
        aside = self._aside if self._steps_aside > 0 else None
        if self._clipper is not None:
            self._clipper.aside = aside
        if aside is not None:
            self._steps_aside -= 1
            self._ran = None
            self._meet(aside)
            return step()
        counts = not seams.is_last_of_several(self._module().trainer)
        networks = partial(self._run_networks, runner, step, counts)
        if self._whole is None or kwargs:
            result = networks()
        else:
            whole, result = self._whole.run_step(args, counts, networks)
            if whole:
                self._ran = self._whole_runner
        assert self._ran is not None
        self._last_action = self._ran.last_action
        self._steps_replayed += self._last_action == "replay"
        self._steps_partial += self._last_action == "replay" and self._ran.partial
        return result

    def _run_networks(self, runner: Runner, step: Callable[[], Any], counts: bool) -> Any:
        """Runs a step in which the calls of networks are replayed."""
        self._ran = runner
        module = self._module()
        if self._log is None:  # one for the fit: a region that is the module itself is guarded against another one
            self._log = self._watched_log(runner, module)
        with Shadowed(module, "log", self._log):
            result = runner.run_step(step, counts) if runner.regions else runner.discover(module, step)
        if not runner.called:
            names = " or ".join(region.name for region in runner.regions) or "a module with parameters"
            where = f"{type(module).__name__}.training_step"
            self._meet(Finding(Reason.NO_REGION, where, f"a call of {names}", "no such call"))
        return result

    def _watched_log(self, runner: Runner, module: LightningModule) -> Callable[..., None]:
        """Returns `module.log`, refusing the region whose own code calls it."""
        log = module.log

        def watched(*args: Any, **kwargs: Any) -> None:
            region = runner.inside_region
            if region is not None and region.refusal is None:
                name = repr(args[0] if args else kwargs.get("name"))
                runner.refuse(region, Finding(Reason.LOG_IN_REGION, region.name, "no self.log in it", f"logs {name}"))
            log(*args, **kwargs)

        return Standing(module, "log", watched, vars(module).get("log"))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._ran is None:
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            for runner in self._runners():
                runner.trim()
            return closure_loss
        # The body of Lightning's Strategy.backward (the same in all inspected releases), with ours around autograd.
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._ran.backward(closure_loss):
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finding = self._norm_finding
        if finding is not None and self._clipper is not None and asks_for_clipping(self.lightning_module):
            self._clipper.count(finding)
        return result

    def _meet(self, finding: Finding) -> None:
        """Acts on a finding: counts it, and warns or raises as asked."""
        self._count(finding)
        if finding.reason.is_harmless or self._on_native == "ignore":
            return
        if self._on_native == "error":
            raise (ContractError if finding.reason is Reason.UNKNOWN_CONTRACT else NotReplayedError)(finding)
        self._warn_once(finding)

    def _warn_once(self, finding: Finding) -> None:
        if finding.reason not in self._warned:
            self._warned.add(finding.reason)
            warn(finding)

    def _count(self, finding: Finding) -> None:
        """Counts a finding that nobody needs to hear of while training."""
        self._reasons[finding.reason] += 1
        self._messages.setdefault(finding.reason, str(finding))

    def _expecting_references(self, owner: object) -> AbstractContextManager[Any]:
        """Lets a recording of the gradient norm refer to gradient buffers."""
        stack = ExitStack()
        for runner in self._runners():
            stack.enter_context(runner.expecting_references(owner))
        return stack

    def _meet_norm(self, finding: Finding) -> None:
        """Acts on a finding for which clipping stays native: no step is native for it, so it is no error."""
        assert self._clipper is not None
        self._clipper.findings.setdefault(finding.reason, finding)
        if self._on_native != "ignore" and not finding.reason.is_harmless:
            self._warn_once(finding)

    # -- for the user --------------------------------------------------------------------------------------------

    @property
    def last_action(self) -> StepAction:
        """What the last training step was, "native", "record" (trained natively, then recorded) or "replay"."""
        return self._last_action

    @property
    def last_gradient_norm(self) -> Tensor | None:
        """The total norm that the last clipping by norm found, before scaling.

        None before the first, and with `capture_gradient_norm=False`. A scalar on the training device: reading it
        here, or giving it to `self.log`, does not wait for the device.
        """
        return None if self._clipper is None else self._clipper.last_norm

    @property
    def uses_tape(self) -> bool:
        """Tells whether the slow stand-in runs, which saves nothing."""
        return self._backend == "tape"

    @property
    def last_watched(self) -> bool:
        """Tells whether calls of the last training step were observed: its duration is not that of a native step."""
        return self._ran is not None and self._ran.watched

    @property
    def recordings(self) -> tuple[RecordingStats, ...]:
        """What is known of every recording in the order in which they were made, those of earlier fits included."""
        return tuple(self._recordings)

    def stand_aside(self, steps: int, finding: Finding) -> None:
        """Leaves the next training steps to Lightning: they are native, and nothing observes them.

        Of several who ask for it, the one who asks for most steps gets them.

        Args:
            steps: How many; what is left of them when the fit ends is forgotten.
            finding: Why, for the report.
        """
        if steps > self._steps_aside:
            self._steps_aside, self._aside = steps, finding

    def invalidate(self, reason: str) -> None:
        """Drops all recordings. They are made again once their signatures have been seen `warmup_steps` times.

        Args:
            reason: Why, in words, for the report.

        Raises:
            TypeError: If the reason is not a string.
        """
        check_text("reason", reason, owner="ReplayStrategy.invalidate")
        finding = Finding(Reason.INVALIDATED, "ReplayStrategy.invalidate", "", reason)
        for runner in self._runners():
            runner.invalidate(finding)
        self._meet(finding)

    def audit(self) -> None:
        """Makes the next step native, to compare its operations with the recorded ones.

        Audits also happen by themselves, ever more rarely. One that finds a difference (a global, a closure or another
        object that changed a number under a recording) retires the recording and reports the steps concerned. Before
        the first training step there is nothing to compare, and nothing happens.
        """
        for runner in self._runners():
            runner.request_audit()

    def report(self) -> ReplayReport:
        """Returns the record of all training steps since this object was made."""
        passes = [runner.gradients for runner in self._runners()]
        clipper = self._clipper
        return ReplayReport(
            steps_total=self._steps_total,
            steps_replayed=self._steps_replayed,
            steps_native=self._steps_total - self._steps_replayed,
            reasons=dict(self._reasons),
            recordings=self.recordings,
            norm_replays=0 if clipper is None else clipper.replays,
            norm_copied=0 if clipper is None else clipper.copied,
            norm_native={} if clipper is None else dict(clipper.native),
            gradients_published=self._published + sum(done.published for done in passes),
            gradients_added=self._added + sum(done.added for done in passes),
            gradients_copied=self._copied + sum(done.copied for done in passes),
            messages=dict(self._messages),
            norm_messages=self._norm_messages(),
            steps_partial=self._steps_partial,
        )

    def _norm_messages(self) -> dict[Reason, str]:
        """Returns the clipper's messages. That nothing is clipped is no news to who did not ask for it."""
        messages = {} if self._clipper is None else self._clipper.messages
        return {reason: message for reason, message in messages.items() if reason is not Reason.NORM_NO_LIMIT}

    def _reset_counts(self) -> None:
        self._steps_total = 0
        self._steps_replayed = 0
        self._steps_partial = 0
        self._published = 0
        self._added = 0
        self._copied = 0
        self._reasons: Counter[Reason] = Counter()
        self._messages: dict[Reason, str] = {}
        self._recordings: list[RecordingStats] = []

    def _take_counts(self, runner: Runner) -> None:
        self._published += runner.gradients.published
        self._added += runner.gradients.added
        self._copied += runner.gradients.copied


def _contract_finding(trainer: Trainer) -> Finding | None:
    verdict = compat.check(trainer)
    if verdict.known:
        return None
    return Finding(Reason.UNKNOWN_CONTRACT, verdict.where, verdict.expected, verdict.actual)
