"""A small GPT learns real text, bytes of this repository, on PyFlash and on torch's own attention: the same loss curve.

The two take turns, step by step, so that their times can be compared: on a GPU at 4096 tokens.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pyflash

cuda = torch.cuda.is_available()
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seqlen", type=int, default=4096 if cuda else 64)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--width", type=int, default=1024 if cuda else 48)
parser.add_argument("--heads", type=int, default=8 if cuda else 4)
parser.add_argument("--layers", type=int, default=4 if cuda else 2)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--compile", action="store_true", help="with torch.compile")
parser.add_argument("--plot", help="draw the loss curves into this PNG")
args = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
root = Path(__file__).resolve().parents[1]
text = b"".join(path.read_bytes() for path in sorted(root.glob("*.md")) + sorted(root.glob("examples/*.py")))
data = torch.frombuffer(bytearray(text * (1 + 4 * args.seqlen // len(text))), dtype=torch.uint8).to(device, torch.long)


def with_pyflash(q, k, v):
    return pyflash.flash_attention(q, k, v, causal=True)


def with_torch(q, k, v):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(args.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )

    def forward(self, x):
        # (batch, seqlen, heads, head_dim): slices of one array, used where they lie.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, args.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, args.width), nn.Embedding(args.seqlen, args.width)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(args.layers)))
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, 256))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


def train(attention) -> Iterator[tuple[float, float]]:
    """The loss and the seconds of each step."""
    torch.manual_seed(0)
    model = Gpt(attention).to(device)
    step = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 if cuda else 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.seqlen - 1, (args.batch,), generator=generator)
        batch = torch.stack([data[i : i + args.seqlen + 1] for i in starts])
        start = time.perf_counter()
        with torch.autocast(device, dtype, enabled=cuda):
            loss = F.cross_entropy(step(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), time.perf_counter() - start


steps = list(zip(train(with_pyflash), train(with_torch), strict=True))
curves, medians = {}, {}
for name, run in zip(("PyFlash", "torch"), zip(*steps, strict=True), strict=True):
    curves[name], seconds = zip(*run, strict=True)
    medians[name] = statistics.median(seconds)
    shown = "  ".join(f"{loss:.3f}" for loss in curves[name][:: max(1, args.steps // 6)])
    print(f"{name:8} {1e3 * medians[name]:7.1f} ms a step   loss {shown}  ->  {curves[name][-1]:.3f}")
print(f"a step with PyFlash takes {medians['PyFlash'] / medians['torch']:.3f} of the time of one with torch")

worst = max(abs(a - b) / b for a, b in zip(*curves.values(), strict=True))
print(f"{device}, {args.batch} x {args.seqlen} bytes: the curves differ by at most {worst:.1e} of the loss")
assert worst < (2e-2 if cuda else 1e-4)
assert curves["PyFlash"][-1] < 0.8 * curves["PyFlash"][0]

if args.plot:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, args.steps + 1), losses, style, label=name)
    axes.set(
        xlabel="step", ylabel="cross entropy of the next byte (nats)", title=f"{args.layers} layers, {args.width} wide"
    )
    axes.legend()
    figure.savefig(args.plot)
