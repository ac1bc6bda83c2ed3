"""Pictures, drawn with matplotlib, which the extra `bench` brings."""

from __future__ import annotations

import math
from pathlib import Path

from .errors import Unsupported
from .explain import Explanation


def formats() -> list[str]:
    """The suffixes of files that can be drawn."""
    figure, _ = _figure(1, 1)
    return sorted(figure.canvas.get_supported_filetypes())


def _figure(columns: int, rows: int, width: float = 5.0, height: float = 3.6):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("a plot needs matplotlib: pip install 'pyflash[bench]'") from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


_COLOURS = ("tab:red", "tab:gray", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan")


def _style(axes) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def bench(best, rows, path: Path) -> None:
    """Throughput and memory against the sequence length, a column of axes for each head_dim and choice of options."""
    columns = list(dict.fromkeys((row.case.head_dim, row.case.options) for row in rows))
    directions = list(dict.fromkeys(row.direction for row in rows))
    names = list(dict.fromkeys(row.contestant for row in rows))
    figure, axes = _figure(len(columns), len(directions) + 1)
    for column, key in enumerate(columns):
        here = [row for row in rows if (row.case.head_dim, row.case.options) == key]
        options = ", ".join(n if x is True else f"{n}={x}" for n, x in key[1] if x not in (None, False)) or "full"
        for line, direction in enumerate(directions):
            ax = axes[line][column]
            for number, name in enumerate(names):
                _line(ax, here, direction, name, number, lambda row: row.flops)
            ax.axhline(best.matmul_flops, color="0.5", lw=1, ls=":", label="matrix product")
            ax.set(ylabel="FLOP/s", ylim=(0, None), title=f"{direction}, head_dim {key[0]}, {options}")
        ax = axes[-1][column]
        for number, name in enumerate(names):
            _line(ax, here, directions[-1], name, number, lambda row: row.memory_bytes)
        ax.set(ylabel="bytes", yscale="log", title=f"memory, {directions[-1]}, results included")
    for ax in axes.flat:
        lengths = sorted({row.case.seqlen_q for row in rows})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 and n else str(n) for n in lengths], minor=False)
        ax.set_xlabel("sequence length")
        _style(ax)
    axes[0][0].legend(frameon=False, fontsize=8)
    case = rows[0].case
    figure.suptitle(f"{best.machine}, {case.dtype}")
    figure.savefig(path, dpi=120)


def explanation(x: Explanation, path: Path) -> None:
    """The call on the GPU's roofline, and its memory against the sequence length, beside ordinary attention."""
    if x.memory_seconds is None or not x.flops:
        raise Unsupported(
            f"a plot needs a GPU whose memory bandwidth is known and a call with something in it: {x.problem}"
        )
    figure, ((roof, memory),) = _figure(2, 1)
    _roofline(roof, x)
    _memory(memory, x)
    direction = "backward" if x.problem.backward else "forward"
    q, k = dict(x.problem.tensors)["q"].shape, dict(x.problem.tensors)["k"].shape
    figure.suptitle(f"{direction} on {x.device.name}: q {q}, k {k}, {x.problem.dtype.name}")
    figure.savefig(path, dpi=120)


def _roofline(ax, x: Explanation) -> None:
    corners = [x.peak_flops / x.device.bandwidth] if x.peak_flops else []
    ends = [min(x.ordinary_intensity, x.intensity) / 4, *corners, 4 * max([x.intensity, *corners])]
    roof = [min(x.peak_flops or math.inf, x.device.bandwidth * end) for end in sorted(ends)]
    ax.plot(sorted(ends), roof, color="0.3", lw=1.6, label="roofline")
    ours, theirs = x.flops / x.roofline_seconds, x.flops / x.ordinary_seconds
    ax.plot(x.ordinary_intensity, theirs, "o", color=_COLOURS[1], label="ordinary attention, at best")
    ax.plot(x.intensity, ours, "o", color=_COLOURS[0], mfc="none", label="this call, at best")
    if x.expected_seconds:
        ax.plot(x.intensity, x.flops / x.expected_seconds, "o", color=_COLOURS[0], label="this call, expected")
    ax.set(xscale="log", yscale="log", xlabel="FLOP a byte moved", ylabel="FLOP/s")
    ax.set_title("arithmetic and memory traffic")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    _style(ax)


def _memory(ax, x: Explanation) -> None:
    now, limit = x.seqlen, x.device.memory_bytes
    lengths = [x.longest_seqlen * 2.0**-n for n in range(-1, 18)]
    lengths = [length for length in lengths if length >= min(now, x.ordinary_longest_seqlen) / 4]
    square = x.ordinary_held_bytes - x.least_bytes
    curves = {
        "this call": (_COLOURS[0], x.held_bytes, 0, x.longest_seqlen),
        "ordinary attention": (_COLOURS[1], x.least_bytes, square, x.ordinary_longest_seqlen),
    }
    for name, (colour, linear, square, longest) in curves.items():
        held = [linear * (n / now) + square * (n / now) ** 2 for n in lengths]
        ax.plot(lengths, held, color=colour, lw=2, label=f"{name}: {longest:,} fit")
        ax.plot(now, linear + square, "o", color=colour)
        ax.plot(longest, limit, "|", ms=14, color=colour)
    ax.axhline(limit, color="0.5", ls=":", lw=1, label=f"{limit / 2**30:.0f} GiB")
    ax.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="bytes", ylim=(None, 20 * limit))
    ax.set_title("memory")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    _style(ax)


def _line(ax, rows, direction: str, name: str, number: int, value) -> None:
    found = [row for row in rows if row.direction == direction and row.contestant == name and not row.failure]
    ax.plot(
        [row.case.seqlen_q for row in found],
        [value(row) for row in found],
        color=_COLOURS[number % len(_COLOURS)],
        lw=1.4 if number else 2.4,
        zorder=2 if number else 3,
        marker="o",
        ms=4,
        label=name,
    )
