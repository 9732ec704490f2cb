# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Runs every scenario of a folder with each scope. A folder's conftest imports both names.

TESTED_SCOPES in the environment names fewer of them, with commas between.
"""

import os
from collections.abc import Iterator

import pytest

from tests.parity import harness

__all__ = ["pytest_pyfunc_call", "scope"]


@pytest.fixture(autouse=True, params=os.environ.get("TESTED_SCOPES", "network,step,auto").split(","))
def scope(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scope of the strategies that a scenario makes."""
    monkeypatch.setattr(harness, "SCOPE", request.param)
    monkeypatch.setattr(harness, "compared", 0)
    return str(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Ends a scenario of another scope than "network" well, if all its runs were equal to native until then."""
    try:
        return (yield)
    except harness.NotEqualError:
        raise
    except Exception:
        if harness.SCOPE == "network" or not harness.compared:
            raise
        return True
