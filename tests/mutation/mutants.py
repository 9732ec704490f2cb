# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The guards, each with how it is switched off and what must then fail."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_replay import dispatch, effects, gradients, inspection, whole_step
from lightning_replay.certification import Verdict
from lightning_replay.dispatch import Dispatcher, Slot
from lightning_replay.engine import modes, snapshot
from lightning_replay.engine import reads as numbers
from lightning_replay.engine.recording import Recording
from lightning_replay.gradients import GradientBuffers, Publication
from lightning_replay.guards import module, reads, signature
from lightning_replay.guards.attributes import Attributes
from lightning_replay.guards.layouts import Layouts, Memory
from lightning_replay.guards.module import AttributeWatch, ModuleState
from lightning_replay.guards.versions import Versions
from lightning_replay.inspection import Inspector, Tracer
from lightning_replay.metrics import StepMetrics
from lightning_replay.runner import making
from lightning_replay.runner.backward import BackwardPass
from lightning_replay.runner.calls import Sample
from lightning_replay.runner.watching import BackwardWatch
from lightning_replay.whole_step import WatchedTrainer, WholeStep

Off = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Mutant:
    """One guard.

    Attributes:
        off: Switches it off until the stack is closed.
        events: Events of the state machine, one of which must then lead to a difference.
        tests: Or tests (pytest ids), one of which must fail.
        before: What else has to happen before an event.
    """

    off: Off
    events: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    before: tuple[tuple[str, int], ...] = field(default=())


def off(target: Any, name: str, value: Any) -> Off:
    def enter(stack: ExitStack) -> None:
        stack.enter_context(patch.object(target, name, value))

    return enter


def all_of(*parts: Off) -> Off:
    def enter(stack: ExitStack) -> None:
        for part in parts:
            part(stack)

    return enter


def frozen_modes(**fixed: Any) -> Off:
    original = modes.current_modes

    def mutant(device_type: str) -> Any:
        import dataclasses

        found = original(device_type)
        if dataclasses.is_dataclass(found):
            return dataclasses.replace(found, **fixed)
        return found._replace(**fixed)

    from lightning_replay import dispatch

    return off(dispatch, "current_modes", mutant)


