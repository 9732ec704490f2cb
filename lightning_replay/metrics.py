# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""torchmetrics objects that a recorded step updates: their states are arguments and results of the region.

Note [a metric in a recording]
    A metric keeps tensors, which its update replaces or changes in place, and a count of updates. While a step is run
    for a recording, each state is a copy of the region's argument; what it has become is a result. A replay is given
    the live states, binds what comes back, and counts as many updates as the recorded step did.

    Of a metric that is logged, Lightning keeps the result of its last batch as it is at that moment. So that is logged
    before what the replay brought is bound, and a result that the step made until then is part of the log.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric, MetricCollection

from lightning_replay.reasons import Finding, Reason

_RESULTS = ("_forward_cache", "_computed")
_COUNT = "_update_count"
_PASSING = frozenset({*_RESULTS, _COUNT, "_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad"})
_SETTLED = ("_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run made of the metrics, for a region's result.

    Attributes:
        states: The states of all metrics in use.
        results: What each metric keeps of its last batch.
        updates: How often each was updated.
    """

    states: list[Tensor]
    results: list[list[Any]]
    updates: list[int]


class StepMetrics:
    """The metrics of a LightningModule that its training step updates.

    Args:
        root: The LightningModule.
    """

    def __init__(self, root: Module) -> None:
        # By identity throughout: the hash of a metric changes with its states.
        self._named = [(name, child) for name, child in root.named_modules() if isinstance(child, Metric)]
        self._collected = {
            id(metric)
            for child in root.modules()
            if isinstance(child, MetricCollection) and child._enable_compute_groups
            for metric in child.modules()
        }
        self._used: list[Metric] = []
        self._counts: list[int] = []
        self._marks: list[list[tuple[int, int]]] = []
        self._before: list[list[Any]] = []
        self._results_before: dict[int, Any] = {}

    def ignored(self) -> Mapping[int, frozenset[str]]:
        """Returns, for each metric by its id, the attributes that an update sets."""
        return {id(metric): _PASSING | frozenset(metric._defaults) for _, metric in self._named}

    def states(self) -> list[Tensor]:
        """Returns the live states of the metrics in use."""
        return [value for metric in self._used for value in _states(metric)]

    def begin(self) -> None:
        """Notes where a native run begins."""
        self._counts = [metric._update_count for _, metric in self._named]
        self._marks = [_marks(metric) for _, metric in self._named]
        self._before = [[getattr(metric, name) for name in _SETTLED] for _, metric in self._named]

    def end(self) -> Finding | None:
        """Takes metrics that a native run has updated among those in use, unless one cannot be recorded."""
        noted = zip(self._named, self._counts, self._marks, self._before, strict=True)
        for (name, metric), count, marks, before in noted:
            if metric._update_count == count and _marks(metric) == marks:
                continue
            lists = [key for key, default in metric._defaults.items() if not isinstance(default, Tensor)]
            if lists or metric.compute_on_cpu or metric.dist_sync_on_step:
                actual = f"{type(metric).__name__} keeps a list in {lists[0]}" if lists else "compute_on_cpu, or a sync"
                return Finding(Reason.METRIC, name, "states that are tensors on the device", actual)
            if id(metric) in self._collected or any(isinstance(child, Metric) for child in metric.children()):
                return Finding(Reason.METRIC, name, "a metric of its own", "one that shares states with others")
            if metric._update_count <= count or [getattr(metric, key) for key in _SETTLED] != before:
                return Finding(Reason.METRIC, name, "updates only", "it was reset or synchronized in the step")
            if not any(metric is used for used in self._used):
                self._used.append(metric)
        return None

    def lend(self, states: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Gives copies of these states to the metrics in use, so that arguments of the region are only read.

        Returns:
            What `give_back` needs.
        """
        saved = [dict(metric.__dict__) for metric in self._used]
        given = iter(states)
        for metric in self._used:
            for name in metric._defaults:
                metric.__dict__[name] = next(given).clone()
        return saved

    def give_back(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Puts the metrics back as they were."""
        for metric, attributes in zip(self._used, saved, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)

    def outcome(self, counts: Sequence[int]) -> Outcome:
        """Returns what a run made of the metrics in use.

        Args:
            counts: Their counts of updates before it.
        """
        return Outcome(
            [value.detach().clone() for value in self.states()],
            [[getattr(metric, name) for name in _RESULTS] for metric in self._used],
            [metric._update_count - count for metric, count in zip(self._used, counts, strict=True)],
        )

    def counts(self) -> list[int]:
        """Returns the counts of updates of the metrics in use, where a run begins."""
        self._results_before = {id(metric): metric._forward_cache for _, metric in self._named}
        return [metric._update_count for metric in self._used]

    def result_of(self, metric: Metric) -> list[Any]:
        """Returns what the run has made of the metric's last batch so far, or nothing if that is as it was before."""
        result = metric._forward_cache
        if result is self._results_before.get(id(metric)):
            return []
        return [tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, result)]

    def find_read(self, tensors: Iterable[Tensor]) -> Finding | None:
        """Finds a state or a result of a metric among tensors that a recording would read where they are now."""
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for name, metric in self._named:
            for key in (*metric._defaults, *_RESULTS):
                for leaf in tree_leaves(getattr(metric, key)):
                    if isinstance(leaf, Tensor) and leaf.numel() and leaf.untyped_storage().data_ptr() in places:
                        expected, actual = "a metric whose states the step updates", "it is read as others left it"
                        return Finding(Reason.METRIC, f"{name}.{key}", expected, actual)
        return None

    def adopt(self, outcome: Outcome) -> None:
        """Makes what a replay brought the metrics' own."""
        states = iter(outcome.states)
        for metric, results, updates in zip(self._used, outcome.results, outcome.updates, strict=True):
            for name in metric._defaults:
                setattr(metric, name, next(states))
            for name, value in zip(_RESULTS, results, strict=True):
                setattr(metric, name, value)
            setattr(metric, _COUNT, metric._update_count + updates)


def _marks(metric: Metric) -> list[tuple[int, int]]:
    """Returns what tells whether a state was replaced or changed in place."""
    states = (getattr(metric, name) for name in metric._defaults)
    return [(id(state), state._version if isinstance(state, Tensor) else len(state)) for state in states]


def _states(metric: Metric) -> Iterator[Tensor]:
    return (getattr(metric, name) for name in metric._defaults)
