# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Writes docs/why-native.md from the reasons that the package knows.

python docs/generate.py            writes the page
python docs/generate.py --check    fails if the page is out of date
"""

import argparse
import sys
from pathlib import Path

from lightning_replay import Reason

PAGE = Path(__file__).with_name("why-native.md")

_HEAD = """<!-- Written by docs/generate.py from lightning_replay/reasons.py: edit nothing here. -->

# Why is my model not replayed?

Ask the report. `strategy.report().reasons` counts the reasons met, by `Reason`; `strategy.report().messages` holds the
message of the first finding of each, with the module or the line of code concerned. A step may have several reasons:
one for each recorded module that ran natively, and one more where a recording was tried and refused.

A native step trains exactly as it would without this package. With `ReplayStrategy(on_native="error")` the first step
that is native for a reason outside of the normal life of a recording raises `NotReplayedError` with the same message.

A healthy run meets these reasons too: {harmless}. They are counted, but never warned about, and never an error.

The reasons that begin with `norm` concern clipping by the gradient norm alone, and are counted in
`strategy.report().norm_native`.
"""


def render() -> str:
    """Returns the page."""
    harmless = ", ".join(f"[`{reason.value}`](#{reason.value})" for reason in Reason if reason.is_harmless)
    sections = [f"## {reason.value}\n\n{reason.cause}\n\n**What to do:** {reason.cure}\n" for reason in Reason]
    return "\n".join([_HEAD.format(harmless=harmless), *sections])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == render():
        return 0
    print(f"{PAGE.name} is out of date: run python docs/generate.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
