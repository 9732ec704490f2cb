# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Decide what happens to a call of a region. Deciding knows no device; doing is the runner's part."""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RNNBase

from lightning_replay.engine.backend import Pool
from lightning_replay.engine.layout import has_memory
from lightning_replay.engine.modes import Modes, current_modes
from lightning_replay.engine.reads import Reads
from lightning_replay.engine.recording import Recording
from lightning_replay.gradients import GradientBuffers, Publication
from lightning_replay.guards.module import (
    IsOutsider,
    ModuleState,
    find_hidden_state,
    find_hooks,
    find_scripted,
    is_moving,
    join,
    recurrent_networks,
)
from lightning_replay.guards.parameters import with_line
from lightning_replay.guards.signature import Arguments, check_input_aliases, check_modes, read_arguments
from lightning_replay.inspection import Trace
from lightning_replay.reasons import Effect, Finding, Reason
from lightning_replay.report import RecordingStats

REMEMBERED_SIGNATURES = 256
"""Signatures counted but not recorded that a slot remembers: enough for bucketed shapes, bounded for random ones."""

PAYBACK_REPLAYS = 20
"""Replays after which a recording counts as worth its making; retiring it earlier is a strike."""

UNSETTLED_CHANGES = 5
"""Changes before anything was recorded that count as one strike."""

MAX_NEW_SIGNATURES = 20
"""Signatures in a row that were never seen before, after which a region is no longer observed until one repeats."""

MAX_ATTEMPTS = 3
"""Samples of a signature whose backward never came, after which they are taken ever more rarely."""

MAX_STRIKES = 3
"""Strikes after which a region stays native: it changes faster than recordings pay."""


EVICTION_AGE = 100
"""Steps without use after which a recording may give way to a new signature."""

FIRST_AUDIT = 100
"""Replays before the first audit of a recording; doubled after each audit that finds nothing."""

LAST_AUDIT_INTERVAL = 10_000
"""The most replays between two audits: at a native step ten times slower, an audit costs a thousandth."""


class Action(Enum):
    """What happens to a call."""

    NATIVE = "native"
    OBSERVE = "observe"
    AUDIT = "audit"
    RECORD = "record"
    REPLAY = "replay"


@dataclass(slots=True)
class Engaged:
    """A recording in use.

    Attributes:
        recording: The recording.
        publication: How its gradients become `.grad`.
        stats: What is reported of it; outlives the recording.
        trace: The operations of its forward pass; None if they could not be watched.
        last_used: The step of its last use.
        verified_step: The step up to which it is known to be what native does.
        next_audit: Replays until the next audit.
        audit_interval: Replays between the last audit and the next.
        mismatches: Backward passes that it could not give.
        input_uses: For each argument the number of operations that give it a gradient.
        reads: The numbers that its forward pass read from the device.
        misses: Calls in a row that read others.
    """

    recording: Recording
    publication: Publication
    stats: RecordingStats
    trace: Trace | None
    last_used: int
    verified_step: int
    next_audit: int = FIRST_AUDIT
    audit_interval: int = FIRST_AUDIT
    mismatches: int = 0
    input_uses: list[int] = field(default_factory=list)
    reads: Reads = field(default_factory=Reads)
    misses: int = 0

    def audited(self, step: int) -> None:
        """Notes an audit that found nothing."""
        self.verified_step = self.last_used = step
        self.audit_interval = min(2 * self.audit_interval, LAST_AUDIT_INTERVAL)
        self.next_audit = self.stats.replays + self.audit_interval


