"""How a mask function is evaluated by blocks: what is asked for, the launches on a GPU, and the same in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import features, params
from .blocks import Blocks, kinds_of, lists_of
from .device import Device
from .errors import Unsupported
from .features import Place, Sizes
from .graphs import INPUTS, Mod
from .plan import MAX_GRID, Launch, Plan
from .problem import Tensor, contiguous
from .tiles import KERNELS

_REAL = "double"  # what functions compute with here, as in the oracle


@dataclass(frozen=True)
class MaskProblem:
    """A mask function that is to be evaluated by blocks, and the arrays that it captures."""

    blocks: Blocks
    mask_mod: Mod
    captured: tuple[tuple[str, Tensor], ...]

    def __post_init__(self):
        for name, tensor in self.captured:
            if takes := features.BY_NAME[name].shape_error(tensor.shape, Sizes(*self.blocks[:4])):
                raise ValueError(f"mask_mod: got an array of shape {tensor.shape}, takes {takes}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The kinds of the blocks, and the two lists."""
        return "kinds", *(slot.name for slot in features.BLOCK_LISTS)

    @property
    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """What is captured, and the outputs."""
        made = map(contiguous, self.blocks.shapes, ("uint8", "int32", "int32"))
        return *self.captured, *zip(self.outputs, made, strict=True)

    def evaluate(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs, of NumPy arrays."""
        on, sizes = features.check({"mask_mod": self.mask_mod, **arrays}), Sizes(*self.blocks[:4])
        kinds = kinds_of(self.blocks, lambda *part: features.visible(on, Place(*part, sizes)))
        return dict(zip(self.outputs, (kinds, *lists_of(kinds)), strict=True))

    def __str__(self) -> str:
        captured = ", ".join(f"{t.shape} {t.dtype}" for _, t in self.captured)
        return f"[block_mask {self.blocks[:4]}, {self.blocks}{', captures ' * bool(captured)}{captured}]"


def _launch(problem: MaskProblem, kernel: str, grid: int, **more: object) -> Launch:
    blocks, row = problem.blocks, KERNELS[kernel].rows[0]
    rows, columns = blocks.grid
    values = {
        **dict(zip(("batch", "num_heads_q", "seqlen_q", "seqlen_k"), blocks[:4], strict=True)),
        "num_m_blocks": rows,
        "num_n_blocks": columns,
    }
    for name, tensor in problem.captured:
        values |= features.BY_NAME[name].values(tensor, 1.0, Sizes(*blocks[:4]))
    known = params.layout(kernel, _REAL).offsets
    return Launch(
        kernel=kernel,
        real=_REAL,
        config=(
            ("Element", "double"),
            ("TILE_M", blocks.block_q),
            ("TILE_N", blocks.block_k),
            ("NUM_THREADS", row.threads),
            ("MIN_CTAS", row.min_ctas),
            ("NEAR_ARRAYS", False),
        ),
        grid=grid,
        block=row.threads,
        smem_bytes=0,
        values=tuple((name, value) for name, value in values.items() if name in known),
        arrays=tuple((name, name) for name, _ in problem.tensors if name in known),
        **more,
    )


def plan_blocks(problem: MaskProblem, device: Device) -> Plan:
    """The kind of each block, then the lists."""
    blocks = problem.blocks
    (rows, columns), heads = blocks.grid, blocks.batch * blocks.heads
    lists_per_cta = KERNELS["block_lists"].rows[0].tile_m
    launches = (
        _launch(
            problem,
            "block_kinds",
            heads * rows * columns,
            functions=(("mask_mod", INPUTS["mask_mod"], problem.mask_mod.graph),),
        ),
        _launch(problem, "block_lists", -(-heads * (rows + columns) // lists_per_cta)),
    )
    for launch in launches:
        if launch.grid > MAX_GRID:
            raise Unsupported(f"{launch.kernel} would need {launch.grid} CTAs for {problem}; a grid holds {MAX_GRID}")
    return Plan(problem, "blocks", tuple(x for x in launches if x.grid), (), ())
