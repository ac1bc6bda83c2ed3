"""Every way in which the planner builds each kernel, and a choice in which each tile row and each option is met."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from problems import ADDED, BLOCKS, FUNCTIONS, example, packed, traced

from pyflash.device import KNOWN, Device
from pyflash.errors import Unsupported
from pyflash.explain import tile_row
from pyflash.features import BY_NAME, flags
from pyflash.plan import Launch, plan
from pyflash.plan_blocks import MaskProblem, plan_blocks
from pyflash.problem import Problem
from pyflash.tiles import FAMILIES, KERNELS, Kernel, Row


@dataclass(frozen=True)
class Variant:
    launch: Launch
    device: Device
    problem: Problem | MaskProblem
    name: str
    row: tuple[str, Row]  # kernel and tile row
    traits: frozenset[tuple]  # what a covering choice must meet: options and GPUs of the kernel, all else of its row

    @property
    def arch(self) -> str:
        specific = "a" if KERNELS[self.launch.kernel].only_capability else ""
        return f"sm_{self.device.arch}{specific}"


BATCH = 64  # so that tiles are many
# Every feature alone, and all together, by families.
OPTIONS = (
    {},
    {"causal": True},
    {"window": (1000, 50)},
    {"softcap": 30.0},
    {"alibi_slopes": (4,)},
    {"bias": (BATCH, 1, 1, "k")},
    {"causal": True, "bias": (BATCH, 1, 1, "k")},
    {"mask": (1, 1, 1, "k")},
    {"sinks": (4,)},
    {"dropout_p": 0.2},
    *({name: function} for name, function in FUNCTIONS.items()),
    ADDED,
    {"block_mask": BLOCKS},
    {"window": (4000, 50), "softcap": 30.0, "alibi_slopes": (4,)},
    {"causal": True, "bias": (1, 4, 1, 1), "mask": (1, 1, 1, 1), "sinks": (4,)},
)

# What options make true of a program.
OPTION_FLAGS = frozenset({*flags({}), "UNIT_BIAS", "UNIT_MASK", "PACKED", "GAPS"} - {"CAUSAL"})

# One GPU of each compute capability.
DEVICES = list({device.capability: device for device in KNOWN.values()}.values())


def _head_dims(family: str) -> list[tuple[int, int]]:
    """At the end of each row of the family: the whole head_dim, one that is padded, and two that differ."""
    kernels = [KERNELS[name] for name in (f"fwd_{family}", f"bwd_{family}") if name in KERNELS]
    ends = sorted({row.head_dim for kernel in kernels for row in kernel.rows})
    steps = [(end, before) for before, end in itertools.pairwise([0, *ends])]
    return [
        pair
        for end, before in steps
        for pair in ((end, end), (end - 8, end - 8), (end, before or 16), (before + 16, end))
    ]


def _seqlens(family: str) -> list[int]:
    """A few queries, and the least for each row that wants more."""
    kernels = [KERNELS[name] for name in (f"fwd_{family}", f"bwd_{family}") if name in KERNELS]
    return sorted({64, *(row.min_seqlen_q for kernel in kernels for row in kernel.rows)} - {0})


def _few_rows(family: str, options: dict[str, object]) -> list[dict[str, int]]:
    """What makes Hopper's forward split keys, or give rows of several heads to a tile."""
    if family != "sm90" or "bias" in options:
        return []
    groups = (4,) if "alibi_slopes" in options or "sinks" in options else (4, 7)
    rows = [{"seqlen_q": 9, "heads": heads, "heads_kv": 1} for heads in groups]
    tilings = [{"batch": 200}, {"seqlen_k": 8000}]
    return [{"seqlen_q": 64, "seqlen_k": 8000}, *({**r, **t} for r in rows for t in tilings)]


def _problems(family: str) -> Iterable[Problem]:
    dtypes = sorted({d for name in (f"fwd_{family}", f"bwd_{family}") if name in KERNELS for d in KERNELS[name].dtypes})
    for (dim, dim_v), dtype, options, narrow, scale in itertools.product(
        _head_dims(family), dtypes, OPTIONS, (False, True), (None, -1.0)
    ):
        if options not in OPTIONS[:2] and (narrow or scale or dim != dim_v):
            continue
        call = {"head_dim": dim, "head_dim_v": dim_v, "dtype": dtype, "softmax_scale": scale, **options}
        outputs, inputs = (("q", "k", "v", "o"), ("q", "k", "v", "dout", "o")) if narrow else ((), ())
        for sizes in _few_rows(family, options):
            yield example(**call, **sizes, narrow=outputs)
        for seqlen in _seqlens(family):
            call |= {"batch": BATCH, "seqlen_q": seqlen}
            yield example(**call, narrow=outputs)
            differentiable = tuple(name for name in options if BY_NAME[name].has_gradient)
            for wanted in sorted({(), differentiable}):
                yield example(backward=True, **call, narrow=inputs, gradients=wanted)
            yield example(backward=True, **call, narrow=inputs, deterministic=True, dlse=True)


