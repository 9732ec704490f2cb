# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The report as text: narrow enough to be read, without losing what the data says."""

import pytest

from lightning_replay import ReplayReport
from lightning_replay.reasons import Reason
from lightning_replay.report import WIDTH, RecordingStats

NAMES = ", ".join(f"'sample-{number:04}'" for number in range(32))


def report(*signatures: str, pools: tuple[int, ...] = (), reasons: tuple[Reason, ...] = ()) -> ReplayReport:
    pools = pools or (2**20,) * len(signatures)
    recordings = [
        RecordingStats("training_step", signature, 1.5, pool, "nondeterministic", 12345, 0, (), 10.0, 2.5, 92.6)
        for signature, pool in zip(signatures, pools, strict=True)
    ]
    return ReplayReport(reasons=dict.fromkeys(reasons, 3), recordings=tuple(recordings))


def column(of: ReplayReport, name: str) -> list[str]:
    table = next(table for table in of.tables() if name in table.header)
    return [row[table.header.index(name)] for row in table.rows]


@pytest.mark.parametrize(
    ("signature", "shown"),
    [
        ("no tensors", "no tensors"),
        ("(32, 3, 224, 224) bfloat16, (32,) int64", "(32, 3, 224, 224) bfloat16, (32,) int64"),
        (f"(32, 3, 224, 224) bfloat16, {NAMES}", "(32, 3, 224, 224) bfloat16, ... 32 more"),
        (f"(32, 8) float32, (32,) int64, {NAMES}, 5", "(32, 8) float32, (32,) int64, ... 32 more, 5"),
        (NAMES, "'sample-0000', ... 30 more, 'sample-0031'"),
        (f"'{'long' * 20}'", "'longlonglonglonglonglong..."),
        (f"'{'long' * 20}', 7", "'longlonglonglonglonglong..., 7"),
    ],
)
def test_long_signatures_are_shortened_in_print_alone(signature: str, shown: str) -> None:
    made = report(signature)

    assert column(made, "signature") == [shown]
    assert shown in str(made)
    assert made.recordings[0].signature == made.as_dict()["recordings"][0]["signature"] == signature


def test_lines_are_narrow() -> None:
    made = report(f"(32, 3, 224, 224) bfloat16, {NAMES}", NAMES, reasons=tuple(Reason))

    assert len(made.tables()) == 3
    assert max(map(len, str(made).splitlines())) <= WIDTH


def test_a_report_says_where_a_cure_is_to_be_found() -> None:
    reasons = (Reason.WARM_UP, Reason.HOST_SYNC, Reason.HOST_TENSOR)
    assert "to cure: host_sync, host_tensor\n" in str(report(reasons=reasons))
    assert "to cure" not in str(report(reasons=(Reason.WARM_UP,)))


def test_a_long_meaning_is_continued_in_its_column() -> None:
    reason = max(Reason, key=lambda reason: len(reason.cause))
    made = report(reasons=(reason,))

    (table,) = str(made).split("\n\n")[1:]
    header, _, first, *more = table.splitlines()
    place = header.index("meaning")
    assert more
    assert not any(line[:place].strip() for line in more)
    assert " ".join(line[place:] for line in [first, *more]) == reason.cause


@pytest.mark.parametrize(
    ("pools", "shown"),
    [
        ((3 * 2**29, 10 * 2**10), ["1536.0 MiB", "<0.1 MiB"]),
        ((2**19, 10 * 2**10), ["512.0 KiB", "10.0 KiB"]),
        ((2**20, 0), ["1.0 MiB", "0.0 MiB"]),
    ],
)
def test_sizes_of_a_column_have_one_unit(pools: tuple[int, int], shown: list[str]) -> None:
    assert column(report("a", "b", pools=pools), "pool") == shown
