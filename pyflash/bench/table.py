"""The rows of a measurement as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

from ..explain import amount, duration, figure
from .run import Figures, Row


def text(best: Figures, rows: list[Row]) -> str:
    """A table for each direction: a line for each case, PyFlash first, and the others beside it."""
    lines = [
        f"{best.machine}: a large matrix product makes {amount(best.matmul_flops, 'FLOP/s')}, "
        f"a large copy {amount(best.copy_bandwidth, 'B/s')}"
    ]
    for direction in dict.fromkeys(row.direction for row in rows):
        lines += ["", *_table(best, direction, [row for row in rows if row.direction == direction])]
    return "\n".join([*lines, *_failures(rows)])


def _table(best: Figures, direction: str, rows: list[Row]) -> Iterator[str]:
    ours, *others = dict.fromkeys(row.contestant for row in rows)
    cases = list(dict.fromkeys(row.case for row in rows))
    prefix, unit = ("T", 1e12) if best.matmul_flops >= 1e12 else ("G", 1e9)

    def column(name: str, head: str, show: Callable[[Row], str]) -> list[str]:
        found = {row.case: row for row in rows if row.contestant == name}
        return [head, *("-" if found[case].failure else show(found[case]) for case in cases)]

    def speed(name: str) -> list[str]:
        return column(name, f"{prefix}FLOP/s", lambda row: figure(row.flops / unit))

    groups = {
        "": [[direction, *map(str, cases)]],
        ours: [
            column(ours, "time", lambda row: duration(row.seconds)),
            speed(ours),
            column(ours, "of matmul", lambda row: f"{row.matmul_share:.0%}"),
            column(ours, "GB/s", lambda row: figure(row.bandwidth / 1e9)),
            column(ours, "of copy", lambda row: f"{row.copy_share:.0%}"),
            column(ours, "memory", lambda row: amount(row.memory_bytes, "B")),
        ],
        **{name: [speed(name), column(name, "times", lambda row: f"{row.ratio:.2f}")] for name in others},
    }
    blocks = [_block(name, columns) for name, columns in groups.items()]
    for line in zip(*blocks, strict=True):
        yield "   ".join(line).rstrip()


def _block(name: str, columns: list[list[str]]) -> list[str]:
    """The lines of some columns under one name; text is aligned to the left, figures to the right."""
    align = ">" if name else "<"
    widths = [max(map(len, cells)) for cells in columns]
    lines = [
        "  ".join(f"{c:{align}{w}}" for c, w in zip(cells, widths, strict=True)) for cells in zip(*columns, strict=True)
    ]
    width = max(len(name), len(lines[0]))
    return [f"{name:{width}}", *(f"{line:{align}{width}}" for line in lines)]


def _failures(rows: list[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.failure:
            key = row.contestant, row.direction, row.failure
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        yield ""
    for (name, direction, failure), count in reasons.items():
        yield f"- {name}, {direction}, {count} of the cases: {failure}"
    yield "\ntimes: how many times PyFlash's time. memory: results and all between; of the backward, with its forward."


def csv_text(rows: list[Row]) -> str:
    file = io.StringIO()
    flat = [row.flat() for row in rows]
    writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()