@dataclass(slots=True, eq=False)
class Slot:
    """The k-th call of a region within a step: one pool, and at most one call waiting for its backward."""

    pool: Pool
    engaged: dict[Hashable, Engaged] = field(default_factory=dict)
    sightings: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    traces: dict[Hashable, Trace] = field(default_factory=dict)
    results: dict[Hashable, Any] = field(default_factory=dict)
    attempts: dict[Hashable, int] = field(default_factory=dict)
    unsettled: Counter[Hashable] = field(default_factory=Counter)
    new_in_a_row: int = 0
    waiting: "Callable[[], Any] | None" = None

    def is_pending(self) -> bool:
        """Tells whether an earlier replayed call may still be differentiated."""
        return self.waiting is not None and (call := self.waiting()) is not None and not call.done

    def forget(self, key: Hashable) -> None:
        """Drops what is known of a signature, its recording included."""
        for kept in self._by_signature():
            kept.pop(key, None)

    def forget_all(self) -> None:
        """Drops what is known of all signatures."""
        for kept in self._by_signature():
            kept.clear()

    def _by_signature(self) -> tuple[dict[Hashable, Any], ...]:
        return self.engaged, self.sightings, self.traces, self.results, self.attempts

    def sight(self, key: Hashable) -> int:
        """Counts a sighting of a signature and returns how often it was seen before."""
        seen = self.sightings.pop(key, 0)
        self.sightings[key] = seen + 1
        if len(self.sightings) > REMEMBERED_SIGNATURES:
            forgotten = self.sightings.popitem(last=False)[0]
            self.traces.pop(forgotten, None)
            self.results.pop(forgotten, None)
        return seen


