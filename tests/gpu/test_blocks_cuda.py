"""Block masks on a GPU: the same as on the CPU, and what every family makes of them against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from assert_close import assert_attention, assert_gradients
from cases import Case
from runs import DTYPES, compile_ahead, cp, guarded

import pyflash
from pyflash import debug, masks

BATCH, HEADS, SEQLEN = 2, 2, 400
IDS = np.sort(np.random.default_rng(0).integers(0, 5, (BATCH, SEQLEN)), -1).astype(np.int32)
# Functions of the library that the arrays are of.
MASKS = {
    "causal": lambda xp: masks.causal(),
    "documents": lambda xp: masks.documents(xp.asarray(IDS)),
    "causal documents": lambda xp: masks.and_masks(masks.documents(xp.asarray(IDS)), masks.causal()),
    "prefix": lambda xp: masks.prefix_lm(xp.asarray(np.array([50, 300], np.int32))),
    "window with sinks": lambda xp: masks.sliding_window(100, sinks=4),
    "empty rows and columns of blocks": lambda xp: lambda b, h, i, j: (i // 128 != 2 + h) & (j // 128 != 1) & (j <= i),
}
RUNS = [(family, name) for family in DTYPES for name in MASKS]


def case_of(family: str, name: str) -> Case:
    head_dim = (64, 128, 256)[list(MASKS).index(name) % 3]
    return Case(BATCH, SEQLEN, SEQLEN, HEADS, 1, head_dim, head_dim, DTYPES[family][-1], dlse=True)


def blocks_of(name: str, xp):
    return pyflash.block_mask(MASKS[name](xp), BATCH, HEADS, SEQLEN, SEQLEN, like=xp.zeros(1, np.float32))


def run(family: str, name: str) -> list[np.ndarray]:
    """out, lse, dq, dk and dv."""
    with guarded(), debug.families(family):
        arrays = case_of(family, name).arrays(cp)
        q, k, v = (arrays[x] for x in "qkv")
        options = {"block_mask": blocks_of(name, cp)}
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
        given = arrays["dout"], q, k, v, out, lse
        gradients = pyflash.flash_attention_backward(*given, dlse=arrays["dlse"], **options)
        return [cp.asnumpy(a) for a in (out, lse, *gradients)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    compile_ahead(lambda x=x: run(*x) for x in RUNS)


@pytest.mark.parametrize(("family", "name"), RUNS)
def test_attention_by_blocks(family, name):
    out, lse, *gradients = run(family, name)
    arrays, options = case_of(family, name).arrays(), {"mask_mod": MASKS[name](np)}
    q, k, v = (arrays[x] for x in "qkv")
    assert_attention(out, lse, q, k, v, **options)
    assert_gradients(gradients, arrays["dout"], q, k, v, dlse=arrays["dlse"], **options)


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_of_the_cpu(name):
    found, expected = blocks_of(name, cp), blocks_of(name, np)
    np.testing.assert_array_equal(cp.asnumpy(found.kinds), expected.kinds)
    for lists, right in zip(found.blocks.arrays, expected.blocks.arrays, strict=True):
        listed = np.arange(right.shape[-1]) <= right[..., :1]
        np.testing.assert_array_equal(cp.asnumpy(lists)[listed], right[listed])
