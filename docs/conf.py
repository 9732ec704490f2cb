# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Sphinx: builds the pages of this folder, without a network. `python -m nox -s docs` runs it."""

import re
from enum import Enum
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

from lightning_replay import __version__

project = "lightning_replay"
author = "The lightning_replay developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["evidence/pictures.md"]  # a part of evidence/index.md

highlight_language = "none"  # unless a block names its language

html_theme = "furo"
html_title = f"lightning_replay {release}"
# Nothing of the time or the machine of a build goes into the pages.
html_last_updated_fmt = None
html_copy_source = False

myst_heading_anchors = 3  # headings are link targets, as on the pages of a repository
default_role = "code"  # `name` in a docstring
smartquotes = False
napoleon_use_ivar = True  # attributes of records are documented in their docstrings alone
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88


def move_links_out_of_headings(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts the link to a receipt below its heading: Sphinx cannot list a heading with a download in it."""
    if page == "evidence/README":
        source[0] = re.sub(r"^(## .+): (\[.+\]\(.+\))$", r"\1\n\nReceipt: \2", source[0], flags=re.MULTILINE)


def show_arguments(app: Sphinx, what: str, name: str, thing: Any, *_: Any) -> tuple[str, None] | None:
    """Shows the arguments of `__init__` where a class has a `__new__` too."""
    if what != "class" or "__new__" not in vars(thing) or issubclass(thing, Enum):
        return None
    return stringify_signature(signature(thing.__init__, bound_method=True), show_return_annotation=False), None


def setup(app: Sphinx) -> None:
    app.connect("source-read", move_links_out_of_headings)
    app.connect("autodoc-process-signature", show_arguments)
