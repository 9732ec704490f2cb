# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Renders the receipts in docs/evidence: a page beside them, and figures of other pages. No figure is typed by hand.

python -m tests.benchmarks.render            writes them all
python -m tests.benchmarks.render --check    fails if one of them is not what the receipts say
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.receipt import ROOT, SCHEMA

EVIDENCE = ROOT / "docs" / "evidence"
README = ROOT / "README.md"
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

_HEAD = """# Evidence

Rendered from the receipts in this folder by `python -m tests.benchmarks.render`: edit nothing here. A receipt is
written by the program that measured and holds raw numbers, settings, versions, device and the hashes of the package's
sources.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="where the receipts are")
    parser.add_argument("--readme", type=Path, default=README, help="the README with the two markers")
    parser.add_argument("--explanation", type=Path, default=HOW_IT_WORKS, help="the page of the host's time, likewise")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is out of date")
    options = parser.parse_args()
    pages = rendered(options.folder, options.readme, options.explanation)
    if not options.check:
        publish(pages)
        return 0
    stale = [target for target, page in pages.items() if not target.exists() or target.read_text("utf-8") != page]
    for target in stale:
        print(f"{target} is not what the receipts say: run python -m tests.benchmarks.render", file=sys.stderr)
    return 1 if stale else 0


def rendered(folder: Path = EVIDENCE, path: Path = README, explained: Path = HOW_IT_WORKS) -> dict[Path, str]:
    """Returns what the receipts make of the page of evidence, of the README and of the explanation."""
    return {
        folder / "README.md": render(folder),
        path: readme(path, folder),
        explained: with_section(explained, host_time(folder)),
    }


def publish(pages: dict[Path, str]) -> None:
    """Writes pages."""
    for target, page in pages.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")


def readme(path: Path = README, folder: Path = EVIDENCE) -> str:
    """Returns a README whose section of figures is what the receipts say.

    Raises:
        ValueError: if the README does not have both markers once, in order.
    """
    return with_section(path, figures(folder))


def with_section(path: Path, section: str) -> str:
    """Returns a page with other text between its two markers.

    Raises:
        ValueError: if it does not have both markers once, in order.
    """
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"{path.name}: expected {BEGIN} and {END}, once each and in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}"


def host_time(folder: Path = EVIDENCE) -> str:
    """Returns the explanation's table of the host's time."""
    found = [content for _, content in receipts(folder) if content["name"] == "host_time"]
    return f"{summary(found[0])}\n\n{_provenance(found[0])}" if found else "No figures are published yet."


def figures(folder: Path = EVIDENCE) -> str:
    """Returns the README's section of figures: the default arm beside its peers.

    They are those of a complete receipt that was measured on a GPU, of the one with the most arms, else of the newest.
    """
    measured = [
        (len(content["settings"].get("arms", ())), content["written"], path.name, content)
        for path, content in receipts(folder)
        if content["name"] == "step_time" and content["complete"] and content["device"]["gpu"] and _has_default(content)
    ]
    if not measured:
        return "No figures are published yet."
    *_, name, content = max(measured, key=lambda found: found[:3])
    present = [arm for arm in _SHOWN_ARMS if any(arm in arms for arms in content["summary"].values())]
    rows = [
        [content["settings"]["workloads"][model], *(_time_and_gain(arms, arm) for arm in present)]
        for model, arms in content["summary"].items()
    ]
    lines = [
        f"{_conditions(content)} In brackets: how many times faster than native.",
        "",
        *_table(["workload", *(f"{_SHOWN_ARMS[arm]}, ms" for arm in present)], rows),
        "",
        _provenance(content),
        "",
        f"Receipt with the raw numbers: [{name}](docs/evidence/{name}). All arms, ranges and memory, and the other"
        " benchmarks: [evidence](docs/evidence/README.md).",
    ]
    return "\n".join(lines)


_SHOWN_ARMS = {
    "native": "native",
    "graphed_callables": "`make_graphed_callables` by hand",
    "compile_reduce_overhead": '`torch.compile(mode="reduce-overhead")`',
    "replay": "`ReplayStrategy()`",
    "replay_step": '`ReplayStrategy(scope="step")`',
    "full_iteration": "limit: a whole step in one graph, without Lightning",
}


def _time_and_gain(arms: dict[str, Any], arm: str) -> str:
    if arm not in arms:
        return ""
    time = arms[arm]["median_ms"]
    if arm == "native" or "native" not in arms:
        return f"{time:.3f}"
    return f"{time:.3f} ({arms['native']['median_ms'] / time:.1f})"


def _has_default(content: dict[str, Any]) -> bool:
    """Tells whether step times are those of what a user gets without further arguments, among others."""
    return any("replay" in arms for arms in content["summary"].values())


def render(folder: Path = EVIDENCE) -> str:
    """Returns the whole page."""
    sections = [_section(path.name, content) for path, content in receipts(folder)]
    return "\n".join([_HEAD, *sections]) if sections else _HEAD + "\nNo receipt yet.\n"


def receipts(folder: Path = EVIDENCE) -> list[tuple[Path, dict[str, Any]]]:
    """Returns every receipt of a folder, in the order of their names.

    Raises:
        ValueError: for a JSON file that is no receipt.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}: not a receipt of schema {SCHEMA}")
        found.append((path, content))
    return found


