"""Functions given as `score_mod` and `mask_mod`: what tracing makes of them, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from problems import FUNCTIONS, example

import pyflash
from pyflash import features, graphs, reference, source, trace
from pyflash.device import KNOWN
from pyflash.plan import plan

RNG = np.random.default_rng(0)
Q, K, V, DOUT = (RNG.standard_normal((2, n, 4, 8)) for n in (19, 23, 23, 19))
TABLE, IDS = RNG.standard_normal((4, 23)), np.arange(23, dtype=np.int32) // 6
WORDS = np.array(["a", "b"])
INDICES = {"batch": np.int32(1), "head": np.int32(2), "q_idx": np.int32(7), "kv_idx": np.int32(11)}


def value_of(function, score: float) -> float:
    mod = trace.trace("score_mod", function)
    return mod.graph.evaluate({"score": score, **INDICES}, mod.arrays, np.float64)


def slope_of(function, score: float) -> float:
    mod = trace.trace("score_mod", function)
    return mod.slope.evaluate({"score": score, **INDICES}, mod.arrays, np.float64)


SCORE_MODS = {
    "constant": lambda s, b, h, i, j: 3,
    "itself": lambda s, b, h, i, j: s,
    "sums": lambda s, b, h, i, j: 2 - s + i - (-s) * 3 + (s - j),
    "products": lambda s, b, h, i, j: s * s * i / (s + 2) - 3 / s + s / 4,
    "power": lambda s, b, h, i, j: s**3 - 2 * s**1,
    "exp, log": lambda s, b, h, i, j: pyflash.exp(-s) + pyflash.log(1 + s * s),
    "tanh": lambda s, b, h, i, j: 5 * pyflash.tanh(s / 5),
    "sqrt": lambda s, b, h, i, j: pyflash.sqrt(s * s + 1),
    "sin, cos": lambda s, b, h, i, j: pyflash.sin(2 * s) * pyflash.cos(s),
    "abs": lambda s, b, h, i, j: abs(s) + pyflash.abs(-s * 2),
    "minimum, maximum": lambda s, b, h, i, j: pyflash.minimum(s, 2 * s) + pyflash.maximum(3 * s, s - 1),
    "floor": lambda s, b, h, i, j: s * pyflash.floor(s * 10),
    "where": lambda s, b, h, i, j: pyflash.where((i < j) & ~(h == 3) | (s > 99), s * s, -s),
    "where of log": lambda s, b, h, i, j: pyflash.where(s > 0, pyflash.log(s), s),
    "integers": lambda s, b, h, i, j: s * ((i - j) // 3) + (i - j) % 3 + (i ^ 5) + (i | 8) + ~i,
    "tables": lambda s, b, h, i, j: s * TABLE[h, i] + TABLE[b, j % 4] * IDS[j],
    "NumPy's own": lambda s, b, h, i, j: np.tanh(s) * np.float32(2) + np.minimum(s, 1),
}


@pytest.mark.parametrize("score", [-1.3, 0.7, 2.2])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_trace_computes_what_the_function_does(name, score):
    function = SCORE_MODS[name]
    expected = function(np.float64(score), *(int(x) for x in INDICES.values()))
    assert value_of(function, score) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("score", [-1.31, 0.73, 2.21])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_the_derivative_is_a_difference_quotient(name, score):
    function, step = SCORE_MODS[name], 1e-6
    quotient = (value_of(function, score + step) - value_of(function, score - step)) / (2 * step)
    assert slope_of(function, score) == pytest.approx(float(quotient), rel=1e-6, abs=1e-6)


def test_the_derivative_of_what_is_not_chosen_has_no_influence():
    assert slope_of(lambda s, b, h, i, j: pyflash.where(s > 0, pyflash.sqrt(s), 2 * s), -1.0) == 2.0


def test_indices_outside_of_an_array_are_its_edge():
    table = np.arange(10.0)
    assert value_of(lambda s, b, h, i, j: table[i - 100], 0.0) == 0
    assert value_of(lambda s, b, h, i, j: table[i + 100], 0.0) == 9


def dense(scores, seen=True):
    """(out, lse) of a matrix of scores."""
    scores = np.where(seen, scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(scores - lse[..., None]), V), lse


def test_numpy_computes_what_a_matrix_does():
    plain = np.einsum("bihd,bjhd->bhij", Q, K) / math.sqrt(8)
    i, j = np.arange(19)[:, None], np.arange(23)
    distances = np.broadcast_to(np.abs(i - j), plain.shape)
    expected = dense(np.tanh(plain) + TABLE[:, None, :] - 0.1 * distances, IDS[:19, None] == IDS)

    def score_mod(score, batch, head, q_idx, kv_idx):
        return pyflash.tanh(score) + TABLE[head, kv_idx] - 0.1 * pyflash.abs(q_idx - kv_idx)

    def mask_mod(batch, head, q_idx, kv_idx):
        return IDS[q_idx] == IDS[kv_idx]

    call = {"score_mod": score_mod, "mask_mod": mask_mod}
    for found in (pyflash.flash_attention(Q, K, V, return_lse=True, **call), reference.attention(Q, K, V, **call)):
        for got, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-10)


def test_alibi_as_a_function_is_alibi():
    slopes = 2.0 ** -np.arange(1, 5)
    call = {"score_mod": lambda s, b, h, i, j: s - slopes[h] * pyflash.abs(i + 4 - j)}
    out, lse = pyflash.flash_attention(Q, K, V, alibi_slopes=slopes, return_lse=True)
    found = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, **call)
    expected = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, alibi_slopes=slopes)
    for got, right in zip((pyflash.flash_attention(Q, K, V, **call), *found), (out, *expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)


MASK_MODS = {  # and whether something is read for a key alone, and for a query alone
    "documents": (lambda b, h, i, j: IDS[i % 23] == IDS[j % 23], True, True),
    "documents, causal": (lambda b, h, i, j: (IDS[i] == IDS[j]) & (i >= j), True, True),
    "documents in a band": (lambda b, h, i, j: (i - j < 9) & ((IDS[i] == IDS[j]) & (j - i < 5)), True, True),
    "documents, causal, said twice": (lambda b, h, i, j: (i >= j) & ((IDS[i] == IDS[j]) | ~(i >= j)), True, True),
    "heads of keys": (lambda b, h, i, j: 2 * TABLE[h, j] > i - 9, True, False),
    "two arrays": (lambda b, h, i, j: (IDS[i] == IDS[j]) & (TABLE[h, j] < i), False, True),
    "real numbers": (lambda b, h, i, j: TABLE[h, i] == TABLE[h, j], True, True),
    "positions": (lambda b, h, i, j: i >= j, False, False),
    "relative": (lambda b, h, i, j: IDS[i - j] == 0, False, False),
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_what_is_read_for_a_key_or_a_query(name):
    function, *expected = MASK_MODS[name]
    mod = trace.trace("mask_mod", function)
    for place, there in zip(("kv_idx", "q_idx"), expected, strict=True):
        parts = graphs.shared(mod.graph, place)
        assert bool(parts) == there
        for i, j in ((3, 20), (12, 13)) if there else ():
            inputs = {"batch": np.int32(1), "head": np.int32(2), "q_idx": np.int32(i), "kv_idx": np.int32(j)}
            alone = {name: inputs[name] for name in ("batch", "head", place)}
            fact = parts[0].evaluate(alone, mod.arrays, np.float64)
            whole = mod.graph.evaluate(inputs, mod.arrays, np.float64)
            assert parts[1].evaluate({**inputs, "fact": fact}, mod.arrays, np.float64) == whole == function(1, 2, i, j)


def test_a_function_may_depend_on_queries_by_what_it_reads_for_them_and_position_alone():
    launches = {name: plan(example(mask_mod=mod), KNOWN["H200"]).launches[0] for name, (mod, *_) in MASK_MODS.items()}
    found = {name for name, launch in launches.items() if dict(launch.config)["ROW_FACTS"]}
    assert found == {"documents", "documents, causal", "documents in a band", "documents, causal, said twice"}
    for name in found:
        assert dict(launches[name].config)["POSITIONS"] == (name != "documents")


@pytest.mark.parametrize("name", MASK_MODS)
def test_what_reads_memory_and_what_is_by_position(name):
    mod = trace.trace("mask_mod", MASK_MODS[name][0])
    i, j = np.indices((30, 30), np.int32)
    inputs = {"batch": np.int32(1), "head": np.int32(2), "q_idx": i, "kv_idx": j}

    def values(graph):
        names = {node.value for node in graph.nodes if node.operation == "input"}
        return graph.evaluate({name: inputs[name] for name in names}, mod.arrays, np.float64)

    expected, given = values(mod.graph), [mod.graph]
    if parts := graphs.shared(mod.graph, "kv_idx"):
        inputs["fact"] = values(parts[0])
        given.append(parts[1])
    for graph in given:
        reading, positions = graphs.by_position(graph)
        assert positions is None or not any(x.operation == "load" or x.value == "fact" for x in positions.nodes)
        whole = values(reading) if positions is None else values(reading) & values(positions)
        np.testing.assert_array_equal(np.broadcast_to(whole, i.shape), expected)


def test_a_function_that_changes_nothing_costs_nothing():
    idle = trace.trace("score_mod", lambda s, b, h, i, j: s)
    for backward in (False, True):
        assert plan(example(score_mod=idle, backward=backward), KNOWN["H200"]) == plan(
            example(backward=backward), KNOWN["H200"]
        )
    out, lse = pyflash.flash_attention(Q, K, V, return_lse=True, score_mod=lambda s, b, h, i, j: s)
    call = {"score_mod": lambda s, b, h, i, j: s, "return_dscore_mod": True}
    assert pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, **call)[3] == ()


def test_the_gradient_of_a_bias_below_a_function():
    """By a difference quotient: the bias is added before the function."""
    bias, direction, step = RNG.standard_normal((4, 1, 23)), RNG.standard_normal((4, 1, 23)), 1e-6
    call = {"score_mod": lambda s, b, h, i, j: 2 * pyflash.tanh(s)}

    def loss(bias):
        return (reference.attention(Q, K, V, bias=bias, **call)[0] * DOUT).sum()

    quotient = (loss(bias + step * direction) - loss(bias - step * direction)) / (2 * step)
    out, lse = pyflash.flash_attention(Q, K, V, bias=bias, return_lse=True, **call)
    *_, dbias = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, bias=bias, return_dbias=True, **call)
    *_, right = reference.attention_backward(DOUT, Q, K, V, bias=bias, return_dbias=True, **call)
    assert (dbias * direction).sum() == pytest.approx(quotient, rel=1e-6)
    np.testing.assert_allclose(dbias, right, rtol=1e-10, atol=1e-12)


ROWS = RNG.standard_normal((2, 19, 4)).swapaxes(1, 2)[:, ::-1]  # of no contiguous memory
# Functions of arrays, the arrays that have gradients, and more options.
LEARNED = {
    "added": (lambda s, b, h, i, j: s + TABLE[h, i - j + 3], [TABLE], {"causal": True}),
    "many ways": (
        lambda s, b, h, i, j: pyflash.tanh(s * ROWS[b, h, i]) * TABLE[h, j] + pyflash.exp(TABLE[0, 5] * ROWS[1, 0, 0]),
        [ROWS, TABLE],
        {"softcap": 2.0, "bias": RNG.standard_normal((19, 23))},
    ),
    "beside integers": (
        lambda s, b, h, i, j: pyflash.where(IDS[i] == IDS[j], s, s * TABLE[h, IDS[j]]),
        [TABLE],
        {"mask_mod": lambda b, h, i, j: (ROWS[b, h, i] > -1) & (j > 2)},
    ),
    "by steps alone": (lambda s, b, h, i, j: s + pyflash.floor(TABLE[h, j]), [TABLE], {}),
    "none": (lambda s, b, h, i, j: s * IDS[j], [], {}),
    "with dropout": (lambda s, b, h, i, j: s * TABLE[h, i], [TABLE], {"dropout_p": 0.3, "seed": 7}),
    "lengths": (lambda s, b, h, i, j: s + TABLE[h, j] * ROWS[b, h, i], [TABLE, ROWS], {"seqused_k": [20, 9]}),
}


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_what_a_function_captures(name):
    """By difference quotients, along the axes of the arrays together."""
    function, arrays, options = LEARNED[name]
    call, step = {"score_mod": function, **options}, 1e-6

    def loss(arrays_step: float) -> float:
        for array, direction in zip(arrays, directions, strict=True):
            array += arrays_step * direction
        found = reference.attention(Q, K, V, **call)[0]
        for array, direction in zip(arrays, directions, strict=True):
            array -= arrays_step * direction
        return (found * DOUT).sum()

    out, lse = pyflash.flash_attention(Q, K, V, return_lse=True, **call)
    call = {**call, "return_dscore_mod": True}
    *others, found = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, **call)
    del call["return_dscore_mod"]
    plain = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, **call)
    *_, right = reference.attention_backward(DOUT, Q, K, V, return_dscore_mod=True, **call)
    assert all(np.array_equal(x, y) for x, y in zip(others, plain, strict=True))
    assert isinstance(found, tuple) and [x.shape for x in found] == [x.shape for x in arrays]
    for got, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)
    for _ in range(3):
        directions = [RNG.standard_normal(array.shape) for array in arrays]
        quotient = (loss(step) - loss(-step)) / (2 * step)
        along = sum((x * d).sum() for x, d in zip(found, directions, strict=True))
        assert along == pytest.approx(quotient, rel=2e-6, abs=1e-8)


def test_gradients_of_what_packed_sequences_have_in_common():
    q, k, v, dout = (a.reshape(-1, *a.shape[2:]) for a in (Q, K, V, DOUT))
    call = {"cu_seqlens_q": [0, 19, 30, 38], "cu_seqlens_k": [0, 23, 24, 46]}
    call["score_mod"] = lambda s, b, h, i, j: s * TABLE[h, b] + TABLE[h, i - j + 11]
    out, lse = pyflash.flash_attention_varlen(q, k, v, return_lse=True, **call)
    call["return_dscore_mod"] = True
    *_, (found,) = pyflash.flash_attention_varlen_backward(dout, q, k, v, out, lse, **call)
    *_, (right,) = reference.attention_varlen_backward(dout, q, k, v, **call)
    np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)
    assert np.abs(found).sum() > 1


def test_an_array_of_two_names_has_one_gradient():
    again = TABLE
    q, k, v, dout = (a.astype(np.float32) for a in (Q, K, V, DOUT))
    call = {"score_mod": lambda s, b, h, i, j: s + again[h, i] * TABLE[h, j]}
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **call)
    *_, found = pyflash.flash_attention_backward(dout, q, k, v, out, lse, return_dscore_mod=True, **call)
    *_, right = reference.attention_backward(dout, q, k, v, return_dscore_mod=True, **call)
    assert len(found) == 1 and found[0].dtype == TABLE.dtype
    np.testing.assert_allclose(found[0], right[0], rtol=1e-4, atol=1e-4)


def test_no_gradients_without_a_function():
    with pytest.raises(ValueError, match="^return_dscore_mod: got True, takes False where score_mod is None"):
        pyflash.flash_attention_backward(DOUT, Q, K, V, DOUT, np.ones((2, 4, 19)), return_dscore_mod=True)
    with pytest.raises(TypeError, match="^return_dscore_mod: got 1, takes True or False"):
        pyflash.flash_attention_backward(DOUT, Q, K, V, DOUT, np.ones((2, 4, 19)), return_dscore_mod=1)


REFUSED = {
    "if": (lambda s, b, h, i, j: s if i > j else 0, "bool.*pyflash.where"),
    "and": (lambda s, b, h, i, j: pyflash.where(i > j and h == 0, s, 0), "bool.*& [|] ~"),
    "max": (lambda s, b, h, i, j: max(s, 0), "max.*pyflash.where"),
    "float": (lambda s, b, h, i, j: float(s), "float.*pyflash.where, exp"),
    "math": (lambda s, b, h, i, j: math.exp(s), "float.*pyflash.where, exp"),
    "NumPy": (lambda s, b, h, i, j: np.arctan(s), "numpy.arctan.*pyflash.where, exp"),
    "NumPy's where": (lambda s, b, h, i, j: np.where(i > j, s, 0), "numpy.where.*pyflash.where"),
    "int": (lambda s, b, h, i, j: int(s), "int.*pyflash.floor"),
    "range": (lambda s, b, h, i, j: sum(range(i)), "Python index"),
    "loop": (lambda s, b, h, i, j: sum(s), "loop"),
    "power": (lambda s, b, h, i, j: s**0.5, r"\*\* 0.5.*pyflash.exp"),
    "floor division": (lambda s, b, h, i, j: s // 2, "//.*pyflash.floor"),
    "remainder": (lambda s, b, h, i, j: s % 2, "%.*pyflash.floor"),
    "bits": (lambda s, b, h, i, j: s & 1, "&.*comparisons or integers"),
    "condition": (lambda s, b, h, i, j: pyflash.where(i, s, 0), "where.*pyflash.where.x != 0"),
    "whole array": (lambda s, b, h, i, j: s + TABLE, r"TABLE.*TABLE\[head\]"),
    "one index of two": (lambda s, b, h, i, j: TABLE[h], r"TABLE\[...\].*2 dimensions.*an index for each"),
    "no integer": (lambda s, b, h, i, j: IDS[s], "kind real.*q_idx // 2"),
    "slice": (lambda s, b, h, i, j: IDS[1:2], "slice"),
    "shape": (lambda s, b, h, i, j: s * IDS.shape[0], "IDS.shape.*variables outside"),
    "dtype": (lambda s, b, h, i, j: WORDS[i], "WORDS.*float32"),
    "nothing": (lambda s, b, h, i, j: None, "None.*score"),
    "string": (lambda s, b, h, i, j: "s", "str"),
    "NaN": (lambda s, b, h, i, j: s + math.nan, "NaN"),
    "arguments": (lambda s: s, "1 arguments.*score, batch, head, q_idx, kv_idx"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_an_error_that_says_what_can(name):
    function, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"score_mod: got .*{message}"):
        pyflash.flash_attention(Q, K, V, score_mod=function)


def test_other_errors():
    tables = [np.zeros(3) for _ in range(5)]
    first, second, third, fourth, fifth = tables
    with pytest.raises(ValueError, match="score_mod: got 5 captured arrays.*takes up to 4"):
        pyflash.flash_attention(Q, K, V, score_mod=lambda s, b, h, i, j: (
            first[i] + second[i] + third[i] + fourth[i] + fifth[i]))  # fmt: skip
    with pytest.raises(ValueError, match="5 captured arrays, take 4 together"):
        pyflash.flash_attention(
            Q, K, V,
            score_mod=lambda s, b, h, i, j: first[i] + second[i] + third[i],
            mask_mod=lambda b, h, i, j: fourth[i] < fifth[i],
        )  # fmt: skip
    with pytest.raises(TypeError, match="mask_mod: got a function that returns a number.*x != 0"):
        pyflash.flash_attention(Q, K, V, mask_mod=lambda b, h, i, j: i - j)
    with pytest.raises(TypeError, match="mask_mod: got a list, takes None or a Python function of batch, head"):
        pyflash.flash_attention(Q, K, V, mask_mod=[1])
    with pytest.raises(IndexError, match="index -1.*from 0 on"):
        pyflash.flash_attention(Q, K, V, score_mod=lambda s, b, h, i, j: IDS[-1])
    empty = np.zeros((0,))
    with pytest.raises(ValueError, match="array 0 that score_mod or mask_mod captures: got shape .0,., takes one with"):
        pyflash.flash_attention(Q, K, V, score_mod=lambda s, b, h, i, j: empty[i])


def counted(calls: list, scale: float):
    def function(s, b, h, i, j):
        calls.append(scale)
        return s * scale + IDS[i]

    return function


def test_a_function_is_traced_once():
    calls, offsets = [], np.zeros(3)

    def made(scale: float, table):
        return lambda s, b, h, i, j: s * scale + table[i]

    mods = [trace.trace("score_mod", made(2.0, np.full(n, n))) for n in (3, 4)]
    assert mods[0].graph is mods[1].graph and [len(mod.arrays[0]) for mod in mods] == [3, 4], "another array"
    assert trace.trace("score_mod", made(3.0, offsets)).graph is not mods[0].graph, "another constant"
    # A list might change unseen, so a function that captures one is called each time, with the same result.
    function = counted(calls, 2.0)
    first, second = (trace.trace("score_mod", function) for _ in range(2))
    assert calls == [2.0, 2.0] and first.graph is second.graph


def test_changed_constants_are_seen():
    class Settings:
        scale = 1.0

    def function(s, b, h, i, j):
        return s * Settings.scale

    first = pyflash.flash_attention(Q, K, V, score_mod=function)
    Settings.scale = 2.0
    assert not np.allclose(first, pyflash.flash_attention(Q, K, V, score_mod=function))


def test_arrays_are_read_at_each_call():
    table = np.zeros(23)
    call = {"score_mod": lambda s, b, h, i, j: s + table[j]}
    first = pyflash.flash_attention(Q, K, V, **call)
    table[:5] = 9
    assert not np.allclose(first, pyflash.flash_attention(Q, K, V, **call))


def test_an_array_of_both_functions_is_one_argument():
    on = features.check({
        "score_mod": lambda s, b, h, i, j: s + TABLE[h, j] + IDS[i],
        "mask_mod": lambda b, h, i, j: IDS[i] == IDS[j],
    })  # fmt: skip
    scalars, arrays = features.parted(on)
    assert [array is right for array, right in zip(arrays.values(), (TABLE, IDS), strict=True)] == [True, True]
    assert all(not mod.arrays for mod in scalars.values()) and hash(tuple(scalars.items()))


@pytest.mark.parametrize("backward", [False, True])
def test_programs_have_functions_where_they_are_asked_for(backward):
    for options in ({}, {"mask_mod": FUNCTIONS["mask_mod"]}, FUNCTIONS):
        problem = example(dtype="float32", backward=backward, **options)
        for launch in plan(problem, KNOWN["H200"]).launches:
            text = source.program(launch)
            named = {name for name in ("score_mod", "score_mod_slope", "mask_mod") if f" {name}(" in text}
            slope = {"score_mod_slope"} if backward and "score_mod" in options else set()
            scores = "MASK_MOD" in dict(launch.config)
            assert named == (options.keys() | slope if scores else set())
            assert ("mod.cuh" in text) == bool(named)
