# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Draws the receipts in docs/evidence as SVG files beside them, and a page of these. What was not measured is left out.

python -m tests.benchmarks.plots            draws what the receipts hold
python -m tests.benchmarks.plots --check    fails if a picture was drawn from other receipts, or by another script
"""

import argparse
import hashlib
import io
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from tests.benchmarks.render import EVIDENCE, receipts

Receipt = dict[str, Any]

# How much of the step is replayed, from nothing to all that a graph can hold.
STAGES = {
    "native": "native",
    "replay_no_norm": "network",
    "replay": "network + norm",
    "replay_step": "step",
    "full_iteration": "limit",
}

# What is drawn of a sweep of batch sizes.
SWEPT = {"native": "native", "replay": "replay", "replay_step": "replay, step scope"}

# One picture serves light and dark pages: no background, and tones that can be read on either.
TEXT = "#7a838f"
GRID = "#7a838f44"
COLOURS = {
    "native": "#8b94a0",
    "replay_no_norm": "#4f8fd6",
    "replay": "#2f6fd0",
    "replay_step": "#1f9d78",
    "full_iteration": "#a05fc4",
}
STYLE = {
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters, and the files small
    "svg.hashsalt": "lightning_replay",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


PAGE = "pictures.md"
_HEAD = "<!-- Written by tests/benchmarks/plots.py: edit nothing here. -->\n"


@dataclass(frozen=True)
class Picture:
    """A picture that can be drawn.

    Args:
        kind: The name of the receipts that it shows.
        holds: Returns how much of what it shows a receipt holds; 0 if there is nothing to draw.
        draw: Makes the figure.
        title: Its heading.
        caption: What is to be seen.
    """

    kind: str
    holds: Callable[[Receipt], int]
    draw: Callable[[Receipt], Figure]
    title: str
    caption: str


@dataclass(frozen=True)
class Drawing:
    """A picture of one receipt.

    Args:
        picture: The picture.
        content: The receipt.
        source: What the drawing says of its origin: the receipt and the script, by their hashes.
    """

    picture: Picture
    content: Receipt
    source: str

    def svg(self) -> str:
        """Returns the drawing, with the same bytes each time."""
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
            written = io.StringIO()
            metadata = {"Date": None, "Creator": None, "Description": self.source}
            self.picture.draw(self.content).savefig(written, format="svg", transparent=True, metadata=metadata)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="where the receipts are, and the pictures go")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a picture is out of date")
    options = parser.parse_args()
    due = drawings(options.folder)
    if not options.check:
        publish(options.folder, due)
        return 0
    stale = out_of_date(options.folder, due)
    for name in stale:
        print(f"{name} is not what the receipts say: run python -m tests.benchmarks.plots", file=sys.stderr)
    return 1 if stale else 0


def publish(folder: Path, due: dict[str, Drawing]) -> None:
    """Writes the drawings and their page, and takes away those that have no receipt."""
    for name in PICTURES.keys() - due.keys():
        (folder / name).unlink(missing_ok=True)
    for name, drawing in due.items():
        (folder / name).write_text(drawing.svg(), encoding="utf-8")
    (folder / PAGE).write_text(page(due), encoding="utf-8")


def drawings(folder: Path = EVIDENCE) -> dict[str, Drawing]:
    """Returns, by file name, the pictures for which there is a receipt.

    Of the complete ones that were measured on a GPU it is the one that holds most of the picture, else the newest.
    """
    found = {}
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    for name, picture in PICTURES.items():
        measured = [
            (picture.holds(content), content["written"], path.name, content)
            for path, content in receipts(folder)
            if content["name"] == picture.kind
            and content.get("complete", True)
            and content["device"]["gpu"]
            and picture.holds(content)
        ]
        if measured:
            *_, receipt, content = max(measured, key=lambda entry: entry[:3])
            digest = hashlib.sha256((folder / receipt).read_bytes()).hexdigest()[:12]
            source = f"Drawn by tests/benchmarks/plots.py {script} from {receipt} {digest}"
            found[name] = Drawing(picture, content, source)
    return found


def page(due: dict[str, Drawing]) -> str:
    """Returns the page that shows the drawings."""
    sections = []
    for name, drawing in due.items():
        device, written = drawing.content["device"]["gpu"], drawing.content["written"][:10]
        shown = drawing.picture
        sections.append(
            f"## {shown.title}\n\n![{shown.title}]({name})\n\n{shown.caption}\n\nMeasured on one {device}, {written}.\n"
        )
    return "\n".join([_HEAD, *(sections or ["No picture can be drawn yet.\n"])])


def out_of_date(folder: Path, due: dict[str, Drawing]) -> list[str]:
    """Returns the files that do not name the receipt and the script that are there, or have no receipt."""
    stale = [name for name in PICTURES.keys() - due.keys() if (folder / name).exists()]
    for name, drawing in due.items():
        if not (folder / name).exists() or drawing.source not in (folder / name).read_text(encoding="utf-8"):
            stale.append(name)
    if not (folder / PAGE).exists() or (folder / PAGE).read_text(encoding="utf-8") != page(due):
        stale.append(PAGE)
    return sorted(stale)


def count_stages(content: Receipt) -> int:
    """Returns how many stages beside the native one a receipt of step times holds, over all workloads."""
    return sum(len(STAGES.keys() & arms.keys()) - 1 for arms in content["summary"].values() if "native" in arms)


def waterfall(content: Receipt) -> Figure:
    """Draws what is left of a native step when more and more of it is replayed, one panel a workload."""
    panels = {model: [arm for arm in STAGES if arm in arms] for model, arms in content["summary"].items()}
    panels = {model: stages for model, stages in panels.items() if "native" in stages and len(stages) > 1}
    rows = max(map(len, panels.values()))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, (0.75 + 0.34 * rows) * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (model, stages) in zip(grid, panels.items(), strict=False):
        _fall(axes, content["summary"][model], stages)
        _title(axes, content["settings"]["workloads"][model])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _fall(axes: Axes, cells: dict[str, Any], stages: list[str]) -> None:
    """Draws one panel: a bar for each stage, and behind it, pale, what the stage before it took."""
    native = cells["native"]["median_ms"]
    before = native
    for row, arm in enumerate(stages):
        cell = cells[arm]
        taken = cell["median_ms"]
        axes.barh(row, max(before, taken), height=0.62, color=COLOURS[arm], alpha=0.22)
        axes.barh(row, taken, height=0.62, color=COLOURS[arm])
        axes.plot([cell["min_ms"], cell["max_ms"]], [row, row], color=TEXT, linewidth=1.2)
        share = "" if arm == "native" else f" ({taken / native:.2f})"
        axes.annotate(
            f"{taken:.1f} ms{share}",
            (max(before, taken, cell["max_ms"]), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
        before = taken
    axes.set_yticks(range(len(stages)), [STAGES[arm] for arm in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(cells[arm]["max_ms"] for arm in stages))
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def count_points(content: Receipt) -> int:
    """Returns how many points beside the native ones a sweep of batch sizes holds."""
    return sum(len(SWEPT.keys() & row.keys()) - 1 for row in content["summary"])


def step_time_by_batch(content: Receipt) -> Figure:
    """Draws the time of a step against the batch size, one panel a network."""
    networks = list(dict.fromkeys(row["network"] for row in content["summary"]))
    figure = Figure(figsize=(4.2 * len(networks), 3.2), layout="constrained")
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False).flat, networks, strict=True):
        rows = sorted((row for row in content["summary"] if row["network"] == network), key=lambda row: row["batch"])
        for arm, label in SWEPT.items():
            points = [(row["batch"], row[arm]) for row in rows if arm in row]
            if points:
                axes.plot(*zip(*points, strict=True), color=COLOURS[arm], label=label, marker="o", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["batch"] for row in rows])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(ScalarFormatter())
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_xlabel("batch size")
        axes.set_ylabel("ms a step")
        named = content["settings"]["workloads"][f"{network}/{rows[0]['batch']}"]
        _title(axes, named.rpartition(", batch ")[0])
        axes.legend()
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(textwrap.fill(text, 42), loc="left")


PICTURES = {
    "waterfall.svg": Picture(
        "step_time",
        count_stages,
        waterfall,
        "From native to the limit",
        "Milliseconds a step, and in brackets the share of the native time. A bar is the median over the runs of an\n"
        "arm, the thin line their range, and the pale part what the stage above took. *native* is Lightning as it is;\n"
        "*network* replays the forward and the backward pass, *norm* the clipping by norm, *step* all of\n"
        "`training_step`; *limit* is a whole iteration in one graph, written by hand outside of Lightning. A stage\n"
        "that was not measured is left out.",
    ),
    "step-time-by-batch.svg": Picture(
        "sweep",
        count_points,
        step_time_by_batch,
        "Step time against batch size",
        "Both axes are logarithmic. With small batches the host is the bottleneck, and a native step takes the time\n"
        "of its launches, whatever their size; with large ones the kernels are, and replay has little left to save.",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
