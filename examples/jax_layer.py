"""A JAX attention layer that learns: jax.grad goes through PyFlash, and what surrounds it is jitted."""

import jax
import jax.numpy as jnp

from pyflash.jax import flash_attention

heads, kv_heads, head_dim = 8, 2, 16
width = heads * head_dim


@jax.jit
def before(weights, x):
    """q, k, v: (batch, seqlen, heads, head_dim)."""
    packed = (x @ weights["qkv"]).reshape(*x.shape[:2], heads + 2 * kv_heads, head_dim)
    return jnp.split(packed, (heads, heads + kv_heads), axis=2)


@jax.jit
def after(weights, out, target):
    return jnp.mean((out.reshape(target.shape) @ weights["out"] - target) ** 2)


def loss(attention, weights, x, target):
    # PyFlash launches its own kernels, so it is called between jitted functions, not inside one.
    return after(weights, attention(*before(weights, x)), target)


def ours(q, k, v):
    return flash_attention(q, k, v, causal=True)


def ordinary(q, k, v):
    k, v = (jnp.repeat(a, heads // kv_heads, axis=2) for a in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / head_dim**0.5
    s = jnp.where(jnp.tri(q.shape[1], dtype=bool), s, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v, precision="highest")


def train(attention, steps: int = 40) -> list[float]:
    keys = jax.random.split(jax.random.key(0), 3)
    columns = (heads + 2 * kv_heads) * head_dim
    weights = {
        "qkv": jax.random.normal(keys[0], (width, columns)) / width**0.5,
        "out": jax.random.normal(keys[1], (width, width)) / width**0.5,
    }
    # The task needs attention: each token's target is the input of the first token.
    x = jax.random.normal(keys[2], (4, 64, width))
    target = jnp.broadcast_to(x[:, :1], x.shape)
    losses = []
    for _ in range(steps):
        value, gradients = jax.value_and_grad(loss, argnums=1)(attention, weights, x, target)
        weights = jax.tree.map(lambda w, g: w - 2.0 * g, weights, gradients)
        losses.append(float(value))
    return losses


curves = {"PyFlash": train(ours), "ordinary": train(ordinary)}
for name, losses in curves.items():
    print(f"{name:9} loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
worst = max(abs(a - b) / b for a, b in zip(*curves.values(), strict=True))
print(f"{jax.devices()[0].platform}: the curves differ by at most {worst:.1e} of the loss")
assert worst < 1e-3 and curves["PyFlash"][-1] < 0.8 * curves["PyFlash"][0]
