"""JAX arrays on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import pyflash
from pyflash import arrays, reference

jax = pytest.importorskip("jax")
jnp = jax.numpy


def inputs(dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 12)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_in_arrays_out(dtype):
    q, k, v = inputs(dtype)
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    gradients = pyflash.flash_attention_backward(out, q, k, v, out, lse, causal=True)
    assert all(isinstance(a, jax.Array) for a in (out, lse, *gradients))
    assert out.dtype == dtype and lse.dtype == "float32"
    assert [(g.dtype, g.shape) for g in gradients] == [(q.dtype, a.shape) for a in (q, k, v)]
    wide = [np.asarray(a).astype(np.float64) for a in (q, k, v)]
    bound = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6}[dtype]
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), reference.attention(*wide, causal=True)[0], atol=3 * bound
    )


def test_double_precision():
    with jax.enable_x64(True):
        q, k, v = inputs("float64")
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
        assert out.dtype == lse.dtype == "float64"


def test_memory_is_shared():
    q, _, _ = inputs()
    assert arrays.kind_of(q, "q").view(q).ctypes.data == q.unsafe_buffer_pointer()


def test_arrays_cannot_be_written_to():
    """JAX relies on its arrays never changing."""
    q, k, v = inputs()
    out = jnp.zeros((2, 5, 4, 12))
    with pytest.raises((TypeError, ValueError, pyflash.Unsupported), match="^out: .*takes"):
        pyflash.flash_attention(q, k, v, out=out)
    assert not out.any()


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=lambda t: t.__name__)
def test_tracing_is_refused_rather_than_wrong(transform):
    q, k, v = inputs()
    with pytest.raises(pyflash.Unsupported, match="^q: got a JAX tracer.*outside jax.jit"):
        transform(lambda q, k, v: pyflash.flash_attention(q, k, v).sum())(q, k, v)


SCALARS = {
    "softmax_scale": 0.5, "softcap": 2.0, "causal": True, "window": (2, None), "dropout_p": 0.5, "seed": 3,
    "return_lse": True, "deterministic": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "name, transform",
    [(name, t) for name, x in SCALARS.items() for t in (jax.jit, jax.vmap, *[jax.grad] * isinstance(x, float))],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_traced_scalars_are_refused(name, transform):
    from pyflash import jax as glue

    value = SCALARS[name]
    value = jax.tree.map(lambda x: jnp.array([x, x]), value) if transform is jax.vmap else value
    with pytest.raises(ValueError, match=f"^{name}: got a value that is traced, takes one that is not"):
        transform(lambda x: glue.flash_attention(*inputs(), **{name: x}).sum())(value)


@pytest.mark.parametrize("name", [name for name in SCALARS if name not in ("return_lse", "deterministic")])
def test_traced_scalars_of_the_plain_functions_are_refused(name):
    q, k, v = inputs()
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    for call in (
        lambda x: pyflash.flash_attention(q, k, v, **{name: x}),
        lambda x: pyflash.flash_attention_backward(out, q, k, v, out, lse, **{name: x}),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got .*Tracer.*takes"):
            jax.jit(call)(SCALARS[name])


def loss(attention, **options):
    def of(q, k, v):
        out = attention(q, k, v, **options)
        out = (out,) if isinstance(out, jax.Array) else out
        return sum((a * jnp.cos(jnp.arange(a.size).reshape(a.shape))).sum() for a in out)

    return of


def ordinary(q, k, v, causal=False, return_lse=False):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / q.shape[-1] ** 0.5
    if causal:
        s = jnp.where(jnp.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -jnp.inf)
    out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v, precision="highest")
    return (out, jax.nn.logsumexp(s, axis=-1)) if return_lse else out


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}, {"causal": True, "return_lse": True}])
def test_gradients(options):
    from pyflash.jax import flash_attention

    with jax.enable_x64(True):
        arrays = inputs("float64")
        ours = jax.value_and_grad(loss(flash_attention, **options), (0, 1, 2))(*arrays)
        theirs = jax.value_and_grad(loss(ordinary, **options), (0, 1, 2))(*arrays)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_gradients_by_finite_differences():
    from jax.test_util import check_grads

    from pyflash.jax import flash_attention

    with jax.enable_x64(True):
        check_grads(lambda *a: flash_attention(*a, causal=True, softmax_scale=0.3), inputs("float64"), 1, ("rev",))


@pytest.mark.parametrize("option", [{"window": (3, 1), "softcap": 2.0}, {"mask": (5, 7)}],
                         ids=str)  # fmt: skip
def test_options(option):
    from jax.test_util import check_grads

    from pyflash.jax import flash_attention

    with jax.enable_x64(True):
        if "mask" in option:
            option = {"mask": jax.random.normal(jax.random.key(1), option["mask"]) > -0.5}
        check_grads(lambda *a: flash_attention(*map(jnp.asarray, a), **option), inputs("float64"), 1, ("rev",))


@pytest.mark.parametrize("name, shape", [("bias", (4, 1, 7)), ("sinks", (4,))])
def test_gradients_of_options(name, shape):
    from jax.test_util import check_grads

    from pyflash.jax import flash_attention

    with jax.enable_x64(True):
        option = jax.random.normal(jax.random.key(1), shape, "float64")
        call = lambda q, k, v, x: flash_attention(q, k, v, causal=True, **{name: x})  # noqa: E731
        check_grads(call, (*inputs("float64"), option), 1, ("rev",))


@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_of_what_a_score_mod_captures(varlen):
    from pyflash.jax import flash_attention, flash_attention_varlen

    q, k, v = inputs()
    x, y = (jax.random.normal(jax.random.key(n), shape) for n, shape in ((1, (4, 7)), (2, (3,))))
    ids, lengths = jnp.arange(7, dtype="int32") // 3, {}
    if varlen:
        (q, k, v), lengths = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v)), {"cu_seqlens_q": [0, 5, 10]}
        lengths["cu_seqlens_k"] = [0, 9, 14]

    def options(x, y):
        score_mod = lambda s, b, h, i, j: pyflash.tanh(s * y[ids[i]]) + x[h, j]  # noqa: E731
        return {"score_mod": score_mod, "mask_mod": lambda b, h, i, j: ids[j] <= ids[i] + 1, **lengths}

    def loss(q, x, y):
        function = flash_attention_varlen if varlen else flash_attention
        return (function(q, k, v, **options(x, y)) ** 2).sum()

    found = jax.grad(loss, argnums=(0, 1, 2))(q, x, y)
    wide = [np.asarray(a).astype(np.float64) for a in (q, k, v, x, y)]
    call = options(*wide[3:])
    forward = reference.attention_varlen if varlen else reference.attention
    backward = reference.attention_varlen_backward if varlen else reference.attention_backward
    dout = 2 * forward(*wide[:3], **call)[0]
    dq, _, _, (dy, dx) = backward(dout, *wide[:3], return_dscore_mod=True, **call)
    for got, right in zip(found, (dq, dx, dy), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4)


def test_dropout():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    out, pullback = jax.vjp(lambda v: flash_attention(q, k, v, dropout_p=0.5), v)
    (dv,) = pullback(out)
    np.testing.assert_allclose((dv * v).sum(), (out * out).sum(), rtol=1e-4)  # out is linear in v, whatever was dropped
    once, again = (flash_attention(q, k, v, dropout_p=0.5, seed=3) for _ in range(2))
    assert np.array_equal(once, again) and not np.array_equal(once, out)


def test_gradients_of_one_input():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    gradient = jax.grad(lambda k: loss(flash_attention, deterministic=True)(q, k, v))(k)
    np.testing.assert_allclose(gradient, jax.grad(lambda k: loss(ordinary)(q, k, v))(k), atol=1e-4)


def test_it_is_the_same_function_without_gradients():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    for options in ({}, {"causal": True, "softmax_scale": 0.2}):
        assert np.array_equal(flash_attention(q, k, v, **options), pyflash.flash_attention(q, k, v, **options))


def test_jitted_neighbours():
    from pyflash.jax import flash_attention

    before, after = jax.jit(jnp.sin), jax.jit(lambda a: (a**2).sum())
    arrays = inputs()
    ours, theirs = (
        jax.grad(lambda q, k, v, f=f: after(f(before(q), before(k), v)), (0, 1, 2))(*arrays)
        for f in (flash_attention, ordinary)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.jit(jax.grad(f)), lambda f: jax.jacrev(jax.grad(f)), jax.checkpoint],
    ids=["jit", "vmap", "jit of grad", "second derivative", "checkpoint"],
)
def test_what_cannot_be_traced_says_so(transform):
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    if transform is jax.vmap:
        q, k, v = q[None], k[None], v[None]
    with pytest.raises(pyflash.Unsupported, match="got a JAX tracer.*outside jax.jit and jax.vmap"):
        transform(lambda q, k, v: flash_attention(q, k, v).sum())(q, k, v)


WITHOUT_GRADIENTS = {
    "alibi_slopes": np.ones(4, np.float32), "mask": np.ones((5, 7), bool), "seqused_q": [5, 3], "seqused_k": [7, 3],
    "cu_seqlens_q": [0, 2, 5],
}  # fmt: skip


@pytest.mark.parametrize("closed_over", [True, False])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.jit(jax.grad(f)), jax.vmap], ids=["jit", "grad", "vmap"])
@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_options_that_cannot_be_traced_say_so(name, transform, closed_over):
    """They have no gradients, which is not what is wrong here."""
    from pyflash import jax as glue

    q, k, v = inputs()
    if name == "cu_seqlens_q":
        q, k, v = q[0], k[0, :5], v[0, :5]
    function = glue.flash_attention_varlen if name == "cu_seqlens_q" else glue.flash_attention
    value = WITHOUT_GRADIENTS[name]
    call = lambda q, x: function(q, k, v, **{name: value if closed_over else x}).sum()  # noqa: E731
    given = q, jnp.asarray(value)
    if transform is jax.vmap:
        given = tuple(a[None] for a in given)
    with pytest.raises(pyflash.Unsupported, match="got a JAX tracer.*outside jax.jit and jax.vmap"):
        transform(call)(*given)


def test_errors_are_those_of_the_public_function():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    with pytest.raises(ValueError, match="^k: got shape"):
        flash_attention(q, k[:1], v)
    with pytest.raises(TypeError, match="causal"):
        flash_attention(q, k, v, causal="yes")
    with pytest.raises(TypeError, match="no_such_option"):
        flash_attention(q, k, v, no_such_option=1)


def test_what_a_mask_mod_captures_has_no_gradient():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    loss = lambda x: flash_attention(q, k, v, mask_mod=lambda b, h, i, j: x[j] > 0).sum()  # noqa: E731
    with pytest.raises(ValueError, match="^array 0 that score_mod or mask_mod captures: got an array that is traced"):
        jax.grad(loss)(jnp.ones(7))


def test_a_gradient_that_there_is_not_is_refused():
    from pyflash.jax import flash_attention

    q, k, v = inputs()
    slopes = jnp.ones(4)
    with pytest.raises(ValueError, match="^alibi_slopes: got an array that is traced.*it has no gradient"):
        jax.grad(lambda slopes: flash_attention(q, k, v, alibi_slopes=slopes).sum())(slopes)
    gradient = jax.grad(lambda q: flash_attention(q, k, v, alibi_slopes=slopes).sum())(np.asarray(q))
    assert gradient.shape == q.shape


def test_other_libraries_next_to_it_are_refused():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="^v: got a numpy array, takes jax on the CPU, as q"):
        pyflash.flash_attention(q, k, np.asarray(v))


def test_packed_sequences():
    """As each sequence alone, and so their gradients."""
    from pyflash.jax import flash_attention, flash_attention_varlen

    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, 2, 8)).astype(np.float32) for n in (9, 12))
    offsets = [0, 4, 9], [0, 2, 12]

    def packed(q, k, v):
        out, lse = flash_attention_varlen(q, k, v, *offsets, causal=True, return_lse=True)
        return (out * out).sum() + lse[:, 2:].sum()

    def alone(q, k, v):
        total = 0
        for rows, keys, first in ((slice(0, 4), slice(0, 2), 2), (slice(4, 9), slice(2, 12), 0)):
            tensors = (a[None] for a in (q[rows], k[keys], v[keys]))
            out, lse = flash_attention(*tensors, causal=True, return_lse=True)
            total += (out * out).sum() + lse[0, :, first:].sum()
        return total

    found = jax.value_and_grad(packed, argnums=(0, 1, 2))(q, k, k + 1)
    expected = jax.value_and_grad(alone, argnums=(0, 1, 2))(q, k, k + 1)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-5)
