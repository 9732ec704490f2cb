# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What each test leaves as it found it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic_algorithms() -> Iterator[None]:
    """`Trainer(deterministic=True)` switches them on for the process, and inductor then makes other code."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
