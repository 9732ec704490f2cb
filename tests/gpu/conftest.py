# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What every GPU test needs: a device or a reason, deterministic cuBLAS, and a receipt of what was found.

Environment:
    LIGHTNING_REPLAY_REQUIRE_GPU=1 turns every skip in this folder into a failure.
    LIGHTNING_REPLAY_RECEIPT=FILE writes the verdicts of the parity cases there as JSON.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.parity import Verdict

# Read when the first cuBLAS handle is made, so it is set before anything starts CUDA.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_PROPERTY = "lightning_replay_verdict"
_VERDICTS: list[dict[str, Any]] = []


def _required() -> bool:
    return os.environ.get("LIGHTNING_REPLAY_REQUIRE_GPU", "0") not in {"", "0"}


@pytest.fixture(autouse=True)
def cuda() -> None:
    """Skips where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} sees none")


@pytest.fixture
def keep(record_property: Callable[[str, object], None]) -> Callable[[Verdict], None]:
    """Verdicts given to this go to the terminal summary and to the receipt, whether their test passes or not."""
    # A property of the test's report travels to the controlling process when tests are spread over several.
    return lambda verdict: record_property(_PROPERTY, json.dumps(verdict.as_dict()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _required():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"LIGHTNING_REPLAY_REQUIRE_GPU is set and the test did not run. {reason}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _VERDICTS.extend(json.loads(str(value)) for name, value in report.user_properties if name == _PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _VERDICTS:
        return
    terminalreporter.section("parity with native")
    for verdict in _VERDICTS:
        equal = "equal" if verdict["equal"] else "NOT equal"
        control = "native repeats itself" if verdict["control_equal"] else "native does NOT repeat itself"
        terminalreporter.line(
            f"{verdict['model']:<24} {verdict['precision']:<11} {verdict['steps_replayed']:>3} of {verdict['steps']}"
            f" steps replayed, {equal}; {control}"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("LIGHTNING_REPLAY_RECEIPT")
    if not path or not _VERDICTS or hasattr(session.config, "workerinput"):
        return
    from tests.benchmarks.receipt import command_line, receipt, write

    settings = {"optimizer": "AdamW", "gradient_clip_val": 1.0, "deterministic": "warn", "cudnn_benchmark": False}
    cases = sorted(_VERDICTS, key=lambda verdict: (verdict["model"], verdict["precision"]))  # workers end in any order
    write(path, receipt("parity", settings, {"cases": cases}, command_line("pytest")))
