"""JAX arrays on the GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pyflash
from pyflash import reference

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other tests need the memory
jax = pytest.importorskip("jax")


@pytest.fixture(scope="module", autouse=True)
def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no GPU: {error}")


def inputs(gpu, dtype: str):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, 100, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64), (2, 100, 4, 64)
    return [jax.device_put(jax.random.normal(key, s).astype(dtype), gpu) for key, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_in_arrays_out(gpu, dtype):
    q, k, v, dout = inputs(gpu, dtype)
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    assert all(isinstance(a, jax.Array) and a.devices() == {gpu} for a in (out, lse, *gradients))
    assert out.dtype == dtype and lse.dtype == "float32"
    q, k, v, dout = (np.asarray(a).astype(np.float64) for a in (q, k, v, dout))
    expected = (reference.attention(q, k, v, causal=True)[0], *reference.attention_backward(dout, q, k, v, causal=True))
    bound = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}[dtype]
    for got, want in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=bound * np.abs(want).max())


def test_results_are_in_order_with_jaxs_own_work(gpu):
    """Inputs still being computed by JAX, results used by JAX at once."""
    q, k, v, _ = inputs(gpu, "float32")
    square = jax.jit(lambda a: jax.lax.fori_loop(0, 200, lambda _, x: jax.numpy.sin(x), a))
    expected = np.asarray(pyflash.flash_attention(*(np.asarray(square(a)) for a in (q, k, v))))
    for _ in range(5):
        out = pyflash.flash_attention(square(q), square(k), square(v))
        np.testing.assert_allclose(np.asarray(out * 2), 2 * expected, atol=1e-5)


def test_arrays_cannot_be_written_to(gpu):
    q, k, v, dout = inputs(gpu, "float32")
    with pytest.raises(ValueError, match="^out: .* read-only"):
        pyflash.flash_attention(q, k, v, out=dout)


def test_gradients(gpu):
    from pyflash.jax import flash_attention

    q, k, v, dout = inputs(gpu, "float32")
    ours = jax.grad(lambda *a: (flash_attention(*a, causal=True) * dout).sum(), (0, 1, 2))(q, k, v)
    expected = reference.attention_backward(*(np.asarray(a) for a in (dout, q, k, v)), causal=True)
    for got, want in zip(ours, expected, strict=True):
        assert got.devices() == {gpu}
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-5 * np.abs(want).max())