_FURTHER_ARMS = {
    "replay_step": '`ReplayStrategy(scope="step")`',
    "compile_default": "the network in `torch.compile`",
    "compile_reduce_overhead": 'the network in `torch.compile(mode="reduce-overhead")`',
    "compile_cudagraphs": 'the network in `torch.compile(backend="cudagraphs")`',
    "full_iteration": "the limit: the step written by hand outside of Lightning, captured whole as one CUDA graph",
}
# Of later receipts: an earlier one has none of these figures.
_OPTIONAL_COLUMNS = {"ratio_to_full_iteration": "to full iteration", "update_host_ms": "update on the host, ms"}


def _conditions(content: dict[str, Any]) -> str:
    settings = content["settings"]
    return (
        f"Milliseconds a step inside `Trainer.fit`: {settings['precision']}, {settings['optimizer']}, clip"
        f" {settings['clip']}; {settings['repeats']} fresh processes an arm in turn, {settings['steps']} steps each,"
        f" windows of {settings['window']} steps after the first {settings['skip']}, fenced."
    )


def step_time(content: dict[str, Any]) -> str:
    """Renders step times: median over runs of the median window, with the range of the runs."""
    settings = content["settings"]
    lines = [
        _conditions(content),
        "",
        "Arms: *native* is Lightning as it is; *graphed callables* the network wrapped by hand in"
        " `torch.cuda.make_graphed_callables`; *replay* `ReplayStrategy()`, *replay no clip* the same without clipping;"
        " *norm only* `ReplayPrecision` alone on a native run. Where the host is the bottleneck, runs of one arm differ"
        " by as much as their ranges say, and a difference inside the ranges says nothing.",
        "",
    ]
    further = [f"*{_spelt(arm)}* {what}" for arm, what in _FURTHER_ARMS.items() if arm in settings.get("arms", ())]
    if further:
        lines += [f"Further arms: {'; '.join(further)}.", ""]
    if settings.get("unlike"):
        lines += ["What is not Lightning's own way:", "", *(f"- {text}" for text in settings["unlike"]), ""]
    if not content["complete"]:
        lines += ["**The run was cut short.**", ""]
    headers = [
        "workload",
        "arm",
        "ms a step (range)",
        "to native",
        "to graphed callables",
        "to no clipping",
        "clipping on the host, ms",
        "allocated MiB",
        "reserved MiB",
    ]
    cells = [cell for arms in content["summary"].values() for cell in arms.values()]
    optional = {key: head for key, head in _OPTIONAL_COLUMNS.items() if any(key in cell for cell in cells)}
    headers += optional.values()
    rows = []
    for model, arms in content["summary"].items():
        for arm, cell in arms.items():
            rows.append(
                [
                    settings["workloads"][model],
                    _spelt(arm),
                    f"{cell['median_ms']:.3f} ({cell['min_ms']:.3f} to {cell['max_ms']:.3f})",
                    _ratio(cell.get("ratio_to_native")),
                    _ratio(cell.get("ratio_to_graphed_callables")),
                    _ratio(cell.get("ratio_to_replay_no_clip")),
                    _ratio(cell.get("clip_host_ms")),
                    _mib(cell.get("peak_allocated_bytes")),
                    _mib(cell.get("peak_reserved_bytes")),
                    *(_ratio(cell.get(key)) for key in optional),
                ]
            )
    lines += _table(headers, rows)
    errors = sorted({f"- {run['model']}, {run['arm']}: {run['error']}" for run in content["runs"] if "error" in run})
    return "\n".join(lines + (["", "Failed:", "", *errors] if errors else []))


