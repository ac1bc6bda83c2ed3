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


def test_other_libraries_next_to_it_are_refused():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="^v: got a numpy array, takes jax on the CPU, as q"):
        pyflash.flash_attention(q, k, np.asarray(v))
