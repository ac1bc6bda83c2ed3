"""JAX arrays in, JAX arrays out, with the gradients that jax.grad finds through ordinary attention."""

import jax
import jax.numpy as jnp

import pyflash

keys = jax.random.split(jax.random.key(0), 4)
q = jax.random.normal(keys[0], (2, 200, 8, 64), jnp.float32)
k = jax.random.normal(keys[1], (2, 200, 2, 64), jnp.float32)
v = jax.random.normal(keys[2], (2, 200, 2, 64), jnp.float32)
dout = jax.random.normal(keys[3], q.shape, jnp.float32)

# PyFlash launches its own kernels, so it is called outside jax.jit.
out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
print(type(out).__name__, out.shape, out.dtype, "on", *out.devices())


def ordinary_attention(q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    with jax.default_matmul_precision("highest"):
        s = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        s = jnp.where(jnp.tri(q.shape[1], dtype=bool), s, -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v)


expected, pullback = jax.vjp(ordinary_attention, q, k, v)
for name, ours, theirs in zip(("out", "dq", "dk", "dv"), (out, *gradients), (expected, *pullback(dout)), strict=True):
    difference = float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())
    print(f"{name:3} differs from ordinary attention by at most {difference:.1e}")
    assert difference < 1e-5
