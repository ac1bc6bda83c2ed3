"""The public functions on NumPy arrays: what goes in, what comes out, what is refused."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import pyflash
from pyflash import dispatch, features, reference

RNG = np.random.default_rng(0)
BF16 = pytest.importorskip("ml_dtypes").bfloat16


def arrays(dtype="float32", batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_kv=2, dim=16, dim_v=24):
    shapes = (batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim_v)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=lambda dtype: np.dtype(dtype).name)
def test_results_have_the_dtypes_of_the_contract(dtype):
    q, k, v = arrays(dtype)
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == dtype and out.shape == (2, 5, 4, 24)
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32) and lse.shape == (2, 4, 5)
    gradients = pyflash.flash_attention_backward(out, q, k, v, out, lse)
    assert [(g.dtype, g.shape) for g in gradients] == [(np.dtype(dtype), a.shape) for a in (q, k, v)]


def test_inputs_are_left_as_they_were():
    inputs = arrays()
    before = [a.copy() for a in inputs]
    out, lse = pyflash.flash_attention(*inputs, causal=True, return_lse=True)
    pyflash.flash_attention_backward(out, *inputs, out, lse, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_out_is_written_and_returned():
    q, k, v = arrays()
    expected = pyflash.flash_attention(q, k, v)
    for out in (np.full((2, 5, 4, 24), np.nan, np.float32), np.full((2, 4, 5, 24), np.nan, np.float32).swapaxes(1, 2)):
        assert pyflash.flash_attention(q, k, v, out=out) is out
        assert np.array_equal(out, expected)
        result, lse = pyflash.flash_attention(q, k, v, out=out, return_lse=True)
        assert result is out and lse.shape == (2, 4, 5)


def test_out_must_not_lie_on_an_input():
    q, k, _ = arrays(dim_v=16, heads_kv=4, seqlen_k=5)
    packed = np.zeros((2, 2, 5, 4, 16), np.float32)
    with pytest.raises(ValueError, match="out: got memory that overlaps q's, takes memory of its own"):
        pyflash.flash_attention(q, k, k, out=q)
    assert pyflash.flash_attention(packed[0], packed[0], packed[0], out=packed[1]) is not None
    for name, option in (("bias", packed[1, 0, :, 0, 0]), ("sinks", packed[1, 0, 0, :, 0])):
        with pytest.raises(ValueError, match=f"out: got memory that overlaps {name}'s"):
            pyflash.flash_attention(packed[0], packed[0], packed[0], out=packed[1], **{name: option})


@pytest.mark.parametrize("window", [(2, 2**31), (2, 2**63 - 1), (2, 2**70), (2**70, 2), (2**70, 2**70)])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_past_every_length(window, masked):
    q, k, v = arrays()
    mask = {"mask": np.ones((5, 7), bool)} if masked else {}
    near = tuple(min(side, 100) for side in window)
    for a, b in zip(
        pyflash.flash_attention(q, k, v, window=window, return_lse=True, **mask),
        pyflash.flash_attention(q, k, v, window=near, return_lse=True, **mask),
        strict=True,
    ):
        assert np.array_equal(a, b)
    options = {"window": window, **mask}
    expected = pyflash.reference.attention(q, k, v, window=near)[0]
    assert np.array_equal(pyflash.reference.attention(q, k, v, **options)[0], expected)


def test_out_that_cannot_be_written_is_refused():
    q, k, v = arrays()
    out = np.zeros((2, 5, 4, 24), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="^out: .*takes"):
        pyflash.flash_attention(q, k, v, out=out)


@pytest.mark.parametrize("bad", [[[1.0]], 3.0, None, "q", object()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_no_array_is_refused(bad, position):
    given = arrays()
    given[position] = bad
    with pytest.raises(TypeError, match=rf"^{'qkv'[position]}: got .*{type(bad).__name__}, takes an array"):
        pyflash.flash_attention(*given)


# What the call gets -> the start of the message. Each is raised by the public function itself.
BAD_CALLS = {
    "zero heads": (lambda q, k, v: (q[:, :, :0], k, v), {}, "q: got 0 heads, takes at least 1"),
    "no head_dim": (lambda q, k, v: (q[..., :0], k[..., :0], v), {}, "q: got head_dim 0, takes 1 to 256"),
    "no key head": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), {}, "k: got 0 heads, takes at least 1"),
    "odd ratio": (lambda q, k, v: (q[:, :, :3], k, v), {}, "q: got 3 heads, takes a multiple of k's 2"),
    "rank": (lambda q, k, v: (q[0], k, v), {}, r"q: got 3 dimensions \(5, 4, 16\), takes 4"),
    "integers": (lambda q, k, v: (q.astype(int), k, v), {}, "q: got dtype int64, takes one of float16"),
    "mixed dtypes": (lambda q, k, v: (q, k, v.astype("float16")), {}, "v: got dtype float16, takes float32, as q"),
    "scale": (
        lambda q, k, v: (q, k, v),
        {"softmax_scale": np.nan},
        "softmax_scale: got nan, takes a number from -1e30 to 1e30 or None",
    ),
    "scale past float32": (
        lambda q, k, v: (q, k, v),
        {"softmax_scale": 1e39},
        "softmax_scale: got 1e.39, takes a number",
    ),
    "scale past floats": (lambda q, k, v: (q, k, v), {"softmax_scale": 10**400}, "softmax_scale: got 1000"),
    "causal": (lambda q, k, v: (q, k, v), {"causal": "yes"}, "causal: got 'yes', takes True or False"),
    "window of one": (lambda q, k, v: (q, k, v), {"window": 5}, r"window: got 5, takes \(left, right\), each None or"),
    "window of three": (lambda q, k, v: (q, k, v), {"window": (1, 2, 3)}, r"window: got \(1, 2, 3\), takes \(left"),
    "negative window": (lambda q, k, v: (q, k, v), {"window": (-1, 2)}, r"window: got \(-1, 2\), takes .* from 0 on"),
    "window of floats": (lambda q, k, v: (q, k, v), {"window": (1.5, 2)}, r"window: got \(1.5, 2\), takes .* integer"),
    "softcap of 0": (
        lambda q, k, v: (q, k, v),
        {"softcap": 0.0},
        "softcap: got 0.0, takes None or a number from 1e-30 to 1e30",
    ),
    "softcap inf": (
        lambda q, k, v: (q, k, v),
        {"softcap": np.inf},
        "softcap: got inf, takes None or a number from 1e-30 to 1e30",
    ),
    "softcap past float32": (
        lambda q, k, v: (q, k, v),
        {"softcap": 1e39},
        "softcap: got 1e.39, takes None or a number",
    ),
    "softcap past floats": (lambda q, k, v: (q, k, v), {"softcap": 10**400}, "softcap: got 1000"),
    "dropout past floats": (lambda q, k, v: (q, k, v), {"dropout_p": 10**400}, "dropout_p: got 1000"),
    "softcap text": (
        lambda q, k, v: (q, k, v),
        {"softcap": "30"},
        "softcap: got '30', takes None or a number from 1e-30 to 1e30",
    ),
    "slopes in half": (
        lambda q, k, v: (q, k, v),
        {"alibi_slopes": np.zeros(4, np.float16)},
        "alibi_slopes: got dtype float16, takes float32 for float32 inputs",
    ),
    "slopes of key heads": (
        lambda q, k, v: (q, k, v),
        {"alibi_slopes": np.zeros(2, np.float32)},
        r"alibi_slopes: got shape \(2,\), takes \(4,\) or \(2, 4\): \(heads_q,\) or",
    ),
    "slopes in a list": (
        lambda q, k, v: (q, k, v),
        {"alibi_slopes": [0.5] * 4},
        "alibi_slopes: got builtins.list, takes an array",
    ),
    "dropout of 1": (lambda q, k, v: (q, k, v), {"dropout_p": 1.0}, "dropout_p: got 1.0, takes a number from 0 up to"),
    "negative dropout": (lambda q, k, v: (q, k, v), {"dropout_p": -0.1}, "dropout_p: got -0.1, takes a number from 0"),
    "dropout text": (lambda q, k, v: (q, k, v), {"dropout_p": "a"}, "dropout_p: got 'a', takes a number from 0"),
    "seed of a half": (lambda q, k, v: (q, k, v), {"dropout_p": 0.1, "seed": 0.5}, "seed: got 0.5, takes None or an i"),
    "negative seed": (lambda q, k, v: (q, k, v), {"dropout_p": 0.1, "seed": -1}, "seed: got -1, takes None or an int"),
    "mask of numbers": (
        lambda q, k, v: (q, k, v),
        {"mask": np.ones((5, 7), np.int8)},
        "mask: got dtype int8, takes bool for float32 inputs",
    ),
    "mask too long": (
        lambda q, k, v: (q, k, v),
        {"mask": np.ones((5, 8), bool)},
        r"mask: got shape \(5, 8\), takes one that broadcasts to \(2, 4, 5, 7\): \(batch, heads_q",
    ),
    "bias of key heads": (
        lambda q, k, v: (q, k, v),
        {"bias": np.ones((2, 5, 7), np.float32)},
        r"bias: got shape \(2, 5, 7\), takes one that broadcasts to \(2, 4, 5, 7\)",
    ),
    "bias in half": (
        lambda q, k, v: (q, k, v),
        {"bias": np.ones((5, 7), np.float16)},
        "bias: got dtype float16, takes float32 for float32 inputs",
    ),
    "sinks of key heads": (
        lambda q, k, v: (q, k, v),
        {"sinks": np.ones(2, np.float32)},
        r"sinks: got shape \(2,\), takes \(4,\): \(heads_q,\)",
    ),
    "return_lse": (lambda q, k, v: (q, k, v), {"return_lse": 1}, "return_lse: got 1, takes True or False"),
    "out's shape": (lambda q, k, v: (q, k, v), {"out": np.zeros((2, 5, 4, 16), np.float32)}, r"out: got shape \(2, 5"),
}


@pytest.mark.parametrize("change, options, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(change, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        pyflash.flash_attention(*change(*arrays()), **options)


def test_bad_backward_calls():
    q, k, v = arrays()
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    call = pyflash.flash_attention_backward
    with pytest.raises(ValueError, match=r"^lse: got shape \(2, 4, 4\), takes \(2, 4, 5\)"):
        call(out, q, k, v, out, lse[..., :4])
    with pytest.raises(ValueError, match=r"^dout: got shape \(2, 4, 4, 24\), takes \(2, 5, 4, 24\)"):
        call(out[:, :4], q, k, v, out, lse)
    with pytest.raises(TypeError, match=r"^lse: got dtype float64, takes float32"):
        call(out, q, k, v, out, lse.astype(np.float64))
    with pytest.raises(TypeError, match=r"^dlse: got .*list, takes an array"):
        call(out, q, k, v, out, lse, dlse=[0.0])
    with pytest.raises(ValueError, match=r"^return_dbias: got True, takes False where bias is None"):
        call(out, q, k, v, out, lse, return_dbias=True)
    with pytest.raises(ValueError, match=r"^seed: got None, takes the forward's"):
        call(out, q, k, v, out, lse, dropout_p=0.1)
    with pytest.raises(ValueError, match=r"^dropout_p: got 1.5, takes a number from 0"):
        call(out, q, k, v, out, lse, dropout_p=1.5)
    with pytest.raises(TypeError, match=r"^deterministic: got 1, takes True or False"):
        call(out, q, k, v, out, lse, deterministic=1)


def test_without_a_seed_each_call_drops_others(monkeypatch):
    monkeypatch.setattr(dispatch, "_prepared", {})
    q, k, v = arrays()
    first, second = (pyflash.flash_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not np.array_equal(first, second)
    first, second = (pyflash.flash_attention(q, k, v, dropout_p=0.5, seed=3) for _ in range(2))
    assert np.array_equal(first, second)
    assert len(dispatch._prepared) == 1, "a new seed is no new plan"


def test_strides_of_a_fraction_of_an_element_are_refused():
    raw = np.zeros(2 * 5 * 4 * 16 * 6 + 8, np.uint8)
    odd = np.ndarray((2, 5, 4, 16), np.float32, raw, strides=(6 * 320, 6 * 64, 6 * 16, 6))
    with pytest.raises(pyflash.Unsupported, match="^q: "):
        pyflash.flash_attention(odd, odd, odd)


GIVEN = {  # all that may be a NumPy array, and how its numbers are stored
    **dict.fromkeys("qkv", "f"), "bias": "f", "sinks": "f", "alibi_slopes": "f", "out": "f", "mask": "?",
    "score_mod": "f", "seqused_q": "i", "seqused_k": "i",
}  # fmt: skip


def of_all_options(replaced: str, change):
    """A call in which one array is changed, and what errors call that."""
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v, "out": np.zeros((*q.shape[:3], v.shape[3]), np.float32)}
    given |= {"bias": np.ones((5, 7), np.float32), "mask": np.ones((5, 7), bool)}
    given |= {name: np.ones(4, np.float32) for name in ("sinks", "alibi_slopes", "score_mod")}
    given |= {"seqused_q": np.array([5, 2]), "seqused_k": np.array([6, 7])}
    given[replaced] = change(given[replaced])
    table = given["score_mod"]
    given["score_mod"] = lambda s, b, h, i, j: s + table[h]
    return given, "array 0 that score_mod or mask_mod captures" if replaced == "score_mod" else replaced


@pytest.mark.parametrize("name", GIVEN)
def test_the_other_byte_order_is_refused_or_right(name):
    given, shown = of_all_options(name, lambda a: a.astype(a.dtype.newbyteorder("S")))
    if GIVEN[name] == "f":
        with pytest.raises(pyflash.Unsupported, match=f"^{shown}: got dtype .f4, takes the machine's byte order"):
            pyflash.flash_attention(**given)
    else:  # lengths are copied; a boolean is one byte
        plain = {**given, name: given[name].astype(given[name].dtype.newbyteorder("="))}
        assert np.array_equal(pyflash.flash_attention(**given), pyflash.flash_attention(**plain))


@pytest.mark.parametrize("name", GIVEN)
def test_masked_arrays_are_refused(name):
    given, shown = of_all_options(name, lambda a: np.ma.masked_array(a, a > 5))
    with pytest.raises(TypeError, match=f"^{shown}: got a numpy.ma.MaskedArray, takes "):
        pyflash.flash_attention(**given)


def test_a_call_does_not_depend_on_those_before():
    """Same shapes, other strides, dtypes or broadcasts, in either order: each equals a call on a contiguous copy."""
    base = RNG.standard_normal((2, 4, 5, 16)).astype(np.float32)
    variants = [
        base.swapaxes(1, 2),
        np.ascontiguousarray(base.swapaxes(1, 2)),
        np.broadcast_to(base.swapaxes(1, 2)[:, :1], (2, 5, 4, 16)),
        base.swapaxes(1, 2)[:, ::-1],
        base.swapaxes(1, 2).astype(np.float64),
        base.swapaxes(1, 2).astype(np.float16),
    ]
    for a in (*variants, *reversed(variants)):
        expected = pyflash.flash_attention(*(np.ascontiguousarray(a) for _ in range(3)), causal=True)
        assert np.array_equal(pyflash.flash_attention(a, a, a, causal=True), expected)


def test_repeated_calls_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_PREPARED", 8)
    monkeypatch.setattr(dispatch, "_prepared", {})
    for seqlen in range(1, 30):
        q, k, v = arrays(seqlen_q=seqlen)
        pyflash.flash_attention(q, k, v)
    assert len(dispatch._prepared) <= 8


@pytest.mark.parametrize("shape_q, shape_k", [((0, 5), (0, 7)), ((2, 0), (2, 7)), ((2, 5), (2, 0)), ((2, 0), (2, 0))])
def test_empty_problems(shape_q, shape_k):
    q, dout = np.ones((*shape_q, 4, 8), np.float32), np.ones((*shape_q, 4, 12), np.float32)
    k, v = np.ones((*shape_k, 2, 8), np.float32), np.ones((*shape_k, 2, 12), np.float32)
    for causal in (False, True):
        out, lse = pyflash.flash_attention(q, k, v, causal=causal, return_lse=True)
        assert out.shape == dout.shape and lse.shape == (shape_q[0], 4, shape_q[1])
        if not shape_k[1]:
            assert not out.any() and (lse == -np.inf).all()
        gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=causal)
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize(
    "scale", [0.3, np.float32(0.3), np.float64(0.3), np.array(0.3)], ids=lambda s: type(s).__name__
)
def test_any_kind_of_scalar(scale):
    q, k, v = arrays("float64")
    out, lse = pyflash.flash_attention(q, k, v, softmax_scale=scale, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, softmax_scale=float(scale))
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_signatures():
    forward = inspect.signature(pyflash.flash_attention)
    backward = inspect.signature(pyflash.flash_attention_backward)
    options = "softmax_scale=None, " + ", ".join(f"{f.name}={f.default}" for f in features.FEATURES) + ", seed=None"
    used = "seqused_q=None, seqused_k=None"
    assert str(forward) == f"(q, k, v, *, {options}, {used}, return_lse=False, out=None)"
    returns = ", ".join(f"return_d{f.name}=False" for f in features.FEATURES if f.has_gradient)
    gradients = f"dlse=None, deterministic=False, {returns}"
    assert str(backward) == f"(dout, q, k, v, out, lse, *, {options}, {used}, {gradients})"
    offsets = f"cu_seqlens_q, cu_seqlens_k=None, *, max_seqlen_q=None, max_seqlen_k=None, {used}"
    varlen = inspect.signature(pyflash.flash_attention_varlen)
    assert str(varlen) == f"(q, k, v, {offsets}, {options}, return_lse=False, out=None)"
    varlen = inspect.signature(pyflash.flash_attention_varlen_backward)
    assert str(varlen) == f"(dout, q, k, v, out, lse, {offsets}, {options}, {gradients})"


@pytest.mark.parametrize("name", pyflash.__all__)
def test_everything_public_is_documented(name):
    thing = getattr(pyflash, name)
    text = inspect.getdoc(thing)
    assert text and len(text) > 30
    if inspect.isfunction(thing):
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"^[\w, ]*\b{parameter}\b[\w, ]*( :|$)", text, re.MULTILINE), f"{name}: {parameter}"


CALLS = (
    *(pyflash.flash_attention, pyflash.flash_attention_backward, pyflash.explain, pyflash.block_mask),
    *(pyflash.flash_attention_varlen, pyflash.flash_attention_varlen_backward),
    *(x for n, x in vars(pyflash.masks).items()
      if inspect.isfunction(x) and x.__module__ == "pyflash.masks" and n[0] != "_"),
    *(x for n, x in vars(reference).items() if n.startswith("attention")),
)  # fmt: skip


@pytest.mark.parametrize("function", CALLS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_calls_say_what_they_take_give_and_raise(function):
    text = inspect.getdoc(function)
    titles = re.findall(r"^(\w+)\n-+$", text, re.MULTILINE)
    assert titles[:3] == ["Parameters", "Returns", "Raises"], text
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^[\w, ]*\b{parameter}\b[\w, ]*( :|$)", text, re.MULTILINE), parameter
    raises = text.partition("Raises\n------\n")[2]
    assert re.match(
        r"(TypeError|ValueError|pyflash\.Unsupported)(, (ValueError|pyflash\.Unsupported))*\n    \w", raises
    )


def test_masks_raise_what_they_say():
    """The errors that their documentation names, and no others."""
    bad = {
        "causal": [{"shift": 0.5}],
        "sliding_window": [{"left": "a"}, {"left": -1}, {"left": 1, "right": None}, {"left": 1, "sinks": -1}],
        "prefix_lm": [{"prefix": -1}, {"prefix": "a"}, {"prefix": np.ones((2, 2))}],
        "documents": [{"ids": 3}, {"ids": np.ones((2, 2, 2))}, {"ids": np.ones(2), "ids_k": np.ones((2, 2))}],
        "packed_documents": [{"cu_seqlens": x} for x in ([0], np.array([1, 2]), np.array([0, 2, 1]), np.ones((1, 2)))],
        "and_masks": [(), (3,)],
        "or_masks": [(), (3,)],
    }  # fmt: skip
    assert set(bad) == {x.__name__ for x in CALLS if x.__module__ == pyflash.masks.__name__}
    for name, calls in bad.items():
        function, said = getattr(pyflash.masks, name), inspect.getdoc(getattr(pyflash.masks, name))
        for given in calls:
            with pytest.raises((TypeError, ValueError)) as caught:
                function(**given) if isinstance(given, dict) else function(*given)
            assert type(caught.value).__name__ in said.partition("Raises")[2]


def test_errors_are_what_the_standard_library_knows():
    assert issubclass(pyflash.Unsupported, NotImplementedError)
    assert issubclass(pyflash.CompileError, RuntimeError) and issubclass(pyflash.LaunchError, RuntimeError)
