# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Where the host's time goes in a step that is replayed as a whole.

python -m tests.benchmarks.host_time --out docs/evidence/host_time.json
"""

import sys
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker
from tests.benchmarks.spans import ALL, CLIP, PARTS

MODELS = ("mlp", "resnet18", "efficientnet_b0", "vit_tiny", "gpt")
STEPS = {"steps": 215, "skip": 15, "window": 20}
SETTINGS = {
    "what": "Microseconds of the host in a step with scope='step', AdamW fused, clipping by norm and one self.log:"
    " medians of the parts, each without the parts inside of it. Nothing is fenced but every 20th step, so a part that"
    " launches may also wait for room in the queue of a device that is behind. The clocks"
    " around the parts are part of a step.",
    "process": "one for all networks",
}


def main() -> int:
    options = parser(__doc__, MODELS).parse_args()
    given = {**STEPS, "device": options.device, "backend": options.backend}
    runs = run_worker("replay_step", options.models, {**given, "log": "loss", "update": "fused", "spans": "all"})
    return finish("host_time", options, {**SETTINGS, **STEPS}, runs, summarise(runs))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each part, with a column for each network; what no clock is around is the last part."""
    columns = {run["model"]: _parts(run) for run in runs if run.get("spans_us")}
    parts = next(iter(columns.values()), {})
    return [
        {"microseconds in": part, **{model: f"{column[part]:.0f}" for model, column in columns.items()}}
        for part in parts
    ]


def _parts(run: dict[str, Any]) -> dict[str, float]:
    spans = run["spans_us"]
    parts = {part: spans[part] for part in PARTS}
    parts["clipping: Lightning's way to it"] = 1e3 * run["clip_host_ms"] - spans[CLIP]
    parts["the update of the weights, in torch"] = 1e3 * run["update_host_ms"]
    parts["zeroing, and all else of Lightning's loop"] = spans[ALL] - sum(parts.values())
    return {**parts, "a step": spans[ALL]}


if __name__ == "__main__":
    sys.exit(main())
