# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers

"""M. Threads, streams, garbage, devices, processes, and the life of graphs."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_replay import Reason
from tests.field.conftest import Field
from tests.parity.harness import CLASSES, FEATURES, Arm, Learner, batches, classify, loader, mlp

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Growing(Dataset):
    """Batches of ever more bytes, of which the network uses a part."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        rows = 4 + index % 3
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        return torch.randn(rows, FEATURES, generator=generator), labels, torch.zeros(1024 * (index + 1))


def first_two(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1])


@pytest.mark.parametrize("side_stream", [False, True])
def test_f41_loader_threads_pin_memory_while_graphs_are_captured(gpu_field: Field, side_stream: bool) -> None:
    stop = threading.Event()

    def copies() -> None:
        stream = torch.cuda.Stream()
        generator = torch.Generator()  # the default one is the training's
        while not stop.is_set():
            with torch.cuda.stream(stream):
                torch.randn(1000, generator=generator).pin_memory().to("cuda", non_blocking=True)

    thread = threading.Thread(target=copies)
    if side_stream:
        thread.start()
    try:
        for _ in range(3):
            data = lambda: (  # noqa: E731
                DataLoader(Growing(), batch_size=None, num_workers=4, pin_memory=True, persistent_workers=True),
                None,
            )
            trace = gpu_field.both(lambda: Learner(mlp(), first_two), data)
            assert trace.actions.count("record") == 3
    finally:
        stop.set()
        if side_stream:
            thread.join()


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", classify(self, batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", classify(self, batch, batch_idx))


def with_validation() -> Any:
    return loader(batches(), 12)[0], loader(batches(size=7, seed=1), 6)[0]


def test_f42_training_and_validation_in_turn(field: Field) -> None:
    trace = field.replayed(lambda: Validated(mlp()), with_validation, val_check_interval=3, num_sanity_val_steps=2)

    assert "val" in trace.metrics


def test_f42_validation_and_test_after_the_fit(field: Field) -> None:
    found = []
    for strategy in ("auto", field.strategy()):
        torch.manual_seed(1)
        trainer = Trainer(accelerator=field.accelerator, devices=1, max_epochs=1, strategy=strategy, **QUIET)
        module = Validated(mlp())
        trainer.fit(module, *with_validation())
        validated = trainer.validate(module, with_validation()[1], verbose=False)
        found.append((validated, trainer.test(module, with_validation()[1], verbose=False)))
    assert found[0] == found[1]