def parity(content: dict[str, Any]) -> str:
    """Renders parity cases; a case whose native control differs is never called equal."""
    rows = []
    for case in content["cases"]:
        verdict = "equal" if case["equal"] else "**not equal**"
        rows.append(
            [
                case["model"],
                case["precision"],
                f"{case['steps_replayed']} of {case['steps']}",
                "yes" if case["control_equal"] else "no",
                verdict if case["control_equal"] else f"not judged ({'equal' if case['equal'] else 'differs'})",
                ", ".join(f"`{operation}`" for operation in case["nondeterministic"]) or "none",
            ]
        )
    headers = [
        "model",
        "precision",
        "steps replayed",
        "native repeats itself",
        "replay against native",
        "declared nondeterministic",
    ]
    intro = (
        "Losses, gradients of every step, parameters, buffers, optimizer and scaler state, logged values and random"
        " generators, compared as bits with a native run; a second native run is the control."
    )
    return "\n".join([intro, "", *_table(headers, rows)])


def summary(content: dict[str, Any]) -> str:
    """Renders a receipt whose summary is a list of rows, under what it says of itself."""
    rows = content["summary"]
    headers = list(rows[0]) if rows else []
    workloads = content["settings"]["workloads"]
    cells = [[str(workloads.get(value, value)) for value in row.values()] for row in rows]
    return "\n".join([content["settings"]["what"], "", *_table(headers, cells)])


def sweep(content: dict[str, Any]) -> str:
    """Renders a sweep of batch sizes; an arm that failed at one of them leaves its cells empty."""
    headers = list(dict.fromkeys(name for row in content["summary"] for name in row))
    rows = [[str(row.get(name, "")) for name in headers] for row in content["summary"]]
    return "\n".join([content["settings"]["what"], "", *_table([_spelt(name) for name in headers], rows)])


def zoo(content: dict[str, Any]) -> str:
    """Renders the zoo: its shares, a row for each model and precision, and what did not run."""
    settings, shares = content["settings"], content["summary"]
    sentences = [
        f"Each model and precision is trained for {settings['steps']} steps inside `Trainer.fit`, natively and with"
        " replay, with deterministic algorithms and without, and natively once more as the control. Compared as bits:"
        " losses of all steps, gradients of the last, weights, buffers and random generators.",
        f"Of {shares['ran']} that ran, {_share(shares['replay_some_region'])} replay some region and"
        f" {_share(shares['replay_whole_network'])} their whole network.",
        f"With deterministic algorithms: {_counts(shares['deterministic'])}; without: {_counts(shares['free'])}.",
        f"The speed-up is a single run of small networks, the median of the last {settings['timed_steps']} steps, each"
        f" fenced, with {settings['jobs']} processes side by side: a hint, not a measurement.",
    ]
    lines = [" ".join(sentences), ""]
    if not content["complete"]:
        lines += ["**The run was cut short.**", ""]
    rows, others = [], []
    for row in content["rows"]:
        if "replayed" not in row:
            others.append(f"- {row['model']}, {row['precision']}: {row.get('not_run') or row['error']}")
            continue
        strict, free = row["deterministic"], row["free"]
        named = [f"`{region}`" for region in row["regions"][:3]]
        more = [f"{len(row['regions']) - 3} more"] if len(row["regions"]) > 3 else []
        partly = f": {', '.join(named + more)}" if row["replayed"] == "some regions" else ""
        rows.append(
            [
                row["model"],
                row["precision"],
                row["replayed"] + partly,
                f"{free['steps_replayed']} of {free['steps']}",
                ", ".join(f"`{reason}` {count}" for reason, count in row["reasons_needing_cure"].items()),
                f"{strict['verdict']}{' (warn)' if strict['mode'] == 'warn' else ''}",
                free["verdict"],
                f"{row['speed_up']:.2f}",
            ]
        )
    headers = ["model", "precision", "replayed", "steps", "native calls by reason", "deterministic", "else", "speed-up"]
    lines += _table(headers, rows)
    return "\n".join(lines + (["", "Did not run:", "", *others] if others else []))


