# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a replayed step costs on the host, for module trees of several sizes.

    python -m tests.benchmarks.host_cost --out docs/evidence/host_cost.json

*Guards* is one `Dispatcher.decide` for a recorded call: everything that is compared before a replay. *Step* is a whole
replayed step of the runner whose graphs do nothing: guards, arguments, results, autograd and the handing over of
gradients. On a GPU the graphs are real ones.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replay.dispatch import Action
from lightning_replay.engine.backend import GraphBackend
from lightning_replay.engine.cuda import CudaGraphBackend
from lightning_replay.engine.tape import TapeBackend, TapePool
from lightning_replay.runner import Runner
from tests.benchmarks.clock import fence
from tests.benchmarks.receipt import command_line, receipt, write

MODULES = (250, 500, 1000, 2000)
WIDTH = 16
SHARE_BAR, TENSOR_BAR = 0.05, 0.4
WARM_UP = 5
UNAUDITED_REPLAYS = 90
"""Fewer than there are replays before the first audit, which is a native step."""


class Block(nn.Module):
    """Five modules, ten parameters and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.linear_2(self.norm_2(torch.relu(self.linear_1(self.norm_1(hidden)))))
        self.mean.lerp_(inner.detach().mean(dim=0), 0.1)
        self.calls.add_(1)
        return hidden + (inner - self.mean) * self.scale + self.shift


class _Nothing:
    def replay(self) -> None:
        pass


class IdleBackend(TapeBackend):
    """Makes graphs that do nothing, so that a step costs what the host does for it."""

    def capture(self, pool: TapePool, run: Callable[[], Any], *, overwrites_pool: bool = False) -> Any:
        return _Nothing(), run()


class Tree:
    """A tree of modules, trained natively and replayed.

    Args:
        modules: how many, its root not counted.
        backend: makes the graphs.
    """

    def __init__(self, modules: int, backend: GraphBackend) -> None:
        self._device = backend.device
        self.net = nn.Sequential(*[Block() for _ in range(modules // 5)]).to(self._device)
        self._root = nn.ModuleDict({"net": self.net})
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, foreach=True)
        self._inputs = torch.randn(4, WIDTH, device=self._device)
        self.runner = Runner(backend, 1, 8, "off", _complain)

    def native(self) -> None:
        """One step as torch runs it."""
        loss = self._forward()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def replay(self) -> None:
        """One step through the runner, without the update of the weights."""
        if self.runner.regions:
            loss = self.runner.run_step(self._forward, True)
        else:
            loss = self.runner.discover(self._root, self._forward)
        self._optimizer.zero_grad()
        with self.runner.backward(loss):
            loss.backward()

    def engage(self) -> None:
        """Replays until a step is nothing but a replay."""
        for _ in range(4):
            self.replay()
        if self.runner.last_action != "replay":
            raise RuntimeError(f"the last step was {self.runner.last_action}, not replayed")

    def decide(self) -> None:
        """The guards of one call."""
        (region,) = self.runner.regions
        region.calls = 0
        decision = self.runner._dispatcher.decide(region, (self._inputs,), {}, True)
        if decision.action is not Action.REPLAY:
            raise RuntimeError(f"decided {decision}")

    def _forward(self) -> Tensor:
        return self.net(self._inputs).square().mean()


def _complain(finding: Any) -> None:
    if not finding.reason.is_harmless:
        raise RuntimeError(str(finding))


def measure(sizes: Sequence[int], device: torch.device, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the times of trees of several sizes, in microseconds.

    The trees are measured in turn, round after round, so that what else the machine does for a while slows all alike.
    """
    torch.manual_seed(0)
    trees = [
        Tree(modules, CudaGraphBackend(device) if device.type == "cuda" else IdleBackend(device)) for modules in sizes
    ]
    # What another process takes of the processor is not counted; on a GPU the autograd pass has a thread of its own.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    steps = min(repeats, UNAUDITED_REPLAYS // rounds - WARM_UP)
    runs: list[dict[str, Any]] = [{"native_us": [], "guards_us": [], "step_us": []} for _ in trees]
    for tree, run in zip(trees, runs, strict=True):
        run["native_us"] += timed(lambda: (tree.native(), fence(device)), device, repeats, clock)  # noqa: B023
        tree.engage()
    for _ in range(rounds):
        for tree, run in zip(trees, runs, strict=True):
            run["guards_us"] += timed(tree.decide, device, repeats, time.thread_time)
            run["step_us"] += timed(tree.replay, device, steps, clock)
    for tree, run in zip(trees, runs, strict=True):
        run |= {"modules": sum(1 for _ in tree.net.modules()), "parameters": sum(1 for _ in tree.net.parameters())}
        run["buffers"] = sum(1 for _ in tree.net.buffers())
        tree.runner.close()
    return runs


def timed(run: Callable[[], Any], device: torch.device, repeats: int, clock: Callable[[], float]) -> list[float]:
    """Returns the microseconds of some calls; each begins with an idle device, and no garbage is collected."""
    for _ in range(WARM_UP):
        run()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            fence(device)
            started = clock()
            run()
            times.append((clock() - started) * 1e6)
    finally:
        gc.enable()
    return times


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each tree, from medians."""
    rows = []
    for run in runs:
        native, guards, step = (statistics.median(run[f"{what}_us"]) for what in ("native", "guards", "step"))
        rows.append(
            {
                "modules": run["modules"],
                "parameters": run["parameters"],
                "buffers": run["buffers"],
                "native step, us": round(native, 1),
                "guards, us": round(guards, 1),
                "replayed step on the host, us": round(step, 1),
                "guards to native step": round(guards / native, 4),
                "guards, us a tensor": round(guards / (run["parameters"] + run["buffers"]), 4),
                "guards, us a module": round(guards / run["modules"], 4),
            }
        )
    return rows


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the bars that are not met: a share of the native step, and a time for each tensor."""
    found = []
    for row in rows:
        if row["guards to native step"] > SHARE_BAR:
            found.append(f"{row['modules']} modules: guards take {row['guards to native step']:.1%} of the native step")
        if row["guards, us a tensor"] > TENSOR_BAR:
            found.append(f"{row['modules']} modules: guards take {row['guards, us a tensor']} us a tensor")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the receipt to write")
    parser.add_argument("--modules", nargs="+", type=int, default=list(MODULES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20, help="calls of each tree in a round")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    runs = measure(options.modules, device, options.rounds, options.repeats)
    rows = summarise(runs)
    growth = rows[-1]["guards, us a module"] / rows[0]["guards, us a module"]
    found = problems(rows)
    settings = {
        "what": "Microseconds of the host, medians of many calls. *Guards* is all that is compared before a replay;"
        " *replayed step* adds arguments, results, autograd and the handing over of gradients, but neither the loss of"
        f" Lightning nor the update. Bars: guards take at most {SHARE_BAR:.0%} of the native step (forward, backward,"
        f" AdamW with foreach, in plain torch) and {TENSOR_BAR} microseconds a tensor. From the smallest tree to the"
        f" largest, guards grow to {growth:.2f} times as much a module; bars not met: {len(found)}.",
        "workloads": {},
        "graphs": "CUDA graphs" if device.type == "cuda" else "do nothing",
        "rounds": options.rounds,
        "repeats": options.repeats,
        "threads": 1,
    }
    results = {"runs": runs, "summary": rows, "growth": growth, "problems": found}
    write(options.out, receipt("host_cost", settings, results, command_line("tests.benchmarks.host_cost")))
    for row in rows:
        print(row)
    print(f"guards a module, largest tree to smallest: {growth:.3f}")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
