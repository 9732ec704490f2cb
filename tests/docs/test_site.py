# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The site builds without warnings and without a network, and needs none to be read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_replay

ROOT = Path(__file__).resolve().parents[2]

# A build that opens a connection fails, whichever library opens it.
BUILD = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        sys.exit(f"the build asked the network: {event} {arguments}")

sys.addaudithook(refuse)
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "doctrees"), "docs", str(out / "html")]
    command = [sys.executable, "-c", BUILD, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "html"


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+href="([^"]+)"', text)
        assert not [url for pair in loaded for url in pair if re.match(r"(https?:)?//", url)], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.slow
def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    names = set(lightning_replay.__all__) - {"__version__"}

    assert len(names) > 8
    assert {name for name in names if f'id="lightning_replay.{name}"' not in page} == set()


@pytest.mark.slow
def test_every_page_can_be_reached(site: Path) -> None:
    """Each page of the folder is built, and stands in the navigation of the first one."""
    index = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    for page in pages:
        if page.as_posix() not in ("index.md", "evidence/pictures.md"):
            assert f'href="{page.with_suffix(".html").as_posix()}"' in index, page
