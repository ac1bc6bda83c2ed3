"""What chosen rows attend to: their probabilities, recomputed from lse without the whole matrix, and drawn.

Attention keeps the logarithm of each row's sum, lse, and with it any row of probabilities is one product away:
p = exp(softmax_scale * q k - lse). Each head here is made to look for something that a reader can check.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np

import pyflash

text = "attention is all you need, said the paper; the matrix is what you do not need, said the next."
seqlen, head_dim = len(text), 64
letters = sorted(set(text))
rng = np.random.default_rng(0)

# Vectors that are nearly at right angles to each other, for places and for letters.
places, of_letter = (rng.standard_normal((n, head_dim)) for n in (seqlen, len(letters)))
letter = of_letter[[letters.index(c) for c in text]]
vowel = np.isin(list(text), list("aeiou"))

heads = {
    "the letter before": (np.roll(places, 1, 0), places),
    "the same letter": (letter, letter),
    "vowels": (np.ones((seqlen, head_dim)), np.where(vowel, 1.0, -1.0)[:, None] * np.ones(head_dim)),
}
q, k = (np.stack([pair[i] for pair in heads.values()], 1)[None].astype(np.float32) for i in (0, 1))
v = rng.standard_normal(q.shape, np.float32)
out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)

rows = [text.index("paper") + 4, text.index("matrix") + 5, text.index("next") + 3]
scale = head_dim**-0.5
maps = {}
for number, name in enumerate(heads):
    s = scale * q[0, rows, number] @ k[0, :, number].T
    s[np.arange(seqlen) > np.array(rows)[:, None]] = -np.inf  # what causal=True hides
    maps[name] = np.exp(s - lse[0, number, rows, None])
    np.testing.assert_allclose(maps[name].sum(-1), 1, rtol=1e-4)
    np.testing.assert_allclose(maps[name] @ v[0, :, number], out[0, rows, number], atol=1e-4)
    for row, p in zip(rows, maps[name], strict=True):
        best = np.argsort(-p)[:3]
        shown = ", ".join(f"{text[j]!r} at {j} {p[j]:.0%}" for j in best)
        print(f"{name:17} from {text[row]!r} at {row}: {shown}")
        if name == "the letter before":
            assert best[0] == row - 1
        elif name == "the same letter":
            assert text[best[0]] == text[row]
        else:
            assert text[best[0]] in "aeiou"
print(f"{3 * len(rows)} rows of {3 * seqlen} recomputed; the matrix of all of them was never there")

if importlib.util.find_spec("matplotlib"):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    for axes, (name, p) in zip(figure.subplots(len(maps), 1, sharex=True), maps.items(), strict=True):
        axes.imshow(p / p.max(-1, keepdims=True), aspect="auto", cmap="Reds")
        axes.set_yticks(range(len(rows)), [f"{text[row]} ({row})" for row in rows])
        axes.set_title(f"{name}, relative to the row's largest", loc="left", fontsize=10)
        for n, row in enumerate(rows):
            axes.plot([row + 0.5] * 2, [n - 0.5, n + 0.5], color="0.4", lw=1)  # a query sees nothing to the right
    axes.set_xticks(range(seqlen), list(text), family="monospace", fontsize=8)
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "attention_maps.png")
    figure.savefig(path, dpi=100)
    print(f"drawn into {path}")
else:
    print("to draw them: pip install 'pyflash[bench]'")
