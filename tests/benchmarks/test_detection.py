# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The detector, its targets, and what is made of the measurements of its complete fits."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.benchmarks import detection
from tests.benchmarks.clock import StepClock
from tests.benchmarks.detector import STRIDES, Detector, dense_loss, generalized_iou
from tests.benchmarks.photographs import KINDS, dense_targets
from tests.benchmarks.receipt import ROOT, receipt, write


def test_detector_has_about_400_parameters_and_two_outputs_a_level() -> None:
    detector = Detector()
    with torch.no_grad():
        outputs = detector.net(torch.zeros(1, 3, 64, 64))

    assert 390 <= len(list(detector.parameters())) <= 410
    assert [(kinds.shape, sides.shape) for kinds, sides in outputs] == [
        ((1, KINDS, 64 // stride, 64 // stride), (1, 4, 64 // stride, 64 // stride)) for stride in STRIDES
    ]


def test_generalized_iou_of_known_boxes() -> None:
    box = torch.tensor([[1.0, 1.0, 1.0, 1.0]])  # 2 by 2 around the point

    assert generalized_iou(box, box).item() == pytest.approx(1.0, abs=1e-5)
    # Half of it: no empty space in the hull.
    assert generalized_iou(box, torch.tensor([[1.0, 1.0, 0.0, 1.0]])).item() == pytest.approx(0.5, abs=1e-5)
    # A wide and a high one: they share 4 of 12, and the hull of 16 has 4 that are empty.
    wide, high = torch.tensor([[2.0, 1.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    assert generalized_iou(wide, high).item() == pytest.approx(4 / 12 - 4 / 16, abs=1e-5)


def test_points_get_the_smallest_object_of_their_level() -> None:
    boxes = torch.tensor([[0.0, 0.0, 64.0, 64.0], [0.0, 0.0, 8.0, 8.0]])

    classes, distances, positive = dense_targets(boxes, torch.tensor([2, 0]), size=64)

    fine, middle, coarse = positive.split([64, 16, 4])
    assert fine.nonzero().flatten().tolist() == [0]
    assert middle.sum() == 0
    assert coarse.tolist() == [1, 1, 1, 1]
    assert classes[0].tolist() == [1, 0, 0]
    assert classes[80].tolist() == [0, 0, 1]
    assert (distances[0] * 8).tolist() == [4, 4, 4, 4]
    assert (distances[80] * 32).tolist() == [16, 16, 48, 48]
    assert classes[1].tolist() == [0, 0, 0]


def test_targets_themselves_are_the_best_prediction() -> None:
    boxes = torch.tensor([[0.0, 0.0, 64.0, 64.0], [8.0, 8.0, 15.0, 14.0]])
    targets = [target[None] for target in dense_targets(boxes, torch.tensor([1, 0]), size=64)]
    sizes = [(64 // stride) ** 2 for stride in STRIDES]

    def loss(shift: float) -> float:
        logits = (targets[0] * 40 - 20).transpose(1, 2).split(sizes, dim=2)
        raw = (targets[1] + shift).expm1().clamp(min=1e-6).log().transpose(1, 2).split(sizes, dim=2)
        return float(dense_loss(tuple(zip(logits, raw, strict=True)), *targets))

    assert loss(0.0) == pytest.approx(0.0, abs=1e-4)
    assert loss(0.1) > loss(0.05) > loss(0.0)


def test_no_window_spans_two_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tests.benchmarks.clock.time.perf_counter", lambda: now)
    clock, module, loss = StepClock(skip=2, window=2), LightningModule(), torch.zeros(())
    for epoch in range(2):
        now += 100.0
        clock.on_train_epoch_start(None, module)
        for step in range(5):
            now += 0.001
            clock.tick(module.device, loss, f"{epoch}{step}")

    # The fifth step of each epoch is left over.
    assert clock.windows_ms == pytest.approx([1.0, 1.0, 1.0])
    assert sorted(clock.timed_actions) == ["02", "03", "10", "11", "12", "13"]
    assert len(clock.losses) == 10


def _run(arm: str, pair: int, seconds: float, **changes: Any) -> dict[str, Any]:
    run = {"model": "detector", "arm": arm, "pair": pair, "fit_seconds": seconds, "process_seconds": seconds + 10}
    run |= {"windows_ms": [seconds], "losses_sha256": "a", "weights_sha256": "b", "metrics": {"val_loss": "0x1p+0"}}
    return run | {"norm_replays": 0, **changes}


def test_what_an_arm_saves_is_held_against_its_base() -> None:
    runs = [_run(arm, pair, s + pair) for pair in range(3) for arm, s in [("native", 9.0), ("replay_no_norm", 4.0)]]

    native, replay = detection.summarise(runs)

    assert native["fit s"] == "10.000 (9.000 to 11.000)"
    assert (native["compared with"], native["fit saved"]) == ("", "")
    assert (replay["compared with"], replay["fit saved"], replay["process saved"]) == ("native", "50.0%", "25.0%")
    assert detection.problems(runs, [native, replay]) == []


def test_other_bits_and_missing_norms_are_problems() -> None:
    runs = [_run("native", 0, 9.0), _run("replay", 0, 4.0, metrics={"val_loss": "0x0p+0"})]

    assert detection.problems(runs, detection.summarise(runs)) == [
        "detector, replay: losses, metrics or weights differ",
        "detector, replay: 0 norms were replayed",
    ]


def test_pairs_are_added_to_a_receipt_of_the_same_kind_only(tmp_path: Path) -> None:
    same = {"models": ["detector"], "arms": ["native"], "epochs": 3, "steps": 45, "device": "cpu", "backend": "tape"}
    options = argparse.Namespace(**same, out=tmp_path / "a.json")
    write(options.out, receipt("detection", same, {"runs": [_run("native", 0, 9.0)]}))

    assert [run["pair"] for run in detection.earlier(options)] == [0]
    options.steps = 60
    with pytest.raises(ValueError, match=r"a\.json: made with other settings"):
        detection.earlier(options)


@pytest.mark.slow
def test_complete_fits_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="the photographs of scikit-learn are read with Pillow")
    words = "--device cpu --backend tape --models tiny_detector --arms native replay --pairs 1 --epochs 2 --steps 16"
    command = [sys.executable, "-m", "tests.benchmarks.detection", *words.split(), "--out", str(tmp_path / "a.json")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    native, replay = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert replay["timed_actions"] == {"replay": 15}
    assert replay["report"]["steps_replayed"] == 28
    assert replay["norm_replays"] > 0
    assert list(native["metrics"]) == ["val_loss"]
    assert [replay[key] == native[key] for key in detection.EQUAL] == [True, True, True]
