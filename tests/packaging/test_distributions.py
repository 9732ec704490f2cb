# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Every kind of install brings the contracts and brings nothing else to the top level."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.xdist_group("packaging")]

ROOT = Path(__file__).parents[2]
PROBE = """
import importlib.util, json
from lightning_replay import __about__
from lightning_replay.compat import known_versions, load_contract
from lightning_replay.compat.contract import data_room
print(json.dumps({
    "package": __about__.__file__,
    "room": str(data_room()),
    "versions": known_versions(),
    "functions": [len(load_contract(version).functions) for version in known_versions()],
    "leaks": [name for name in ("compat", "tests", "docs") if importlib.util.find_spec(name)],
}))
"""


def run(*command, cwd):
    # The probes must see the environment they stand in, not the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout, since builds and editable installs leave traces."""
    copy = tmp_path_factory.mktemp("checkout") / "source"
    ignored = shutil.ignore_patterns(".git", ".nox", ".*_cache", "__pycache__", "dist", ".hypothesis", "lightning_logs")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def distributions(checkout):
    """The sdist, and the wheel built from that sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=checkout)
    (wheel,), (sdist,) = (checkout / "dist").glob("*.whl"), (checkout / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture
def install(tmp_path):
    """Install into an environment of its own that borrows only the dependencies, and look at it from elsewhere."""

    def install_and_probe(*what):
        environment = tmp_path / "environment"
        run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
        # A folder named in a .pth file is searched, but its own .pth files, editable installs included, are not run.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=tmp_path)
        return site, json.loads(run(python, "-W", "ignore", "-c", PROBE, cwd=tmp_path).splitlines()[-1])

    return install_and_probe


def assert_complete(facts):
    assert len(facts["versions"]) == 15
    assert min(facts["functions"]) > 100
    assert facts["leaks"] == []


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_distribution_reads_its_own_contracts(kind, distributions, install):
    site, facts = install(distributions[kind])
    assert_complete(facts)
    assert Path(facts["package"]).is_relative_to(site)
    assert Path(facts["room"]) == site / "lightning_replay" / "_contracts"


def test_an_install_of_the_folder_reads_its_own_contracts(checkout, install):
    site, facts = install(checkout)
    assert_complete(facts)
    assert Path(facts["room"]) == site / "lightning_replay" / "_contracts"


def test_an_editable_install_reads_the_checkout(checkout, install):
    _, facts = install("--editable", checkout)
    assert_complete(facts)
    assert Path(facts["package"]).parent == checkout / "lightning_replay"
    assert Path(facts["room"]) == checkout / "compat"


def test_the_wheel_holds_the_package_alone(distributions):
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        text = wheel.read(metadata).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_replay"}
    assert "lightning_replay/py.typed" in names
    assert "lightning_replay/_contracts/matrix.toml" in names
    assert not [name for name in names if name.startswith("lightning_replay/_contracts/") and name.endswith(".py")]
    assert not [name for name in names if "__pycache__" in name]
    for line in ("License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.10"):
        assert line in text.splitlines()
    required = {line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line}
    assert required == {
        "Requires-Dist: lightning!=2.6.2,!=2.6.3,<2.7,>=2.4",
        "Requires-Dist: packaging",
        "Requires-Dist: torch>=2.4",
    }


def test_the_sdist_holds_what_a_build_and_its_tests_need(distributions):
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    for name in ("LICENSE", "README.md", "hatch_build.py", "compat/contracts/lightning-2.4.0.json", "compat/pins.toml"):
        assert name in names
    assert any(name.startswith("tests/compat/") for name in names)
    assert not any(name.startswith((".git/", ".nox")) for name in names)


def test_every_python_file_names_its_licence():
    head = "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: The lightning_replay developers\n"
    tracked = run("git", "ls-files", "*.py", cwd=ROOT).split() if (ROOT / ".git").exists() else []
    paths = [ROOT / name for name in tracked] or list((ROOT / "lightning_replay").rglob("*.py"))
    assert [
        str(path) for path in paths if path.exists() and not path.read_text(encoding="utf-8").startswith(head)
    ] == []