def without_layouts(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Off:
    from lightning_replay import dispatch

    original = dispatch.read_arguments

    def mutant(*args: Any) -> Any:
        found = original(*args)
        if isinstance(found, signature.Arguments):
            return found._replace(layouts=tuple(map(change, found.layouts)))
        return found

    return off(dispatch, "read_arguments", mutant)


def without_aliases(stack: ExitStack) -> None:
    from lightning_replay import dispatch

    original = dispatch.read_arguments

    def mutant(*args: Any) -> Any:
        found = original(*args)
        return found._replace(aliases=()) if isinstance(found, signature.Arguments) else found

    stack.enter_context(patch.object(dispatch, "read_arguments", mutant))
    stack.enter_context(patch.object(dispatch, "check_input_aliases", lambda *_: None))


def without_flags(index: int) -> Off:
    original = ModuleState.flags

    def mutant(self: ModuleState) -> Any:
        flags = list(original(self))
        flags[index] = (True,) * len(flags[index])
        return tuple(flags)

    return off(ModuleState, "flags", mutant)


def after_taking(change: Callable[[ModuleState], None]) -> Off:
    """Makes a recording's module state forget what it compares."""
    original = ModuleState.__init__

    def mutant(self: ModuleState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not kwargs.get("every_attribute"):
            change(self)

    return off(ModuleState, "__init__", mutant)


def forget(*names: str) -> Off:
    def change(state: ModuleState) -> None:
        for name in names:
            value = getattr(state, name)
            setattr(state, name, type(value)())

    return after_taking(change)


@contextmanager
def switched_off(mutant: Mutant) -> Iterator[None]:
    with ExitStack() as stack:
        mutant.off(stack)
        yield


def _same_members(state: ModuleState) -> None:
    state._members, state._empty_members, state._member_identities = [], [], b""
    state._filled_members, state._member_keys, state._member_sizes = [], [], []


class _Blind(Layouts):
    def are_same(self, others: Sequence[Tensor] | None = None) -> bool:
        super().are_same(others)  # which notes the trainability, another guard's business
        return True


def _no_memory(state: ModuleState) -> None:
    state._memory, state._layouts = Memory([]), _Blind(state._tensors)


def _variables_gone(*args: Any, **kwargs: Any) -> Any:
    found = _find_reads(*args, **kwargs)
    return reads.Reads(found.names, ())


_find_reads = module.find_reads


_MODULE_STATE = "tests/guards/test_module_state.py"
_CHANGES = "tests/parity/test_changes.py"
_STEPS = "tests/whole_step/test_"


def _refused(step: str, reason: str) -> str:
    return f"{_STEPS}refused_steps.py::test_refused_step_trains_as_native[{step}-Reason.{reason}-step]"


MUTANTS: dict[str, Mutant] = {
    "members: parameters, buffers and modules by identity": Mutant(
        after_taking(_same_members), ("parameter_replaced", "buffer_rebound", "layer_replaced", "layer_shadowed")
    ),
    "memory and layout of parameters and buffers": Mutant(after_taking(_no_memory), ("new_data", "new_layout")),
    "names of parameters, buffers and modules": Mutant(
        forget("_filled_members", "_member_keys", "_member_sizes"),
        tests=(f"{_MODULE_STATE}::test_found[counted-names swapped]",),
    ),
    "class and __dict__ of modules": Mutant(
        off(ModuleState, "_making_difference", lambda self: None),
        tests=(f"{_MODULE_STATE}::test_found[counted-other attributes]",),
    ),
    "modules of TorchScript": Mutant(
        off(dispatch, "find_scripted", lambda *_: None),
        tests=(f"{_CHANGES}::test_what_a_part_holds_leaves_the_other_parts_to_be_recorded[network-scripted]",),
    ),
    "what is shared with others": Mutant(
        off(module, "is_outside", lambda _: False),
        tests=("tests/guards/test_reads.py::test_what_is_shared_with_others_is_refused[held-socket]",),
    ),
    "calls of what is shared with others": Mutant(
        off(effects, "is_outside", lambda _: False),
        tests=("tests/engine/test_effects.py::test_a_call_of_what_is_shared_with_others",),
    ),
    "schedulers and optimizers that are held": Mutant(
        off(ModuleState, "find_outsider", lambda self, _: None),
        tests=(
            f"{_CHANGES}::test_a_network_that_follows_the_fit_is_replayed_by_its_parts[network-FollowsItsScheduler-net.known]",
        ),
    ),
    "what is written to modules": Mutant(
        off(Versions, "are_same", lambda self: True), ("attribute", "parameter_replaced", "buffer_rebound")
    ),
    "modules that are written to all the time": Mutant(
        off(Attributes, "of", lambda self, dicts: Attributes([])),
        tests=(f"{_MODULE_STATE}::test_found[restless-float]",),
    ),
    "hooks on modules": Mutant(off(ModuleState, "_read_hooks", lambda self: []), ("forward_hook",)),
    "hooks in a dict that is new": Mutant(
        after_taking(lambda s: s.__dict__.update(_read_hooks=lambda hooks=s._hooks: hooks)),
        tests=(f"{_MODULE_STATE}::test_hooks_in_a_dict_of_their_own[counted]",),
    ),
    "hooks on all modules": Mutant(off(module.torch_module, "_has_any_global_hook", lambda: False), ("global_hook",)),
    "training flags": Mutant(without_flags(0), ("submodule_mode",)),
    "trainability": Mutant(without_flags(1), ("freeze", "freeze_most")),
    "attributes": Mutant(after_taking(lambda s: _forget_attributes(s)), ("attribute",)),
    "containers and objects in attributes": Mutant(
        after_taking(lambda s: s.__dict__.update(_containers=[], _add_containers=lambda *_: None)),
        ("inside_container", "attribute_of_object"),
    ),
    "globals, closures and class attributes": Mutant(
        off(module, "find_reads", _variables_gone),
        ("global_number", "global_function", "closure_variable", "class_attribute"),
    ),
    "forward of the class": Mutant(
        all_of(forget("_forwards"), off(reads, "_class_members", lambda *_: ())), ("class_forward",)
    ),
    "calls of the class": Mutant(
        off(module, "_entries", lambda cls: (cls.forward,)),
        tests=("tests/guards/test_reads.py::test_a_change_is_seen[call of a class]",),
    ),
    "slots of modules": Mutant(
        off(module, "_slot_variables", lambda named: ()),
        tests=("tests/guards/test_reads.py::test_a_change_is_seen[slot of a module]",),
    ),
    "code and defaults of functions": Mutant(
        after_taking(lambda s: s.__dict__.update(_functions=(), _code=[])),
        tests=("tests/guards/test_reads.py::test_a_change_is_seen[body of a function]",),
    ),
    "code that arguments bring along": Mutant(
        off(ModuleState, "follow", lambda self, arguments: None),
        tests=("tests/guards/test_reads.py::test_what_the_code_of_an_argument_reads",),
    ),
    "tensors among attributes": Mutant(
        off(ModuleState, "_has_the_same_tensors", lambda self: True),
        tests=("tests/guards/test_reads.py::test_a_change_is_seen[plain tensor, transposed]",),
    ),
    "forward on an instance": Mutant(off(module, "is_interposed", lambda value: True), ("instance_forward",)),
    "modes: autocast": Mutant(frozen_modes(autocast=(), autocast_cache=False), ("autocast",)),
    "modes: gradients": Mutant(
        frozen_modes(grad=True, inference=False),
        tests=(
            "tests/field/test_c_calls.py::test_f09_a_call_without_gradients_before_the_one_that_trains[network-tape]",
        ),
    ),
    "modes: default dtype": Mutant(
        frozen_modes(default_dtype=torch.float32), tests=("tests/parity/test_changes.py::test_default_dtype",)
    ),
    "modes: deterministic algorithms": Mutant(
        frozen_modes(switches=()), tests=("tests/parity/test_changes.py::test_deterministic_flag",)
    ),
    "modes: transformations": Mutant(
        frozen_modes(transformed=False),
        tests=("tests/parity/test_transforms.py::test_calls_that_are_transformed_are_native",),
    ),
    "what is frozen between forward and backward": Mutant(
        off(Dispatcher, "still_fits", lambda self, region, key: True),
        tests=("tests/gradients/test_conditions.py::test_a_parameter_frozen_before_the_backward",),
    ),
    "what Python does in a backward pass": Mutant(
        off(BackwardWatch, "begin", lambda self: None),
        tests=("tests/parity/test_gradients.py::test_python_in_the_backward_of_a_function",),
    ),
    "arguments: shapes and strides": Mutant(without_layouts(lambda layout: layout[2:]), ("shape", "layout")),
    "arguments: trainability": Mutant(without_layouts(lambda layout: (*layout[:3], *layout[4:])), ("trainable_input",)),
    "arguments: alignment": Mutant(
        without_layouts(lambda layout: layout[:4]),
        tests=("tests/mutation/test_guards.py::test_another_alignment_is_another_signature",),
    ),
    "arguments: shared memory": Mutant(
        without_aliases,
        tests=(
            "tests/mutation/test_guards.py::test_arguments_that_share_memory_are_another_signature",
            "tests/mutation/test_guards.py::test_a_parameter_of_the_networks_own_as_argument",
        ),
    ),
    "a call that waits for its backward": Mutant(
        off(Slot, "is_pending", lambda self: False),
        tests=("tests/mutation/test_guards.py::test_a_result_differentiated_one_step_later",),
    ),
    "pattern of incoming gradients": Mutant(
        off(Recording, "matches", lambda self, cotangents: True), ("results_used",)
    ),
    "gradients that someone holds": Mutant(off(GradientBuffers, "held", lambda self, positions: False), ("keeping",)),
    "gradients that are alive": Mutant(
        off(Publication, "is_possible", lambda self: not self.buffers.held(self.positions)),
        ("own_gradients",),
        before=(("accumulation", 1),),
    ),
    "live gradients while another recording is made": Mutant(
        off(making, "_keeping", lambda tensors: ExitStack()), ("calls",)
    ),
    "uses of parameters outside": Mutant(
        off(BackwardPass, "_outside_uses", lambda self, loss: []),
        ("penalty",),
        tests=("tests/parity/test_gradients.py::test_parameters_used_outside",),
    ),
    "order of three and more parts of a gradient": Mutant(
        off(BackwardPass, "_collect_native_parts", lambda self, loss: {}), ("calls",), before=(("calls", 1),)
    ),
    "gradients of which a part is missing": Mutant(
        off(BackwardPass, "_incomplete", lambda self, loss, missing: set()),
        tests=("tests/statemachine/test_failing_backward.py::test_between_two_calls",),
    ),
    "results made from each other": Mutant(
        off(Sample, "keep_outer_cotangents", lambda self, loss: None),
        tests=("tests/statemachine/test_statemachine.py::test_without_events_all_is_replayed",),
    ),
    "random numbers of the host": Mutant(
        off(snapshot.HostRandom, "moved_since", lambda self, earlier: None),
        ("habit",),
        tests=("tests/limits/test_limits.py::test_what_a_recording_cannot_hold_is_native",),
    ),
    "attributes that the forward writes": Mutant(
        off(AttributeWatch, "difference", lambda self: None),
        tests=("tests/limits/test_limits.py::test_an_attribute_set_by_the_network_is_native",),
    ),
    "arguments and parameters that the forward writes": Mutant(
        off(Inspector, "_check_writes", lambda self, *_: None),
        tests=("tests/field/test_f_python_state.py::test_f22_weights_pruned_in_the_forward",),
    ),
    "comparison of two steps' operations": Mutant(
        off(Tracer, "note", lambda self, *_: None),
        tests=("tests/limits/test_limits.py::test_an_audit_sees_what_no_guard_reaches",),
    ),
    "audit and observation: values made on the host": Mutant(
        off(inspection, "host_values", lambda _: None),
        tests=("tests/field/test_f_python_state.py::test_f21_host_values_that_differ_between_two_steps",),
    ),
    "observation: host tensors that were there before": Mutant(
        off(Inspector, "_check_host", lambda *_: None),
        tests=("tests/engine/test_host.py::test_what_was_there_before_may_change",),
    ),
    "numbers read from the device: before a replay": Mutant(
        off(numbers.Reads, "difference", lambda self, inputs: None),
        tests=("tests/field/test_f_python_state.py::test_f19_a_batch_without_padding_among_others_is_native",),
    ),
    "numbers read from the device: where they come from": Mutant(
        off(numbers, "written_tensors", lambda *_: []),
        tests=("tests/engine/test_reads.py::test_a_number_of_unknown_origin_is_refused",),
    ),
    "states of generators set in Python": Mutant(
        off(Inspector, "_check_generator", lambda self: None),
        tests=("tests/field/test_f_python_state.py::test_f19_generators_set_where_something_is_drawn",),
    ),
    "layout of gradients that are let go": Mutant(
        off(gradients, "Layouts", _Blind),
        tests=("tests/gradients/test_conditions.py::test_a_callback_changes_gradients_in_place",),
    ),
    "what the getters of operator look up": Mutant(
        off(reads, "_looked_up", lambda getter: iter(())),
        tests=(f"{_STEPS}what_a_step_reads.py::test_a_change_is_seen_and_the_step_recorded_again[Getter]",),
    ),
    "reads of the Trainer": Mutant(
        off(WatchedTrainer, "__getattr__", lambda self, name: getattr(self._trainer, name)),
        tests=(_refused("FollowsTheEpoch", "TRAINER_READ"),),
    ),
    "objects that a fit changes, among what code reads": Mutant(
        off(ModuleState, "find_outsider", lambda *_: None),
        tests=("tests/parity/test_changes.py::test_a_network_that_follows_the_fit_is_replayed_by_its_parts",),
    ),
    "whole step: its index": Mutant(
        off(whole_step, "find_use", lambda *_: None),
        tests=(_refused("BranchesOnTheIndex", "BATCH_INDEX"),),
    ),
    "whole step: clocks, files and prints": Mutant(
        off(effects, "_is_effect", lambda *_: False),
        tests=(_refused("TakesTheTime", "HOST_EFFECT"),),
    ),
    "whole step: another training_step": Mutant(
        off(WholeStep, "_find_replaced", lambda self: None),
        tests=(f"{_STEPS}what_a_step_reads.py::test_a_step_that_is_replaced_is_not_replayed_as_it_was",),
    ),
    "whole step: metrics that others update": Mutant(
        off(StepMetrics, "find_read", lambda *_: None),
        tests=(f"{_STEPS}metrics.py::test_metric_that_cannot_be_replayed_is_a_reason[read]",),
    ),
    "whole step: metrics that cannot be replayed": Mutant(
        off(StepMetrics, "end", lambda self: None),
        tests=(f"{_STEPS}metrics.py::test_metric_that_cannot_be_replayed_is_a_reason[reset]",),
    ),
    "whole step: numbers that are logged": Mutant(
        off(whole_step, "handing_out", lambda *_: nullcontext()),
        tests=(_refused("LogsWhatNoGuardReaches", "PYTHON_VALUE"),),
    ),
    "RNNs that draw from cuDNN": Mutant(
        off(dispatch, "find_hidden_state", lambda *_: None),
        tests=("tests/guards/test_module_state.py::test_hidden_state_anywhere_makes_every_call_native_for_good",),
    ),
    "certification: what torch declares nondeterministic": Mutant(
        off(making, "nondeterminism_alerts", lambda: nullcontext(["everything"])),
        tests=(
            "tests/engine/test_certification.py::test_undeclared_nondeterminism_is_an_error_under_deterministic_algorithms",
        ),
    ),
    "certification": Mutant(
        off(making, "certify", lambda *_, **__: Verdict("bitwise")),
        tests=("tests/mutation/test_certification.py::test_a_wrong_recording_is_not_used",),
    ),
}


def _forget_attributes(state: ModuleState) -> None:
    state._attributes = [{} for _ in state._attributes]
    state._read_attributes = lambda _: {}  # type: ignore[method-assign]
    state._prepare_attributes()


__all__ = ["MUTANTS", "Mutant", "switched_off"]
