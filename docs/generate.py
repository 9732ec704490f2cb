# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Writes docs/why-native.md, and the table of changes in docs/limits.md, from what the package knows.

python docs/generate.py            writes both
python docs/generate.py --check    fails if one of them is out of date
"""

import argparse
import sys
from pathlib import Path

from lightning_replay import Reason
from lightning_replay.guards.changes import Change
from lightning_replay.reasons import Effect

PAGE = Path(__file__).with_name("why-native.md")
LIMITS = Path(__file__).with_name("limits.md")
CHANGES_TEST = "tests/guards/test_changes.py::test_effect"
BEGIN, END = "<!-- changes:begin, written by docs/generate.py -->", "<!-- changes:end -->"

_HEAD = """<!-- Written by docs/generate.py from lightning_replay/reasons.py: edit nothing here. -->

# Why is my model not replayed?

Ask the report. `strategy.report().reasons` counts the reasons met, by `Reason`; `strategy.report().messages` holds the
message of the first finding of each, with the module or the line of code concerned. A step may have several reasons:
one for each recorded module that ran natively, and one more where a recording was tried and refused. A replayed step
may have some too: where a network cannot be recorded as a whole, its reason is counted in each step, and those of its
parts that can be recorded are replayed.

A native step trains exactly as it would without this package. With `ReplayStrategy(on_native="error")` the first step
that is native for a reason outside of the normal life of a recording raises `NotReplayedError` with the same message.

A healthy run meets these reasons too: {harmless}. They are counted, but never warned about, and never an error.

Clipping by the gradient norm is counted by itself: `strategy.report().norm_native` has its reasons, and
`strategy.report().norm_messages` their messages. Those that begin with `norm` concern clipping alone; others, such as
`warm_up`, `recording` and `no_cuda`, are met there as well.
"""


def render() -> str:
    """Returns the page."""
    harmless = ", ".join(f"[`{reason.value}`](#{reason.value})" for reason in Reason if reason.is_harmless)
    sections = [f"## {reason.value}\n\n{reason.cause}\n\n**What to do:** {reason.cure}\n" for reason in Reason]
    return "\n".join([_HEAD.format(harmless=harmless), *sections])


def render_limits(page: str) -> str:
    """Returns the page of limits with its table of changes anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    meanings = "\n".join(f"**{effect.value.capitalize()}:** {effect.meaning}" for effect in Effect)
    heading = f"| What changes between two steps | What it leads to (`{CHANGES_TEST}`) |"
    rows = [f"| {change.value} | {change.effect.value} |" for change in Change]
    table = "\n".join([heading, "|---|---|", *rows])
    return f"{before}{BEGIN}\n{meanings}\nWhat leads to which:\n\n{table}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    check = parser.parse_args(arguments).check
    stale = []
    for page, text in ((PAGE, render()), (LIMITS, render_limits(LIMITS.read_text(encoding="utf-8")))):
        if check and not (page.exists() and page.read_text(encoding="utf-8") == text):
            stale.append(page.name)
        elif not check:
            page.write_text(text, encoding="utf-8")
    if stale:
        print(f"{' and '.join(stale)} out of date: run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