@dataclass(slots=True, eq=False)
class Region:
    """A module whose calls are recorded.

    Attributes:
        name: Its dotted path.
        module: The module.
        run: Its own forward.
        state: What its recordings depend on, once taken.
        refusal: Why it stays native for good.
        calls: Calls so far in the current step.
        most_calls: The most calls seen in one step.
        outside: Parameters that were seen in use outside of the region.
        strikes: Recordings retired before they had paid.
        part: It is a part of a region that was refused.
        path: Dotted path of the module, where that is not the region's name.
        entry: The function that a run begins with, where that is not the module's forward.
        again: Runs it once more, without what it does outside of its results.
        max_new_signatures: New signatures in a row after which calls are no longer observed until one repeats.
        ignored: For modules in it, by id, the attributes that it may set: whoever made the region answers for them.
        find_read: Finds, among tensors that the region has from elsewhere, one of these attributes, which must not be
            read where it is.
        unready: Calls that could not even be observed.
        wrote: A call was seen to set an attribute of the modules.
        instance_forward: The `forward` on the instance when the region was made, in front of the one of its class.
    """

    name: str
    module: Module
    run: Callable[..., Any]
    slots: list[Slot] = field(default_factory=list)
    state: ModuleState | None = None
    buffers: GradientBuffers | None = None
    refusal: Finding | None = None
    calls: int = 0
    most_calls: int = 0
    outside: set[int] = field(default_factory=set)
    strikes: float = 0
    part: bool = False
    wrote: bool = False
    unready: int = 0
    instance_forward: Any = None
    path: str | None = None
    entry: Any = None
    again: Callable[..., Any] | None = None
    max_new_signatures: int = MAX_NEW_SIGNATURES
    ignored: Mapping[int, frozenset[str]] = field(default_factory=dict)
    find_read: Callable[[Iterable[Tensor]], Finding | None] = lambda _: None

    @property
    def members(self) -> str:
        """The dotted path that the names of its members begin with."""
        return self.name if self.path is None else self.path

    def engaged(self) -> list[Engaged]:
        """Returns all recordings in use."""
        return [engaged for slot in self.slots for engaged in slot.engaged.values()]

    def retire(self, finding: Finding) -> list[Engaged]:
        """Drops all recordings. Too many early retirements refuse the region for good."""
        dropped = self.engaged()
        if max((engaged.stats.replays for engaged in dropped), default=0) < PAYBACK_REPLAYS:
            self.strikes += 1 if dropped else 1 / UNSETTLED_CHANGES
        if self.strikes >= MAX_STRIKES:
            self.refusal = finding
        for slot in self.slots:
            slot.forget_all()
        self.state = self.buffers = None
        return dropped


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a call, and why if it is not replayed."""

    action: Action
    finding: Finding | None = None
    slot: Slot | None = None
    key: Hashable = None
    arguments: Arguments | None = None
    modes: Modes | None = None
    trace: bool = False


class Dispatcher:
    """Decides for each call of a region.

    Args:
        device: The device of the recordings.
        new_pool: Makes the pool of a new slot.
        warmup_steps: Native sightings of a signature before it is recorded.
        max_recordings: Recordings kept for each region.
        is_outsider: Tells of an object, and of the one that holds it, whether it changes unseen.
    """

    def __init__(
        self,
        device: torch.device,
        new_pool: Callable[[], Pool],
        warmup_steps: int,
        max_recordings: int,
        is_outsider: IsOutsider = is_moving,
    ) -> None:
        self._device = device
        self._new_pool = new_pool
        self._warmup_steps = warmup_steps
        self._max_recordings = max_recordings
        self._is_outsider = is_outsider
        self.step = 0
        self.audit_requested: set[Region] = set()
        self.hidden_state: Finding | None = None

    def observe_again(self, slot: Slot, key: Hashable) -> None:
        """Has the operations of a signature written down anew at its next call, before it is recorded."""
        slot.sightings[key] = self._warmup_steps - 1
        slot.attempts.pop(key, None)

    def still_fits(self, region: Region, key: Any) -> bool:
        """Tells whether training flags and trainability are still those of a signature of the current step."""
        assert region.state is not None
        region.state.difference()  # which brings the flags up to date
        return bool(key[-1] == region.state.flags())

    def look_for_hidden_state(self, networks: Iterable[tuple[str, RNNBase]]) -> None:
        """Makes every call native for good if an RNN has state that a recording would disturb."""
        self.hidden_state = self.hidden_state or find_hidden_state(networks, self._device)

    def decide(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], counts: bool) -> Decision:
        """Decides what happens to one call.

        Args:
            region: The region called.
            args: Positional arguments.
            kwargs: Keyword arguments.
            counts: Whether the call counts towards a new recording (not on the last batch of an epoch).
        """
        if (finding := region.refusal or self.hidden_state) is not None:
            return Decision(Action.NATIVE, finding)
        modes = current_modes(self._device.type)
        if (finding := check_modes(region.name, modes)) is not None:
            return Decision(Action.NATIVE, finding)
        if not region.module.training:
            return Decision(Action.NATIVE, Finding(Reason.UNRECORDED_MODE, region.name, "train()", "eval()"))
        slot = self._slot(region)
        dropped: list[Engaged] = []
        changed = None
        if region.state is not None and (changed := region.state.difference()) is not None:
            if changed.effect is Effect.NATIVE:
                return Decision(Action.NATIVE, changed)
            dropped = region.retire(changed)
            if region.refusal is not None:
                return Decision(Action.NATIVE, changed)
        if region.state is None and (finding := self._take_state(region)) is not None:
            return Decision(Action.NATIVE, finding)
        assert region.state is not None
        arguments = read_arguments(region.name, args, kwargs, self._device)
        if isinstance(arguments, Finding):
            return Decision(Action.NATIVE, arguments)
        key = (arguments.key, modes, region.state.flags())
        if slot.is_pending():
            finding = Finding(Reason.PENDING, region.name, "no earlier call without backward", "one is waiting")
            return Decision(Action.NATIVE, finding)
        if (engaged := slot.engaged.get(key)) is not None:
            if (difference := engaged.reads.difference(arguments.tensors)) is not None:
                recorded, now = difference
                finding = Finding(Reason.HOST_READ, region.name, f"{recorded}, as recorded", f"{now}")
                return Decision(Action.NATIVE, finding, slot, key)
            engaged.misses = 0
            if engaged.trace is not None and (
                region in self.audit_requested or engaged.stats.replays >= engaged.next_audit
            ):
                finding = Finding(Reason.AUDIT, region.name, "the recorded operations", "being compared")
                return Decision(Action.AUDIT, finding, slot, key, arguments, modes)
            return Decision(Action.REPLAY, None, slot, key, arguments, modes)
        parameters = {id(parameter): name for name, parameter in region.state.parameters.items()}
        if (finding := check_input_aliases(region.name, arguments, parameters)) is not None:
            return Decision(Action.NATIVE, finding)
        region.state.follow((args, kwargs))
        decision = self._unrecorded(region, slot, key, arguments, modes, counts)
        return dataclasses.replace(decision, finding=changed) if dropped else decision

    def _unrecorded(
        self, region: Region, slot: Slot, key: Hashable, arguments: Arguments, modes: Modes, counts: bool
    ) -> Decision:
        """Decides for a signature that has no recording yet."""
        found: Callable[[Reason, str, str], Finding] = lambda reason, expected, actual: Finding(  # noqa: E731
            reason, region.name, expected, actual
        )
        where = (slot, key, arguments, modes)
        signature = f"{arguments}{_other_than(slot.engaged, key)}"
        if not counts and key not in slot.sightings:
            finding = found(Reason.LAST_BATCH, "a recorded signature", signature)
            return Decision(Action.NATIVE, finding, *where)
        if len(region.engaged()) >= self._max_recordings and not self._make_room(region):
            finding = found(Reason.BUDGET, f"at most {self._max_recordings} signatures", signature)
            return Decision(Action.NATIVE, finding, *where)
        seen = slot.sight(key)
        slot.new_in_a_row = 0 if seen else slot.new_in_a_row + 1
        if slot.new_in_a_row > region.max_new_signatures:
            finding = found(Reason.NEVER_REPEATS, "a signature that was seen before", str(arguments))
            return Decision(Action.NATIVE, finding, *where)
        if seen < self._warmup_steps:
            finding = found(Reason.WARM_UP, f"{self._warmup_steps} native steps", f"step {seen + 1} with {arguments}")
            return Decision(Action.OBSERVE, finding, *where, trace=seen == self._warmup_steps - 1)
        slot.attempts[key] = attempt = slot.attempts.get(key, 0) + 1
        if attempt > MAX_ATTEMPTS and attempt & (attempt - 1):  # ever more rarely: at the powers of two
            finding = found(Reason.NO_GRADIENT, "a backward pass after the call", "none came, several times")
            return Decision(Action.NATIVE, finding, *where)
        return Decision(Action.RECORD, found(Reason.RECORDING, "a recording", str(arguments)), *where)

    def _make_room(self, region: Region) -> bool:
        """Drops the least recently used recording of a region if it has been idle for long.

        Its graphs go; the memory of its pool stays with the other recordings of the slot.
        """
        slot, key, engaged = min(
            ((slot, key, engaged) for slot in region.slots for key, engaged in slot.engaged.items()),
            key=lambda entry: entry[2].last_used,
        )
        if self.step - engaged.last_used <= EVICTION_AGE or slot.is_pending():
            return False
        del slot.engaged[key]
        return True

    def _slot(self, region: Region) -> Slot:
        """Returns the slot of the next call within the step."""
        region.calls += 1
        region.most_calls = max(region.most_calls, region.calls)
        while len(region.slots) < region.calls:
            region.slots.append(Slot(self._new_pool()))
        return region.slots[region.calls - 1]

    def _take_state(self, region: Region) -> Finding | None:
        """Takes the state of a region, unless something in it forbids recording for now."""
        if (finding := find_scripted(region.members, region.module)) is not None:
            return finding
        self.look_for_hidden_state(recurrent_networks(region.members, region.module))
        if (finding := self.hidden_state or find_hooks(region.members, region.module)) is not None:
            return finding
        for path, buffer in region.module.named_buffers():
            if not has_memory(buffer):
                actual = f"{type(buffer).__qualname__} of {buffer.layout}"
                name = join(region.members, path)
                return Finding(Reason.UNSUPPORTED_TENSOR, name, "a buffer with memory of its own", actual)
        state = ModuleState(region.members, region.module, entry=region.entry, ignored=region.ignored)
        for name, parameter in state.parameters.items():
            if (
                type(parameter) is not Parameter
                or parameter.device != self._device
                or parameter.layout is not torch.strided
            ):
                actual = f"{type(parameter).__qualname__} on {parameter.device}"
                return Finding(Reason.UNSUPPORTED_TENSOR, name, f"a plain parameter on {self._device}", actual)
        if (finding := state.find_iterator() or state.find_outsider(self._is_outsider)) is not None:
            return with_line(finding, region.module, region.members)
        region.state = state
        region.buffers = GradientBuffers(list(state.parameters.values()))
        return None


def _other_than(known: Iterable[Any], key: Any) -> str:
    """Says of a signature whose arguments were recorded that it is another one all the same."""
    same = any(recorded[0] == key[0] for recorded in known)
    return ", with other modes, training flags or trainable parameters than recorded" if same else ""
