"""Gradients of the arrays that a score_mod captures, on a GPU: against the oracle, for CuPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CAUSAL, Case
from runs import DTYPES, compile_ahead, cp, guarded

import pyflash
from pyflash import debug, reference

CASE = Case(2, 600, 700, 4, 2, 128, 128, options=CAUSAL, dlse=True)
RNG = np.random.default_rng(0)
DISTANCES, SCALES = RNG.standard_normal((4, 256)), RNG.uniform(0.5, 1, (2, 4))


def added(distances, scales):
    return lambda s, b, h, i, j: s + distances[h, pyflash.minimum(pyflash.abs(i + 100 - j), 255)]


def scaled(distances, scales):
    return lambda s, b, h, i, j: pyflash.tanh(s * scales[b, h]) + distances[h, j % 256]


FUNCTIONS = {"added": added, "scaled": scaled}
RUNS = [(family, name) for family in DTYPES for name in FUNCTIONS if (family, name) != ("sm90", "scaled")]


def run(family: str, name: str):
    """dq, dk, dv, and what belongs to the arrays, float32 and of q's type."""
    case = Case(**{**CASE.__dict__, "dtype": DTYPES[family][0]})
    with guarded(), debug.families(family):
        arrays = case.arrays(cp)
        q, k, v = (arrays[x] for x in "qkv")
        captured = cp.asarray(DISTANCES, np.float32), cp.asarray(SCALES, q.dtype)
        options = {"causal": True, "score_mod": FUNCTIONS[name](*captured)}
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
        given = arrays["dout"], q, k, v, out, lse
        options |= {"dlse": arrays["dlse"], "return_dscore_mod": True}
        *gradients, of_captured = pyflash.flash_attention_backward(*given, **options)
        return case, [cp.asnumpy(x) for x in (*gradients, *of_captured)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    compile_ahead(lambda x=x: run(*x) for x in RUNS)


@pytest.mark.parametrize(("family", "name"), RUNS)
def test_gradients_of_what_a_function_captures(family, name):
    case, found = run(family, name)
    arrays = case.arrays()
    captured = DISTANCES.astype(np.float32), SCALES.astype(arrays["q"].dtype)
    given = (arrays[x].astype(np.float64) for x in ("dout", "q", "k", "v"))
    options = {"causal": True, "score_mod": FUNCTIONS[name](*captured), "dlse": arrays["dlse"]}
    *gradients, of_captured = reference.attention_backward(*given, return_dscore_mod=True, **options)
    bar = 0.02 if arrays["q"].dtype.itemsize == 2 else 1e-4
    for got, right in zip(found, (*gradients, *of_captured), strict=True):
        error = got.astype(np.float64) - right
        assert np.sqrt(np.mean(error**2)) <= bar * np.sqrt(np.mean(right**2))
        assert np.abs(error).max() <= 4 * bar * np.abs(right).max()


@pytest.mark.parametrize("kind", ["mask_mod", "block_mask"])
def test_torch_compiles_them(kind):
    """In one graph, as without torch.compile."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 600, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    distances = torch.tensor(DISTANCES, device="cuda", dtype=torch.float32, requires_grad=True)
    ids = torch.arange(600, device="cuda") // 170
    mask = pyflash.masks.and_masks(pyflash.masks.documents(ids), pyflash.masks.causal())
    mask = {"mask_mod": mask, "block_mask": pyflash.block_mask(mask, 1, 1, 600, 600)}[kind]
    score_mod = added(distances, None)

    def call(q, k, v):
        return pyflash.flash_attention(q.sin(), k, v, score_mod=score_mod, **{kind: mask}).float()

    inputs = q, k, v, distances
    outs = [f(q, k, v) for f in (torch.compile(call, fullgraph=True), call)]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_differentiates_by_them(name):
    """As it does written out in full."""
    torch = pytest.importorskip("torch")
    arrays = (RNG.standard_normal((1, 300, 2, 64)) for _ in range(3))
    q, k, v = (torch.tensor(a, device="cuda", dtype=torch.float64) for a in arrays)
    captured = [torch.tensor(a, device="cuda", dtype=torch.float64) for a in (DISTANCES, SCALES)]
    inputs = [a.requires_grad_() for a in (q, k, v, *captured)]
    out = pyflash.flash_attention(q, k, v, causal=True, score_mod=FUNCTIONS[name](*captured))
    found = torch.autograd.grad((out**2).sum(), inputs, allow_unused=True)
    i, j = torch.arange(300, device="cuda")[:, None], torch.arange(300, device="cuda")
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 8
    if name == "added":
        s = s + captured[0][:2, (i + 100 - j).abs().clamp(max=255)]
    else:
        s = torch.tanh(s * captured[1][:1, :2, None, None]) + captured[0][:2, None, j % 256]
    p = torch.softmax(s.masked_fill(j > i, -torch.inf), -1)
    expected = torch.autograd.grad((torch.einsum("bhij,bjhd->bihd", p, v) ** 2).sum(), inputs, allow_unused=True)
    for got, right in zip(found, expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-8)
