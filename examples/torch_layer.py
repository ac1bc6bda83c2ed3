"""A torch attention layer: gradients flow through pyflash.flash_attention like through any torch function."""

import torch

import pyflash


class SelfAttention(torch.nn.Module):
    """Causal self-attention with fewer key heads than query heads."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, width = x.shape
        packed = self.qkv(x).view(batch, seqlen, self.heads + 2 * self.kv_heads, self.head_dim)
        # Slices of the packed array, used where they lie.
        q, k, v = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        return self.out(pyflash.flash_attention(q, k, v, causal=True).reshape(batch, seqlen, width))


device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)

# The task needs attention: each token's target is the input of the first token.
layer = SelfAttention(width=128, heads=8, kv_heads=2).to(device, dtype)
x = torch.randn(4, 64, 128, device=device, dtype=dtype)
target = x[:, :1].expand_as(x)
optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
losses = []
for _ in range(60):
    loss = torch.nn.functional.mse_loss(layer(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{device}, {dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
assert losses[-1] < 0.6 * losses[0]

# The same numbers as torch's own attention, and the same gradients.
q, k, v = (torch.randn(2, 100, 4, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
ours = pyflash.flash_attention(q, k, v, causal=True)
theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
dout = torch.randn_like(ours)
pairs = zip(
    (ours, *torch.autograd.grad(ours, (q, k, v), dout)),
    (theirs.transpose(1, 2), *torch.autograd.grad(theirs, (q, k, v), dout.transpose(1, 2))),
    strict=True,
)
worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
print(f"largest relative difference from scaled_dot_product_attention, gradients included: {worst:.1e}")
assert worst < (2e-2 if device == "cuda" else 1e-5)
