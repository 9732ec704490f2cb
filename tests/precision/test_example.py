# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The example that logs the gradient norm."""

import csv

import pytest
import torch

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