# Where lengths of sequences differ.
PACKED_OPTIONS = (
    {},
    {"causal": True},
    {"window": (4000, 50), "softcap": 30.0, "alibi_slopes": (4,)},
    {"block_mask": BLOCKS},
)


def _packed_problems(family: str) -> Iterable[Problem]:
    dtype = KERNELS[f"fwd_{family}"].dtypes[-1]
    dims = sorted({max(pair) for pair in _head_dims(family)})
    for dim, options, used, backward in itertools.product(dims, PACKED_OPTIONS, (False, True), (False, True)):
        for seqlen in _seqlens(family):
            call = {"head_dim": dim, "dtype": dtype, "tokens": BATCH * seqlen, "batch": BATCH, **options}
            yield packed(backward=backward, used=used, deterministic=backward and used, **call)


def _variant(launch: Launch, device: Device, problem: Problem) -> Variant:
    cfg = dict(launch.config)
    on = [name for name, value in cfg.items() if value is True]
    on += [f"pack_{value}" for name, value in cfg.items() if name == "PACK" and value > 1]
    dims = f"{cfg['TILE_D']}x{cfg['TILE_DV']}"
    tile = f"{cfg['TILE_M']}x{cfg['TILE_N']}"
    name = f"{launch.kernel}-sm{device.arch}-{cfg['Element']}-{tile}-d{dims}-{'-'.join(on).lower()}"
    row = launch.kernel, tile_row(launch)
    order = (problem.head_dim > problem.head_dim_v) - (problem.head_dim < problem.head_dim_v)
    # Equal head_dims fill a row's tiles, and so its registers.
    traits = {(launch.kernel, "arch", device.arch), (launch.kernel if order else row, "head_dim to head_dim_v", order)}
    for flag, value in cfg.items():
        if isinstance(value, bool) or flag in ("Element", "PACK", "SCATTERS"):
            traits.add((launch.kernel if flag in OPTION_FLAGS else row, flag, value))
    return Variant(launch, device, problem, name, row, frozenset(traits))


def _serves(kernel: Kernel, device: Device) -> bool:
    return kernel.only_capability in (None, device.capability) and device.capability >= kernel.min_capability


def every(devices: Iterable[Device] = DEVICES) -> list[Variant]:
    """The whole cross product, each program once."""
    found: dict[tuple, Variant] = {}
    for family in FAMILIES:
        able = [d for d in devices if f"fwd_{family}" in KERNELS and _serves(KERNELS[f"fwd_{family}"], d)]
        problems = (*_problems(family), *_packed_problems(family)) if able else ()
        for problem, device in itertools.product(problems, able):
            try:
                launches = plan(problem, device, families=(family,)).launches
            except Unsupported:
                continue
            for launch in launches:
                key = (launch.kernel, launch.real, launch.config, device.arch)
                if key not in found:
                    found[key] = _variant(launch, device, problem)
    functions, captured = traced({"mask_mod": FUNCTIONS["mask_mod"]})
    asked = MaskProblem(BLOCKS._replace(seqlen_q=1024, seqlen_k=1024), functions["mask_mod"], tuple(captured.items()))
    for device in devices:
        for launch in plan_blocks(asked, device).launches:
            name = f"{launch.kernel}-sm{device.arch}"
            row = launch.kernel, KERNELS[launch.kernel].rows[0]
            traits = frozenset([(row, "arch", device.arch)])
            found[launch.kernel, device.arch] = Variant(launch, device, asked, name, row, traits)
    return list(found.values())


def covering(variants: list[Variant]) -> list[Variant]:
    """A few variants that between them have every trait of all: greedily, of each kernel the one with most new ones."""
    kernels: dict[str, list[Variant]] = {}
    for variant in variants:
        kernels.setdefault(variant.launch.kernel, []).append(variant)
    chosen = []
    for candidates in kernels.values():
        missing = set().union(*(v.traits for v in candidates))
        while missing:
            candidates = [v for v in candidates if v.traits & missing]
            chosen.append(max(candidates, key=lambda v: len(v.traits & missing)))
            missing -= chosen[-1].traits
    return sorted(chosen, key=lambda v: v.name)