def test_f43_inference_before_training(field: Field) -> None:
    ends = []
    for strategy in ("auto", field.strategy()):
        torch.manual_seed(1)
        module = Validated(mlp(0.0))
        Trainer(accelerator=field.accelerator, devices=1, strategy=strategy, **QUIET).validate(
            module, with_validation()[1], verbose=False
        )
        trainer = Trainer(
            accelerator=field.accelerator, devices=1, max_epochs=1, strategy=strategy, num_sanity_val_steps=2, **QUIET
        )
        trainer.fit(module, *with_validation())
        ends.append({k: v.cpu() for k, v in module.state_dict().items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert strategy.report().steps_replayed == 9


def test_f44_garbage_with_graphs_in_it_is_collected_during_a_capture(field: Field) -> None:
    """A dropped model in a cycle, and a collector that runs at every allocation."""
    threshold = gc.get_threshold()

    def drop() -> None:
        arm = Arm(lambda: Learner(mlp()), batches(), field.strategy(), accelerator=field.accelerator)
        assert arm.error is None
        cycle: list[Any] = [arm]
        cycle.append(cycle)

    drop()
    gc.set_threshold(1)
    try:
        data = [batch for size in (4, 5, 6) for batch in batches(size=size, count=1)]
        trace = field.both(lambda: Learner(mlp()), data, steps=13)
        assert gc.get_threshold()[0] == 1
        assert gc.isenabled()
        assert len(trace.report.recordings) == 3
    finally:
        gc.set_threshold(*threshold)


def test_f45_more_shapes_than_recordings_in_rotation(field: Field) -> None:
    data = [batch for size in range(2, 8) for batch in batches(size=size, count=1)]
    trace = field.both(lambda: Learner(mlp()), data, steps=60, strategy={"max_recordings": 3}, precision="bf16-mixed")

    assert len(trace.report.recordings) == 3
    assert trace.actions[-7:].count("replay") >= 3


def test_f45_a_recording_gives_way_and_the_others_stay_usable(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replay.dispatch.EVICTION_AGE", 4)
    order = [4, 5] * 6 + [6, 5] * 6 + [4, 6] * 6 + [5, 6] * 6
    data = [batch for size in order for batch in batches(size=size, count=1)]
    trace = field.both(lambda: Learner(mlp()), data, steps=len(order), strategy={"max_recordings": 2})

    assert len(trace.report.recordings) > 3
    assert trace.actions[-3:-1] == ["replay"] * 2


def test_f45_a_graph_of_the_users_own_is_dropped(gpu_field: Field) -> None:
    class Graphing(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.device.type == "cuda" and batch_idx == 0:
                matrix = torch.randn(64, 64, device=self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    matrix @ matrix
                graph.replay()
                del graph
            super().validation_step(batch, batch_idx)

    trace = gpu_field.both(lambda: Graphing(mlp()), with_validation, val_check_interval=3, max_epochs=3)
    assert "replay" in trace.actions


def test_f46_another_device(gpu_field: Field) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    ends = []
    for strategy in ("auto", gpu_field.strategy()):
        torch.manual_seed(1)
        module = Learner(mlp(0.0))
        Trainer(accelerator="gpu", devices=[1], max_epochs=1, strategy=strategy, **QUIET).fit(
            module, loader(batches(), 8)[0]
        )
        ends.append(module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_f47_a_loss_kept_with_its_graph(field: Field) -> None:
    class Remembering(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.previous = loss
            return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*AccumulateGrad.*")
        trace = field.both(lambda: Remembering(mlp()), steps=10)
    assert "record" in trace.actions
    if "replay" not in trace.actions:
        assert Reason.PENDING in trace.report.reasons


def test_f48_two_devices_are_refused_in_words(field: Field) -> None:
    with pytest.raises(ValueError, match="devices=2") as error:
        Trainer(accelerator="cpu", devices=2, strategy=field.strategy())
    assert "to do:" in str(error.value)


ALONE = """
import sys, torch
import torch.distributed as dist
from tests.field.conftest import Field
from tests.parity.harness import Learner, mlp
if sys.argv[2] == "group":
    dist.init_process_group("gloo" if sys.argv[1] == "tape" else "nccl", rank=0, world_size=1,
                            init_method="file://" + sys.argv[3])
Field(sys.argv[1]).replayed(lambda: Learner(mlp()))
if sys.argv[2] == "group":
    dist.destroy_process_group()
print("equal")
"""


@pytest.mark.parametrize("kind", ["group", "torchrun"])
def test_f48_f49_one_process_of_a_distributed_job(field: Field, tmp_path: Path, kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if kind == "torchrun":  # what it sets for the only process of a job
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-W", "ignore", "-c", ALONE, field.backend, kind, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


class AlwaysWaits(nn.Module):
    """Has large activations and waits at its end, so that no recording is ever made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 2**17)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.net(inputs).view(len(inputs), CLASSES - 1, -1).mean(2)
        return hidden * (1.0 if hidden.sum().item() > 1e9 else 0.5)


def test_f50_what_cannot_be_captured_costs_nothing(field: Field) -> None:
    data = [(inputs, labels % 2) for size in range(4, 8) for inputs, labels in batches(size=size, count=1)]
    trace = field.native(lambda: Learner(AlwaysWaits()), Reason.HOST_SYNC, data, steps=12)
    assert trace.report.steps_replayed == 0


def test_f50_memory_after_failed_captures(gpu_field: Field) -> None:
    data = [(inputs, labels % 2) for size in range(190, 200) for inputs, labels in batches(size=size, count=1)]
    reserved = []
    for strategy in ("auto", gpu_field.strategy()):
        gc.collect()
        torch.cuda.empty_cache()
        arm = Arm(lambda: Learner(AlwaysWaits()), data, strategy, accelerator="gpu", steps=40)
        assert arm.error is None
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= 1.1 * reserved[0]
