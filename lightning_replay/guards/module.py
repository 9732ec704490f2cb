# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Everything in a module tree that a recording depends on: taken once, compared before each replay."""

import copy
import functools
import gc
import io
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_replay.effects import is_outside
from lightning_replay.engine.interposition import is_interposed
from lightning_replay.engine.layout import has_memory
from lightning_replay.guards.attributes import Attributes, identities
from lightning_replay.guards.changes import Change
from lightning_replay.guards.contents import (
    HOOKS,
    MEMBERS,
    MUTABLE,
    SCALARS,
    TORCH_OWN,
    UNNAMED,
    is_container,
    items,
    own_code,
    package_of,
    same_items,
    same_value,
    slots,
)
from lightning_replay.guards.layouts import Layouts, Memory
from lightning_replay.guards.reads import MAX_DEPTH, find_reads
from lightning_replay.guards.versions import Versions
from lightning_replay.reasons import Finding, Reason

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_WATCHED = {id(random.random.__self__), id(np.random.mtrand._rand)}  # type: ignore[attr-defined]
"""The generators of Python and NumPy themselves: a run that draws from them is found out."""


def join(prefix: str, name: str) -> str:
    """Joins two parts of a dotted path."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find_hooks(name: str, root: Module) -> Finding | None:
    """Finds a hook on a module of the tree, or one registered for all modules."""
    if torch_module._has_any_global_hook():
        actual = "a global module hook is registered"
        return Finding(Reason.HOOKS, name, "no hooks on all modules", actual, Change.HOOKS.effect)
    for path, module in root.named_modules():
        for kind in HOOKS:
            if getattr(module, kind):
                actual = f"{len(getattr(module, kind))} in {kind}"
                return Finding(Reason.HOOKS, join(name, path), "no hooks", actual, Change.HOOKS.effect)
    return None


def find_scripted(name: str, root: Module) -> Finding | None:
    """Finds a module of TorchScript, whose attributes are not Python's."""
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return Finding(Reason.SCRIPTED_MODULE, join(name, path), "modules of Python", f"a {type(module).__name__}")
    return None


def recurrent_networks(name: str, root: Module) -> list[tuple[str, torch.nn.RNNBase]]:
    """Returns the RNNs of a tree, with their dotted paths."""
    return [(join(name, path), m) for path, m in root.named_modules() if isinstance(m, torch.nn.RNNBase)]


def find_hidden_state(networks: Iterable[tuple[str, torch.nn.RNNBase]], device: torch.device) -> Finding | None:
    """Finds an RNN that draws its dropout from cuDNN, whose generator lives where nothing can put it back.

    Worse, torch gives that generator a new seed whenever the state of its own is set: while such an RNN trains,
    nothing at all can be recorded without a trace.
    """
    if device.type != "cuda":
        return None
    for path, network in networks:
        if network.dropout > 0 and network.num_layers > 1 and network.training:
            return Finding(Reason.HIDDEN_STATE, path, "dropout=0", f"dropout={network.dropout}")
    return None


IsOutsider = Callable[[Any, Any], bool]


def is_moving(owner: Any, value: Any) -> bool:
    """Tells whether an object of torch is one that training changes from step to step: no guard looks into it."""
    return isinstance(value, (Optimizer, LRScheduler, torch.amp.GradScaler))


RESTLESS_WRITES = 8
"""Comparisons that found a module written to, though nothing in it had changed, after which it is always read."""


