"""The benchmark: what is measured, what is compared, and that wrong results are not timed."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from pyflash import bench, reference
from pyflash.bench import contestants, machines, table

CASE = bench.Case(2, 40, 50, 4, 2, 16, 16, "float32", (("causal", True),))


def measured(*others, case=CASE, directions=("forward", "backward")):
    machine = machines.Machine()
    return bench.measure([case], directions, machine, [contestants.PyFlash(), *others], budget=0)


def test_the_grid():
    cases = bench.grid(seqlens=[512, 4096], head_dims=[64, 128], options=[(), (("causal", True),)], dtype="float16",
                       tokens=4096, hidden=1024)  # fmt: skip
    assert len(cases) == 8 and len(set(map(str, cases))) == 8
    assert {(c.batch, c.seqlen_q) for c in cases} == {(8, 512), (1, 4096)}
    assert {(c.heads, c.head_dim) for c in cases} == {(16, 64), (8, 128)}
    assert cases[0].problem(True).backward and not cases[0].problem(False).backward


OPTIONS = [
    {},
    {"causal": True},
    {"window": (7, 3)},
    {"window": (None, 5)},
    {"causal": True, "window": (9, None)},
    {"softcap": 2.0},
    {"causal": True, "window": (4, 4), "softcap": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 50)])
def test_ordinary_attention_is_right(lengths, heads_kv, options):
    case = replace(CASE, seqlen_q=lengths[0], seqlen_k=lengths[1], heads_kv=heads_kv, options=tuple(options.items()))
    assert contestants.OrdinaryArrays(np).obstacle(case, machines.Machine()) is None
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in case.shapes.values()]
    calls = contestants.OrdinaryArrays(np).prepare(case, *arrays)
    q, k, v, dout = arrays
    np.testing.assert_allclose(calls.forward(), reference.attention(q, k, v, **options)[0], atol=1e-12)
    expected = reference.attention_backward(dout, q, k, v, **options)
    for results in (calls.backward(), calls.both()):
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)


def test_torchs_contestants_are_right():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape) for shape in CASE.shapes.values())
    expected = reference.attention_backward(dout, q, k, v, causal=True)

    class FlashAttnLike:
        @staticmethod
        def flash_attn_func(q, k, v, causal, window_size=(-1, -1)):
            from pyflash import flash_attn

            return flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]

    found = [contestants.OrdinaryTorch(), contestants.Sdpa("MATH"), contestants.FlashAttn("flash-attn", FlashAttnLike)]
    for contestant in found:
        calls = contestant.prepare(CASE, *(torch.from_numpy(a) for a in (q, k, v, dout)))
        np.testing.assert_allclose(calls.forward(), reference.attention(q, k, v, causal=True)[0], atol=1e-12)
        for results in (calls.backward(), calls.both()):
            for got, want in zip(results, expected, strict=True):
                np.testing.assert_allclose(got, want, atol=1e-12)


def test_rows_hold_what_follows_from_the_times():
    best, rows = measured(contestants.OrdinaryArrays(np))
    assert [(r.contestant, r.direction) for r in rows] == [
        ("PyFlash", "forward"), ("PyFlash", "backward"), ("ordinary", "forward"), ("ordinary", "backward")
    ]  # fmt: skip
    seen = sum(min(50, i + 11) for i in range(40)) * 2 * 4
    for row in rows:
        assert row.failure is None and row.memory_bytes > 0
        flops = 4 * 16 * seen * (1 if row.direction == "forward" else 2.5)
        assert row.flops == pytest.approx(flops / row.seconds)
        assert row.matmul_share == pytest.approx(row.flops / best.matmul_flops)
        assert row.copy_share == pytest.approx(row.bandwidth / best.copy_bandwidth)
    assert rows[0].ratio == rows[1].ratio == 1
    assert rows[2].ratio == pytest.approx(rows[2].seconds / rows[0].seconds)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_ordinary_attention_is_right(options):
    torch = pytest.importorskip("torch")
    case, rng = replace(CASE, options=tuple(options.items())), np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape) for shape in case.shapes.values())
    calls = contestants.OrdinaryTorch().prepare(case, *(torch.from_numpy(a) for a in (q, k, v, dout)))
    np.testing.assert_allclose(calls.forward(), reference.attention(q, k, v, **options)[0], atol=1e-12)
    for got, want in zip(calls.both(), reference.attention_backward(dout, q, k, v, **options), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


class Wrong(contestants.PyFlash):
    name = "wrong"

    def __init__(self, small: bool):
        self.small = small

    def prepare(self, case, q, k, v, dout):
        right = super().prepare(case, q, k, v, dout)
        is_small = case.batch == 1
        return right._replace(forward=lambda: right.forward() * (1.5 if is_small == self.small else 1))


@pytest.mark.parametrize("small, message", [(True, "wrong by"), (False, "differs from PyFlash by")])
def test_wrong_results_are_not_timed(small, message):
    _, rows = measured(Wrong(small))
    (row,) = (row for row in rows if row.contestant == "wrong" and row.direction == "forward")
    assert row.failure.startswith(message) and row.seconds is None
    assert all(row.failure is None for row in rows if row.contestant == "PyFlash")


def test_failures_are_told_and_cost_only_their_own_rows():
    class Forward(contestants.PyFlash):
        name = "forward alone"

        def prepare(self, case, *arrays):
            def backward():
                raise RuntimeError("there is\nno backward")

            return super().prepare(case, *arrays)._replace(backward=backward)

    class Full(contestants.OrdinaryArrays):
        name, options = "full alone", frozenset()

    class Hungry(contestants.OrdinaryArrays):
        name = "hungry"

        def prepare(self, case, *arrays):
            raise MemoryError

    best, rows = measured(Forward(), Full(np), Hungry(np))
    failures = {(row.contestant, row.direction): row.failure for row in rows if row.failure}
    assert failures == {
        ("forward alone", "backward"): "RuntimeError: there is",
        **{("full alone", d): "has no causal" for d in ("forward", "backward")},
        **{("hungry", d): "out of memory" for d in ("forward", "backward")},
    }
    text = table.text(best, rows)
    assert "full alone, forward, 1 of the cases: has no causal" in text and "hungry" in text


def test_ordinary_attention_is_not_begun_where_it_cannot_fit():
    machine = machines.Machine()
    long = replace(CASE, seqlen_q=1 << 17, seqlen_k=1 << 17)
    assert contestants.OrdinaryArrays(np).obstacle(CASE, machine) is None
    assert "GB" in contestants.OrdinaryArrays(np).obstacle(long, machine)


def test_csv():
    _, rows = measured(directions=("forward",))
    (line,) = csv.DictReader(io.StringIO(table.csv_text(rows)))
    assert line["contestant"] == "PyFlash" and line["options"] == "causal=True" and line["seqlen_k"] == "50"
    assert float(line["seconds"]) == rows[0].seconds


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from pyflash import plots

    best, rows = measured(contestants.OrdinaryArrays(np))
    plots.bench(best, rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("case", [replace(CASE, seqlen_q=1, seqlen_k=1), replace(CASE, options=(("dropout_p", 0.1),))])
def test_right_results_are_timed(case):
    """Gradients that are exactly 0; and what dropout leaves, with the seed of the reference."""
    assert [row.failure for row in measured(case=case)[1]] == [None, None]
