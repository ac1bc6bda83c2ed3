"""Sequences of their own lengths on a GPU: against the oracle, with offsets of the GPU and of the host, in graphs."""

from __future__ import annotations

import numpy as np
import pytest
from packed import PACKED, Packed
from runs import DTYPES, compile_ahead, cp, guarded, in_dtype

import pyflash
from pyflash import debug
from pyflash.errors import Unsupported

FAMILIES = list(DTYPES)


def taken(family: str, which: Packed, turn: int) -> Packed:
    dtypes = DTYPES[family]
    dtype = which.case.dtype if which.case.dtype in dtypes else dtypes[turn % len(dtypes)]
    return Packed(**{**which.__dict__, "case": in_dtype(which.case, dtype)})


def call(which: Packed, family: str, *, on_host: bool = False, backward: bool = True):
    """Forward and backward by a family, as NumPy arrays by name."""
    lengths = which.lengths() if on_host else {name: cp.asarray(a) for name, a in which.lengths().items()}
    forward, differentiate = pyflash.flash_attention, pyflash.flash_attention_backward
    if not which.padded:
        forward, differentiate = pyflash.flash_attention_varlen, pyflash.flash_attention_varlen_backward
        lengths |= dict(zip(("max_seqlen_q", "max_seqlen_k"), which.longest, strict=True))
    with guarded(), debug.families(family):
        arrays = {name: cp.asarray(a) for name, a in which.arrays().items()}
        q, k, v = (arrays[name] for name in "qkv")
        options = {**lengths, **which.whole.call_of(cp)}
        out, lse = forward(q, k, v, return_lse=True, **options)
        found = {"o": out, "lse": lse}
        if backward:
            options |= {"dlse": arrays.get("dlse"), **which.case.returns}
            names = ("dq", "dk", "dv", *(f"d{name}" for name in which.case.differentiated))
            found |= dict(zip(names, differentiate(arrays["dout"], q, k, v, out, lse, **options), strict=True))
        return {name: cp.asnumpy(a) for name, a in found.items()}


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    runs = [(taken(family, which, i), family) for i, which in enumerate(PACKED.values()) for family in FAMILIES]
    compile_ahead(lambda run=run: call(*run) for run in runs)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_named_cases(family, name):
    turn = list(PACKED).index(name)
    which = taken(family, PACKED[name], turn)
    try:
        found = call(which, family, on_host=bool(turn % 2))
    except Unsupported as reason:
        assert family == "sm90"
        pytest.skip(str(reason))
    arrays = which.arrays()
    which.check_forward(arrays, found["o"], found["lse"])
    which.check_backward(arrays, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_short_sequences(family):
    """As one sequence's keys and queries repeated: all alike."""
    rng, count, length = np.random.default_rng(0), 20000, 16
    one = [rng.standard_normal((length, 1, 64)).astype(np.float32) for _ in range(3)]
    q, k, v = (cp.asarray(np.tile(a, (count, 1, 1))).astype(DTYPES[family][0]) for a in one)
    offsets = cp.arange(0, count * length + 1, length, dtype=np.int32)
    with debug.families(family):
        out = pyflash.flash_attention_varlen(q, k, v, offsets, causal=True)
        alone = pyflash.flash_attention(*(a[None, :length] for a in (q, k, v)), causal=True)
    assert (out.reshape(count, length, 1, 64) == alone).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_graph_takes_other_offsets(family):
    rng = np.random.default_rng(0)
    q = cp.asarray(rng.standard_normal((300, 2, 64)), DTYPES[family][0])
    offsets, out = cp.array([0, 100, 300], np.int32), cp.empty_like(q)
    with debug.families(family), cp.cuda.Stream(non_blocking=True) as stream:
        pyflash.flash_attention_varlen(q, q, q, offsets, out=out)
        stream.begin_capture()
        pyflash.flash_attention_varlen(q, q, q, offsets, out=out)
        graph = stream.end_capture()
        for ends in ([0, 7, 300], [0, 250, 300]):
            offsets[...] = cp.array(ends, np.int32)
            graph.launch(stream)
            stream.synchronize()
            expected = pyflash.flash_attention_varlen(q, q, q, ends)
            assert (out == expected).all(), ends
