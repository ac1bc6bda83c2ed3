"""Pictures, drawn with matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from pathlib import Path

from .errors import Unsupported


def check() -> None:
    """Raise now what a plot would raise after everything else is done."""
    _figure(1, 1)


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

    if axes.get_yscale() == "log":
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
