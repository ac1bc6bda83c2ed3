"""Every way in which the planner builds each kernel, and a choice in which each tile row meets every feature."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from problems import example

from pyflash.device import KNOWN, Device
from pyflash.errors import Unsupported
from pyflash.explain import tile_row
from pyflash.plan import Launch, plan
from pyflash.problem import Problem
from pyflash.tiles import FAMILIES, KERNELS


@dataclass(frozen=True)
class Variant:
    launch: Launch
    device: Device
    name: str
    traits: frozenset[tuple]  # what a covering choice must meet

    @property
    def arch(self) -> str:
        specific = "a" if KERNELS[self.launch.kernel].only_capability else ""
        return f"sm_{self.device.arch}{specific}"


def _devices() -> list[Device]:
    """One GPU of each compute capability."""
    return list({device.capability: device for device in KNOWN.values()}.values())


def _head_dims(family: str) -> list[tuple[int, int]]:
    """At the end of each row of the family: the whole head_dim, one that is padded, and two that differ."""
    kernels = [KERNELS[name] for name in (f"fwd_{family}", f"bwd_{family}") if name in KERNELS]
    ends = sorted({row.head_dim for kernel in kernels for row in kernel.rows})
    steps = [(end, before) for before, end in itertools.pairwise([0, *ends])]
    return [
        pair
        for end, before in steps
        for pair in ((end, end), (end - 8, end - 8), (end, before + 16), (before + 16, end))
    ]


def _problems(family: str) -> Iterable[Problem]:
    dtypes = sorted({d for name in (f"fwd_{family}", f"bwd_{family}") if name in KERNELS for d in KERNELS[name].dtypes})
    for (dim, dim_v), dtype, causal, narrow, scale in itertools.product(
        _head_dims(family), dtypes, (False, True), (False, True), (None, -1.0)
    ):
        call = {"head_dim": dim, "head_dim_v": dim_v, "dtype": dtype, "causal": causal, "softmax_scale": scale}
        yield example(**call, narrow=("q", "k", "v", "o") if narrow else ())
        inputs = ("q", "k", "v", "dout", "o") if narrow else ()
        for deterministic in (False, True):
            yield example(backward=True, **call, narrow=inputs, deterministic=deterministic, dlse=deterministic)


def _variant(launch: Launch, device: Device, problem: Problem) -> Variant:
    cfg = dict(launch.config)
    flags = [name for name, value in cfg.items() if value is True]
    dims = f"{cfg['TILE_D']}x{cfg['TILE_DV']}"
    tile = f"{cfg['TILE_M']}x{cfg['TILE_N']}"
    name = f"{launch.kernel}-sm{device.arch}-{cfg['Element']}-{tile}-d{dims}-{'-'.join(flags).lower()}"
    row = (launch.kernel, tile_row(launch))
    features = [(name, value) for name, value in cfg.items() if isinstance(value, bool) or name == "Element"]
    order = (problem.head_dim > problem.head_dim_v) - (problem.head_dim < problem.head_dim_v)
    traits = {(*row, *trait) for trait in (*features, ("arch", device.arch), ("head_dim to head_dim_v", order))}
    return Variant(launch, device, name, frozenset(traits))


def every() -> list[Variant]:
    """The whole cross product, each program once."""
    found: dict[tuple, Variant] = {}
    for family in FAMILIES:
        for problem, device in itertools.product(_problems(family), _devices()):
            try:
                launches = plan(problem, device, families=(family,)).launches
            except Unsupported:
                continue
            for launch in launches:
                key = (launch.kernel, launch.real, launch.config, device.arch)
                if key not in found:
                    found[key] = _variant(launch, device, problem)
    return list(found.values())


def covering(variants: list[Variant]) -> list[Variant]:
    """A few variants that between them have every trait of all: greedily the one with the most new traits."""
    missing, chosen = set().union(*(v.traits for v in variants)), []
    while missing:
        best = max(variants, key=lambda v: len(v.traits & missing))
        chosen.append(best)
        missing -= best.traits
    return sorted(chosen, key=lambda v: v.name)
