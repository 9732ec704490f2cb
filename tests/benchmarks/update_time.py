# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What the update of the weights, which is native, costs the host: AdamW foreach and fused, all kinds of steps.

python -m tests.benchmarks.update_time --out docs/evidence/update_time.json
"""

import statistics
import sys
from typing import Any

from tests.benchmarks.processes import finish, parser, run_worker

MODELS = ("resnet18", "efficientnet_b0", "vit_tiny", "gpt")
ARMS = ("native", "replay", "replay_step")
UPDATES = ("foreach", "fused")
SETTINGS = {
    "what": "Milliseconds of a step on the host. `update` is `optimizer.step` without its closure, from the end of"
    " clipping on; `clipping` is all of `configure_gradient_clipping`; both are medians of calls that are not fenced."
    " Clipping by norm with the fused AdamW: its _step_supports_amp_scaling is set to False on the object, or"
    " MixedPrecision refuses; no gradient scaler is there to read it.",
    "process": "fresh for each update and arm, all networks in it",
}
STEPS = {"steps": 75, "skip": 15, "window": 20}


def main() -> int:
    options = parser(__doc__, MODELS).parse_args()
    given = {**STEPS, "device": options.device, "backend": options.backend}
    runs = [
        {**run, "update": update}
        for update in UPDATES
        for arm in ARMS
        for run in run_worker(arm, options.models, {**given, "update": update})
    ]
    return finish("update_time", options, {**SETTINGS, **STEPS}, runs, summarise(runs))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network, update and arm that was measured."""
    measured = [run for run in runs if run.get("windows_ms")]
    models = list(dict.fromkeys(run["model"] for run in measured))
    return [
        {
            "workload": run["model"],
            "AdamW": run["update"],
            "arm": run["arm"],
            "parameters": run["parameters"],
            "update": round(run["update_host_ms"], 4),
            "clipping": round(run["clip_host_ms"], 4),
            "step": round(statistics.median(run["windows_ms"]), 4),
        }
        for run in sorted(measured, key=lambda run: models.index(run["model"]))
    ]


if __name__ == "__main__":
    sys.exit(main())
