# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Scenarios run with each scope."""

from tests.parity.scopes import pytest_pyfunc_call, scope  # noqa: F401
