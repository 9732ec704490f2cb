# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Developer commands: ``python -m nox -l`` lists them.

All sessions share one environment, since torch is large; the Lightning releases of the matrix are layered over it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MATRIX = nox.project.load_toml(ROOT / "compat" / "matrix.toml")
RELEASES: list[str] = MATRIX["lightning"]["releases"]
REPRESENTATIVES: list[str] = MATRIX["lightning"]["representatives"]
NEWEST = RELEASES[-1]
# What depends on the Lightning release.
MATRIX_TESTS = ["tests/callbacks", "tests/cli", "tests/compat", "tests/strategy", "tests/parity"]
# Those of them that are about networks and torch first, and take long: left out where time is short.
NETWORK_TESTS = [f"tests/parity/test_{name}.py" for name in ("changes", "models", "transforms")]

ENVIRONMENT = ROOT / ".nox" / "shared"
RESULTS = ROOT / ".nox" / "matrix"
BIN = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")

nox.options.sessions = ["tests"]

# nox would make an environment a session; torch is too large for that.
shared = nox.session(venv_backend="none")


@shared
def demo(session: nox.Session) -> None:
    """Train on handwritten digits, native and replayed, and compare the two as bits."""
    install(session, "demo")
    run(session, "python", "docs/examples/digits_demo.py", *session.posargs)


@shared
def tests(session: nox.Session) -> None:
    """Run everything that CI runs; with arguments, pytest alone."""
    install(session)
    if session.posargs:
        pytest(session, *session.posargs)
        return
    check_style(session)
    check_types(session)
    older = [release for release in REPRESENTATIVES if release != NEWEST]
    failed = run_matrix(session, older, *(f"--ignore={path}" for path in NETWORK_TESTS))
    pytest(session)
    report(session, failed)


@shared
def lint(session: nox.Session) -> None:
    """Check style, formatting and the direction of imports."""
    install(session)
    check_style(session)


@shared
def typing(session: nox.Session) -> None:
    """Check the types of the package."""
    install(session)
    check_types(session)


@shared
def matrix(session: nox.Session) -> None:
    """Run what depends on Lightning on one release either side of every change; arguments name other releases."""
    install(session)
    report(session, run_matrix(session, session.posargs or REPRESENTATIVES))


@shared
def matrix_full(session: nox.Session) -> None:
    """Run what depends on Lightning on every release and write the outcome into the documentation."""
    install(session)
    failed = run_matrix(session, RELEASES)
    run(session, "python", "compat/write_table.py", str(RESULTS))
    report(session, failed)


@shared
def inspect(session: nox.Session) -> None:
    """Inspect Lightning releases: nox -s inspect -- 2.6.6."""
    install(session)
    run(session, "python", "compat/inspect_release.py", *session.posargs)


@shared
def canary(session: nox.Session) -> None:
    """Inspect Lightning's master and fail where a pinned function changed: a warning of what is to come."""
    install(session)
    wheels = ROOT / ".nox" / "canary"
    shutil.rmtree(wheels, ignore_errors=True)
    source = "git+https://github.com/Lightning-AI/pytorch-lightning"
    run(
        session,
        "python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        source,
        PACKAGE_NAME="lightning",
    )
    (wheel,) = wheels.glob("lightning-*.whl")
    version = wheel.name.split("-")[1]
    run(session, "python", "compat/inspect_release.py", "--strict", "--wheels", str(wheels), version)


@shared
def packaging(session: nox.Session) -> None:
    """Build the distributions, install them and look inside."""
    install(session)
    pytest(session, "tests/packaging")


@shared
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors; nothing is fetched while it builds."""
    install(session, "docs")
    run(session, "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", str(ROOT / "build" / "docs"))


@shared
def bench(session: nox.Session) -> None:
    """Measure on a GPU and publish: nox -s bench -- NAME, or all. Without a GPU, render and draw the receipts."""
    install(session, "bench")
    run(session, "python", "-m", "tests.benchmarks", *session.posargs)


def install(session: nox.Session, group: str = "dev") -> None:
    """Bring the shared environment up to date: torch, this package in editable form, and a group of tools."""
    if not BIN.exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(ENVIRONMENT), external=True)
    tools = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), group)
    torch = "torch" if has_cuda() else f"torch=={MATRIX['torch']['tested']}"
    pip(session, torch, f"lightning=={NEWEST}", "hatchling", "editables", *tools)
    pip(session, "--no-deps", "--no-build-isolation", "--editable", ".")


def run(session: nox.Session, command: str, *arguments: str, **environment: str) -> None:
    """Run a command of the shared environment."""
    session.run(str(BIN / command), *arguments, env=environment, external=True)


def pip(session: nox.Session, *arguments: str) -> None:
    run(session, "python", "-m", "pip", "install", "--quiet", *arguments)


def has_cuda() -> bool:
    """Tell whether an NVIDIA driver answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True, check=False).returncode == 0


def check_style(session: nox.Session) -> None:
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "lint-imports")


def check_types(session: nox.Session) -> None:
    run(session, "mypy")


def pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    # Two processes with one thread each: tiny networks gain nothing from more threads.
    run(session, "python", "-m", "pytest", "--numprocesses=auto", *arguments, OMP_NUM_THREADS="1", **environment)


def run_matrix(session: nox.Session, releases: list[str], *arguments: str) -> list[str]:
    """Run the tests that depend on Lightning once a release and return the releases on which some failed."""
    paths = [path for path in MATRIX_TESTS if (ROOT / path).is_dir()]
    failed = []
    for release in releases:
        session.log(f"Lightning {release}")
        results = f"--junit-xml={RESULTS / release}.xml"
        try:
            given = {"EXPECTED_LIGHTNING": release, "TESTED_SCOPES": "network,step"}  # "auto" differs in warnings only
            pytest(session, *paths, *arguments, results, PYTHONPATH=str(layer(session, release)), **given)
        except nox.command.CommandFailed:
            failed.append(release)
    return failed


def report(session: nox.Session, failed: list[str]) -> None:
    if failed:
        session.error(f"failed on Lightning {', '.join(failed)}")


def layer(session: nox.Session, release: str) -> Path:
    """Return a folder that holds one Lightning release and nothing else, made at its first use."""
    folder = ROOT / ".nox" / "lightning" / release
    if not folder.exists():
        made = folder.with_name(f"{release}.{os.getpid()}")
        constraints = ROOT / "compat" / "constraints" / f"lightning-{release}.txt"
        names = ["lightning", "pytorch-lightning"]
        pip(session, "--no-deps", "--target", str(made), "--constraint", str(constraints), *names)
        made.rename(folder)
    return folder
