# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The example that logs the gradient norm."""

import csv

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_replay import Reason, ReplayStrategy
from tests.demo.examples import load_example


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="this torch records no norm")
@pytest.mark.filterwarnings("ignore")
def test_norms_are_logged_and_replayed(tmp_path):
    torch.manual_seed(0)
    file, report = load_example("log_gradient_norm").train(tmp_path, steps=30)
    rows = list(csv.DictReader(file.open()))
    norms = [float(row["gradient_norm"]) for row in rows]
    assert len(norms) == 3
    assert all(norm > 0 for norm in norms)
    assert report.norm_replays >= 20
    assert report.norm_copied == 0
    assert report.norm_native == {Reason.WARM_UP: 6, Reason.RECORDING: 1} or torch.cuda.is_available()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("captures", [None, False, True], ids=["native", "not captured", "captured"])
def test_its_module_trains_with_any_strategy(captures):
    strategy = "auto" if captures is None else ReplayStrategy(backend="tape", capture_gradient_norm=captures)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        gradient_clip_val=1.0,
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer.fit(load_example("log_gradient_norm").Regression(), DataLoader(data, batch_size=8))
    assert trainer.global_step == 8
    assert ("gradient_norm" in trainer.callback_metrics) is (captures is True)
