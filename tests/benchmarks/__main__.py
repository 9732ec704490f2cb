# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Measures everything that can be measured here and renders the page of evidence and the README's figures.

Arguments go to ``step_time``; without ``--out`` its receipt is docs/evidence/step_time.json.
"""

import sys

import torch

from tests.benchmarks import render, step_time


def main() -> int:
    if not torch.cuda.is_available() and "--device" not in sys.argv:
        print("Step times need a CUDA device; see python -m tests.benchmarks.step_time --help for a trial on a CPU.")
        return 0
    publishing = "--out" not in sys.argv
    if publishing:
        sys.argv += ["--out", str(render.EVIDENCE / "step_time.json")]
    failed = step_time.main()
    if publishing:
        (render.EVIDENCE / "README.md").write_text(render.render())
        render.README.write_text(render.readme(), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