class ModuleState:
    """What the modules of a tree hold: members, attributes, parameters and buffers with their memory.

    The comparison is one pass over prepared lists; only a mismatch is looked at closely. Modules that nothing was
    written to since the last one are not read again.

    Args:
        name: Dotted path of the root.
        root: The module.
        every_attribute: Compare also attributes that no forward pass of the tree reads.
        entry: A function of the root that runs in place of its forward.
        ignored: For modules of the tree, by id, the attributes that are not compared.
    """

    def __init__(
        self,
        name: str,
        root: Module,
        every_attribute: bool = False,
        entry: FunctionType | None = None,
        ignored: Mapping[int, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.root = root
        self._named = [(join(name, path), module) for path, module in root.named_modules()]
        self._modules = [module for _, module in self._named]
        self._classes = [type(module) for module in self._modules]
        self._forwards = {cls: _entries(cls) for cls in self._classes}
        self._dicts: list[dict[str, Any]] = [module.__dict__ for module in self._modules]
        self._makings = self._read_makings()
        members: list[dict[str, Any]] = [d for m in self._modules for d in (m._parameters, m._buffers, m._modules)]
        self._are_members_counted = all(type(d) is dict for d in members)
        self._writes: Counter[int] = Counter()
        # Modules that are always read: first of all the root, whose forward is interposed in each step.
        self._restless = {id(root.__dict__), *(id(d) for d in self._dicts if type(d) is not dict)}
        counted = (d for d in (*self._dicts, *filter(None, members)) if type(d) is dict)
        self._versions = Versions(d for d in counted if id(d) not in self._restless)
        self._member_names = [tuple(d) for d in members]
        self._filled_members = [d for d in members if d]
        self._empty_members = [d for d in members if not d]
        self._members = [d.values() for d in self._filled_members]  # views: each pass over one reads the dict anew
        self._member_keys = list(chain.from_iterable(self._filled_members))
        self._member_sizes = list(map(len, self._filled_members))
        self._member_values = list(chain.from_iterable(self._members))
        self._member_identities = identities(self._member_values)
        # Deleting from a container of modules gives it another dict, which the views above know nothing of.
        self._holders = [d for d in self._dicts if d.keys() >= set(MEMBERS)]
        self._others = [m for m in self._modules if "training" not in vars(m)]  # it is a property of their class
        self._member_dicts = list(self._read_member_dicts())
        self._left_out = {module: TORCH_OWN | names for module, names in ignored.items()}
        self._hooks = self._read_hooks()
        self._every_attribute = every_attribute
        self._entry = entry
        self._given: dict[Any, None] = {}
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        seen: set[int] = set()
        for path, module in self._named:
            for key, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    target: dict[str, Any] = self.parameters if isinstance(tensor, Parameter) else self.buffers
                    target[join(path, key)] = tensor
        self._tensors = [*self.parameters.values(), *self.buffers.values()]
        self._tensor_names = [*self.parameters, *self.buffers]
        self._memory = Memory(self._tensors)
        self._layouts = Layouts(self._tensors)
        self._follow_code()

    def follow(self, arguments: Any) -> None:
        """Compares from now on also what code may read that arguments of a call bring with them."""
        given = dict.fromkeys(own_code(arguments))
        if not given.keys() <= self._given.keys():
            self._given |= given
            self._follow_code()

    def _follow_code(self) -> None:
        """Finds what the code of the modules may read, and prepares its comparison."""
        # A metric is no part of a network; a forward pass that updates one is refused for setting its attributes.
        modules = [m for m in self._modules if id(m) in self._left_out or not _is_metric(m)]
        held = [
            {k: v for k, v in module.__dict__.items() if k not in TORCH_OWN and not is_interposed(v)}
            for module in modules
        ]
        called = [attributes.get(name) for attributes in held for name in UNNAMED]
        entry = (type(self.root), self._entry)
        reads = find_reads(set(map(type, modules)), held, [*called, *self._given], entry)
        self._reads = None if self._every_attribute else reads.names
        given: list[tuple[str, Callable[[], Any]]] = [
            (f"{value}", functools.partial(_itself, value)) for value in self._given
        ]
        self._variables = (*reads.variables, *_slot_variables(self._named), *given)
        self._functions = reads.functions
        self._attributes = [self._read_attributes(module) for module in self._modules]
        self._prepare_attributes()

    def _read_attributes(self, module: Module) -> dict[str, Any]:
        """Returns the attributes of a module that the comparison is about."""
        reads = self._reads
        left_out = self._left_out.get(id(module), TORCH_OWN)
        return {
            k: v
            for k, v in module.__dict__.items()
            if k not in left_out and (not is_interposed(v) if k in UNNAMED else reads is None or k in reads)
        }

    def named(self) -> list[tuple[str, Module]]:
        """Returns the modules with their dotted paths."""
        return self._named

    def flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns training flags of all modules, trainability of parameters and buffers: part of the signature.

        They are what the last comparison saw.
        """
        return self._training, self._layouts.trainable

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Returns parameters and buffers with their dotted names, in the order of their flags."""
        return zip(self._tensor_names, self._tensors, strict=True)

    def trainable(self) -> dict[str, Parameter]:
        """Returns the parameters that require a gradient, by dotted name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def difference(self) -> Finding | None:
        """Finds the first thing that is not as it was when this state was taken."""
        untouched = self._versions.are_same() and self._restless_attributes.are_same()
        same = untouched or self._held.are_same()
        if not same and not all(map(is_, self._read_member_dicts(), self._member_dicts)):
            return self._member_difference()
        if any(self._empty_members):
            return self._member_difference()
        if not (untouched and self._are_members_counted) and not self._has_the_same_members():
            return self._member_difference()
        if not same or any(self._hooks):
            self._hooks = self._read_hooks()
        has_hooks = any(self._hooks) or torch_module._has_any_global_hook()
        if has_hooks and (hooks := find_hooks(self.name, self.root)) is not None:
            return hooks
        if not (self._memory.is_same() and self._layouts.are_same()):
            return self._memory_difference()
        if self._read_makings() != self._makings and (making := self._making_difference()) is not None:
            return making
        for cls, entries in self._forwards.items():
            if not all(map(is_, _entries(cls), entries)):
                return self._finding(
                    Change.CODE, self.name, f"forward and call of {cls.__qualname__} as recorded", "another function"
                )
        found = None if same and self._has_the_same() else self._attribute_difference()
        if found is None and not untouched:
            self._settle()
        return found

    def _settle(self) -> None:
        """Lets versions speak for what was found to be as it was, but for modules that are written to all the time."""
        written = self._versions.accept()
        # train() and eval() write to all modules: that is no habit of one.
        if not written or len(written) > len(self._modules) // 2:
            return
        self._writes.update(written & set(map(id, self._dicts)))
        restless = {key for key, count in self._writes.items() if count >= RESTLESS_WRITES}
        if not restless <= self._restless:
            self._restless |= restless
            self._versions.leave_out(restless)
            self._restless_attributes = self._held.of(self._restless)

    def _finding(self, change: Change, where: str, expected: str, actual: str) -> Finding:
        return Finding(Reason.MODULE_CHANGED, where, expected, actual, change.effect)

    def _member_difference(self) -> Finding:
        for (path, members), names in zip(self._named_members(), self._member_names, strict=True):
            if tuple(members) != names:
                return self._finding(Change.MEMBERS, path, f"members {list(names)}", f"{list(members)}")
        stored = iter(self._member_values)
        for path, members in self._named_members():
            for key, value in members.items():
                if value is not next(stored):
                    return self._finding(
                        Change.MEMBERS, join(path, key), "the object that was recorded", "another object"
                    )
        return self._finding(Change.MEMBERS, self.name, "the modules that were recorded", "others")

    def _has_the_same_members(self) -> bool:
        return (
            identities(chain.from_iterable(self._members)) == self._member_identities
            and list(chain.from_iterable(self._filled_members)) == self._member_keys
            and list(map(len, self._filled_members)) == self._member_sizes
        )

    def _read_makings(self) -> bytes:
        """Returns where the class and the `__dict__` of each module lie, or what Python has in place of the latter."""
        return identities(gc.get_referents(*self._modules))

    def _making_difference(self) -> Finding | None:
        for (path, module), cls, attributes in zip(self._named, self._classes, self._dicts, strict=True):
            if type(module) is not cls:
                return self._finding(Change.CODE, path, cls.__qualname__, f"{type(module).__qualname__}, another class")
            if module.__dict__ is not attributes:
                return self._finding(Change.ATTRIBUTE, path, "its attributes", "those of another __dict__")
        return None

    def _read_hooks(self) -> list[Any]:
        return [getattr(module, kind) for module in self._modules for kind in HOOKS]

    def _read_member_dicts(self) -> Iterator[Any]:
        return chain.from_iterable(map(itemgetter(*MEMBERS), self._holders))

    def _named_members(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, module in self._named:
            for members in (module._parameters, module._buffers, module._modules):
                yield path, members

    def _memory_difference(self) -> Finding:
        for index, name in enumerate(self._tensor_names):
            then, now = self._layouts.then(index), self._layouts.now(index)
            if then != now:
                return self._finding(Change.MEMORY, name, str(then), str(now))
            if self._memory.moved(index):
                return self._finding(
                    Change.MEMORY, name, "the memory that was recorded", "new memory (.data = ..., .to(...))"
                )
        return self._finding(Change.MEMORY, self.name, "the memory that was recorded", "new memory")

    def _prepare_attributes(self) -> None:
        """Prepares the comparison of attributes and variables: one flat list, and the containers among it.

        Training flags and the dicts of members and hooks are among the attributes, so that a module is read in one go.
        """
        named = zip(self._dicts, self._attributes, strict=True)
        self._held = Attributes((d, (*filter(d.__contains__, _OWN_READS), *names)) for d, names in named)
        self._restless_attributes = self._held.of(self._restless)
        self._training = tuple(map(_training, self._modules))
        self._others_training = list(map(_training, self._others))
        self._outer = [getter() for _, getter in self._variables]
        self._code = list(chain.from_iterable(map(_code_of, self._functions)))
        self._sizes = [len(vars(function)) for function in self._functions]
        self._containers: list[tuple[str, Any, list[Any]]] = []
        held = [*self._held.values, *self._outer]
        seen = set(map(id, self._modules))
        for (path, _), attributes in zip(self._named, self._attributes, strict=True):
            for key, value in attributes.items():
                self._add_containers(join(path, key), value, held, seen, 0)
        for (name, _), value in zip(self._variables, self._outer, strict=True):
            self._add_containers(name, value, held, seen, 0)
        for function in self._functions:
            for value in filter(None, _code_of(function)):  # of what is empty, the size tells
                self._add_containers(function.__qualname__, value, held, seen, 0)
        compared = set(map(id, self._tensors))
        tensors = {id(v): v for v in held if isinstance(v, Tensor) and id(v) not in compared and _has_layout(v)}
        self._plain_memory = Memory([*tensors.values()])
        self._plain_layouts = Layouts([*tensors.values()])
        self._plain_trainable = self._plain_layouts.trainable

    def find_iterator(self) -> Finding | None:
        """Finds something that code may use and that a run would advance, or that others change meanwhile."""
        for path, _, value in self._reached():
            kind = f"a {type(value).__qualname__}"
            if is_outside(value):
                return Finding(Reason.HOST_EFFECT, path, "nothing that is shared with others", kind)
            if isinstance(value, _GENERATORS) and id(value) not in _WATCHED:
                return Finding(Reason.HOST_RANDOM, path, "the device's default generator", kind)
            if isinstance(value, Iterator) and not isinstance(value, (Tensor, io.IOBase, *weakref.ProxyTypes)):
                return Finding(Reason.ATTRIBUTE_WRITTEN, path, "nothing that a run advances", kind)
        return None

    def find_outsider(self, is_outsider: IsOutsider) -> Finding | None:
        """Finds something that code may read, and that others change without any guard seeing it."""
        for path, owner, value in self._reached():
            if is_outsider(owner, value):
                return Finding(
                    Reason.TRAINER_READ, path, "what changes with a module alone", f"a {type(value).__name__}"
                )
        return None

    def _reached(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields what code may read: where it is, what holds it, and the value."""
        for (path, module), attributes in zip(self._named, self._attributes, strict=True):
            yield from ((join(path, key), module, value) for key, value in attributes.items())
        for (name, _), value in zip(self._variables, self._outer, strict=True):
            yield name, None, value
        for path, container, inside in self._containers:
            yield from ((path, container, item) for item in inside)

    def _add_containers(self, path: str, value: Any, held: list[Any], seen: set[int], depth: int) -> None:
        """Adds a container and those inside it, each object once, and to what is held all that they hold."""
        if depth > MAX_DEPTH or id(value) in seen or not is_container(value):
            return
        seen.add(id(value))
        inside = items(value, self._reads)
        held += inside
        if not isinstance(value, (tuple, frozenset)):  # they are compared where they are held, and hold what they held
            self._containers.append((path, value, inside))
        for item in inside:
            # A module is looked into however deep it is.
            self._add_containers(path, item, held, seen, depth + (not isinstance(value, Module)))

    def _has_the_same(self) -> bool:
        """Tells whether what code reads in other places than attributes, and all that is held, is as it was."""
        return (
            [len(vars(function)) for function in self._functions] == self._sizes
            and list(map(_training, self._others)) == self._others_training
            and all(map(is_, [getter() for _, getter in self._variables], self._outer))
            and all(map(is_, chain.from_iterable(map(_code_of, self._functions)), self._code))
            and self._has_the_same_tensors()
            and all(same_items(value, inside, self._reads) for _, value, inside in self._containers)
        )

    def _has_the_same_tensors(self) -> bool:
        """Tells whether tensors other than parameters and buffers are where and as they were."""
        if not self._plain_trainable:
            return True
        if not (self._plain_memory.is_same() and self._plain_layouts.are_same()):
            return False
        return self._plain_layouts.trainable == self._plain_trainable

    def _attribute_difference(self) -> Finding | None:
        """Finds an attribute, a variable or something held that has another value, not only another object."""
        outer = [getter() for _, getter in self._variables]
        for index, module in enumerate(self._modules):
            stored, now = self._attributes[index], self._read_attributes(module)
            for key in (*stored, *now):
                if not (key in stored and key in now and same_value(stored[key], now[key])):
                    where = join(self._named[index][0], key)
                    return self._finding(
                        Change.ATTRIBUTE, where, _show(stored.get(key, _MISSING)), _show(now.get(key, _MISSING))
                    )
            self._attributes[index] = now
        for (name, _), earlier, value in zip(self._variables, self._outer, outer, strict=True):
            if not same_value(earlier, value):
                return self._finding(Change.VARIABLE, name, _show(earlier), _show(value))
        code = zip(*[iter(self._code)] * len(_CODE), strict=True)
        for function, earlier in zip(self._functions, code, strict=True):
            if not all(map(is_, _code_of(function), earlier)):
                return self._finding(Change.CODE, function.__qualname__, "code and defaults as recorded", "others")
        if not self._has_the_same_tensors():
            actual = "another memory, layout or trainability of one"
            return self._finding(Change.CONTENTS, self.name, "tensors among the attributes as they were", actual)
        for path, container, inside in self._containers:
            if not same_items(container, inside, self._reads):
                return self._finding(Change.CONTENTS, path, "the contents as recorded", "other contents")
        self._prepare_attributes()  # equal values in new objects, or an attribute that nothing reads
        return None


def _is_metric(module: Module) -> bool:
    return any(package_of(base) == "torchmetrics" for base in type(module).__mro__)


def _itself(value: Any) -> Any:
    return value


_CODE = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_code_of = attrgetter(*_CODE)
_entries = attrgetter("forward", "__call__", "_call_impl")


def _slot_variables(named: Iterable[tuple[str, Module]]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields name and getter of what modules keep in slots, apart from their other attributes."""
    for path, module in named:
        kind: Any = type(module)
        for slot in slots(kind):
            yield join(path, slot), functools.partial(getattr, module, slot, None)


def _has_layout(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and has_memory(tensor)


class _Missing:
    def __repr__(self) -> str:
        return "no such attribute"


_MISSING = _Missing()


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, SCALARS) or value is _MISSING else f"a {type(value).__qualname__}"


_training = attrgetter("training")
_OWN_READS = (*MEMBERS, *HOOKS, "training")


class AttributeWatch:
    """Tells whether a run sets attributes, fills containers or rebinds members of a module tree, and undoes it.

    Args:
        name: Dotted path of the root.
        root: The module, before the run.
        ignored: For modules of the tree, by id, the attributes that the run may set.
        entry: A function of the root that runs in place of its forward.
    """

    def __init__(
        self,
        name: str,
        root: Module,
        ignored: Mapping[int, frozenset[str]] = MappingProxyType({}),
        entry: FunctionType | None = None,
    ) -> None:
        self._state = ModuleState(name, root, every_attribute=True, entry=entry, ignored=ignored)
        self._flags = self._state.flags()
        self._versions = [parameter._version for parameter in self._state.parameters.values()]
        self._saved = [(module.__dict__, dict(module.__dict__)) for module in root.modules()]
        self._containers = [
            (value, copy.copy(value))
            for _, attributes in self._saved
            for value in attributes.values()
            if isinstance(value, MUTABLE)
        ]

    def difference(self) -> Finding | None:
        """Finds what the run changed."""
        found = self._state.difference()
        if found is not None and found.reason is Reason.MODULE_CHANGED:
            reason = Reason.BUFFER_REBOUND if found.where in self._state.buffers else Reason.ATTRIBUTE_WRITTEN
            return Finding(reason, found.where, "no change by the call", found.actual)
        if found is None and (found := self._flag_difference()) is not None:
            return found
        for (name, parameter), version in zip(self._state.parameters.items(), self._versions, strict=True):
            if parameter._version != version:
                return Finding(Reason.PARAMETER_WRITTEN, name, "parameters that are only read", "written in place")
        return found

    def _flag_difference(self) -> Finding | None:
        """Finds a training flag, or a parameter's trainability, that the run changed."""
        (training, trainable), (training_now, trainable_now) = self._flags, self._state.flags()
        for (path, _), before, now in zip(self._state.named(), training, training_now, strict=True):
            if before != now:
                return Finding(Reason.ATTRIBUTE_WRITTEN, join(path, "training"), f"{before}", f"{now}")
        for (path, _), before, now in zip(self._state.tensors(), trainable, trainable_now, strict=True):
            if before != now:
                return Finding(Reason.ATTRIBUTE_WRITTEN, join(path, "requires_grad"), f"{before}", f"{now}")
        return None

    def restore(self) -> None:
        """Puts attributes, members and the contents of containers back."""
        for (_, tensor), trainable in zip(self._state.tensors(), self._flags[1], strict=True):
            if tensor.requires_grad != trainable:
                tensor.requires_grad_(trainable)
        for live, saved in self._saved:
            if list(live) != list(saved) or not all(map(is_, live.values(), saved.values())):
                live.clear()
                live.update(saved)
        for container, contents in self._containers:
            container.clear()
            fill = container.update if isinstance(container, (dict, set)) else container.extend
            fill(contents)