def statemachine(content: dict[str, Any]) -> str:
    """Renders a run of the state machine."""
    settings, actions = content["settings"], content["actions"]
    rows = [
        ["sequences of events", str(content["sequences"])],
        ["steps compared as bits", str(content["steps"])],
        ["of them replayed", str(actions["replay"])],
        ["events", str(sum(content["events"].values()))],
        ["kinds of events", str(len(content["events"]))],
        ["sequences ended by a declared error", str(sum(content["ended_by_a_declared_error"].values()))],
        ["differences from native", str(content["differences"])],
    ]
    intro = (
        f"Random sequences of {settings['events']} events (seed {settings['seed']}): each changes something that a"
        " recording depends on, in a native and in a replayed training, which are compared after every step."
    )
    return "\n".join([intro, "", *_table(["what", "count"], rows)])


def mutation(content: dict[str, Any]) -> str:
    """Renders which event or test notices that a guard is switched off."""
    # What differs is enough to read; both values are in the receipt.
    noticed = [(row["caught_by"] or "**nothing**").partition(": native ")[0] for row in content["guards"]]
    rows = [[row["guard"], _cell(text)] for row, text in zip(content["guards"], noticed, strict=True)]
    intro = (
        f"Each of {len(rows)} guards was switched off in turn; {len(content['unnoticed'])} went unnoticed. The first"
        " event of the state machine after which replay and native differ, and what differs, or the first test that"
        " fails:"
    )
    return "\n".join([intro, "", *_table(["guard switched off", "noticed by"], rows)])


_RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step_time": step_time,
    "parity": parity,
    "memory": summary,
    "accumulation": summary,
    "omission": summary,
    "update_time": summary,
    "host_time": summary,
    "sweep": sweep,
    "detection": summary,
    "zoo": zoo,
    "host_cost": summary,
    "soak": summary,
    "statemachine": statemachine,
    "mutation": mutation,
}


def _section(name: str, content: dict[str, Any]) -> str:
    body = _RENDERERS.get(content["name"], lambda _: "No table is rendered for this kind of receipt.")(content)
    return (
        f"## {content['name'].replace('_', ' ').capitalize()}: [{name}]({name})\n\n{body}\n\n{_provenance(content)}\n"
    )


def _provenance(content: dict[str, Any]) -> str:
    device, versions = content["device"], content["versions"]
    machine = f"{device['gpu']}, driver {device['driver']}" if device["gpu"] else "no GPU"
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"{content['written'][:10]}; {machine}; host {device['cpu']}, {device['cpu_cores']} cores; {software}; sources"
        f" `{content['sources_digest'][:12]}`; `{content['command']}`"
    )


def _spelt(arm: str) -> str:
    return arm.replace("_", " ")


def _table(headers: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [headers, ["---"] * len(headers), *rows]]


def _cell(text: str) -> str:
    """Makes text that nobody wrote for a table fit into one."""
    return " ".join(text.replace("|", "/").replace("`", "'").split())


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "nothing"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f}"


if __name__ == "__main__":
    sys.exit(main())
