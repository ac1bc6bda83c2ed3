"""Calls on sequences of their own lengths: packed, or padded with `seqused`.

A `Packed` is a padded `Case` of as many batches as sequences, of which it takes some rows; so a sequence is number so
and so of the call for whatever looks at that. What lies between the sequences is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from assert_close import assert_attention, assert_gradients
from cases import CAUSAL, Case, cases
from hypothesis import strategies as st

from pyflash import reference


@dataclass(frozen=True)
class Packed:
    queries: tuple[int, ...] = (5, 0, 130, 64)  # how long sequences are
    keys: tuple[int, ...] = (70, 3, 200, 0)
    case: Case = Case()
    room: tuple[int, int] = (0, 0)  # rows of queries and keys behind each sequence that are not used
    padded: bool = False  # a padded batch
    offsets: str = "int32"
    bounded: bool = True  # whether the call is told of the longest sequences

    @property
    def batch(self) -> int:
        return len(self.queries)

    @property
    def longest(self) -> tuple[int, int]:
        sides = zip((self.queries, self.keys), self.room, strict=True)
        return tuple(max((n + room for n in used), default=0) for used, room in sides)

    @property
    def whole(self) -> Case:
        """The padded batch that the sequences are of."""
        return replace(self.case, batch=self.batch, seqlen_q=self.longest[0], seqlen_k=self.longest[1])

    @property
    def gaps(self) -> bool:
        return self.padded or any(self.room)

    def lengths(self) -> dict[str, np.ndarray]:
        """What tells of the sequences."""
        made = {}
        for side, used, room in zip("qk", (self.queries, self.keys), self.room, strict=True):
            if not self.padded:
                ends = np.cumsum([n + room for n in used], dtype=np.int64)
                made[f"cu_seqlens_{side}"] = np.concatenate([[0], ends]).astype(self.offsets)
            if self.padded or room:
                made[f"seqused_{side}"] = np.array(used, "int32").reshape(self.batch)
        return made

    def _placed(self, array: np.ndarray, side: int, axis: int = 1) -> np.ndarray:
        """A padded array's rows where the call has them."""
        array = np.moveaxis(array, axis, 1)
        rows = [array[s, :n] for s, n in enumerate((self.queries, self.keys)[side])]
        sizes = [self.longest[side] if self.padded else len(part) + self.room[side] for part in rows]
        nothing = np.zeros((0, *array.shape[2:]), array.dtype)
        gaps = (np.full((n - len(r), *array.shape[2:]), np.nan, array.dtype) for r, n in zip(rows, sizes, strict=True))
        filled = [np.concatenate(part) for part in zip(rows, gaps, strict=True)]
        if self.padded:
            return np.moveaxis(np.stack(filled) if filled else array, 1, axis)
        packed = np.concatenate([nothing, *filled])
        return np.moveaxis(packed, 0, axis - 1)

    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v, dout, and dlse if the case has one."""
        made = self.whole.arrays()
        sides = {"q": 0, "k": 1, "v": 1, "dout": 0, "dlse": 0}
        return {n: self._placed(a, sides[n], 2 if n == "dlse" else 1) for n, a in made.items()}

    def sequences(self):
        """Each sequence's number, and how to take its queries' and its keys' rows."""
        starts = [0, 0]
        for s, used in enumerate(zip(self.queries, self.keys, strict=True)):
            rows = [slice(start, start + n) for start, n in zip(starts, used, strict=True)]
            yield s, *(((s, r) if self.padded else (r,)) for r in rows)
            if not self.padded:
                starts = [start + n + room for start, n, room in zip(starts, used, self.room, strict=True)]

    def _split(self, array: np.ndarray, side: int, axis: int = 1):
        """An array's rows, sequence by sequence with a batch of one in front; the rest must be what no sequence has."""
        array = np.moveaxis(array, axis - (not self.padded), 1 - (not self.padded))
        used = np.zeros(array.shape[: 1 + self.padded], bool)
        parts = []
        for _, *places in self.sequences():
            parts.append(np.moveaxis(array[places[side]][None], 1, axis))
            used[places[side]] = True
        return parts, array[~used]

    def check_forward(self, arrays: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray | None) -> None:
        right = self.reference_forward(arrays)
        outs, rest = self._split(out, 0)
        assert not rest.any(), "out of rows that are no sequence's"
        lses, rest = self._split(right[1] if lse is None else lse, 0, 2)
        assert (rest == -np.inf).all(), "lse of rows that are no sequence's"
        inputs = [self._split(arrays[name], name != "q")[0] for name in "qkv"]
        rights = self._split(right[0], 0)[0], self._split(right[1], 0, 2)[0]
        for s in range(self.batch):
            q, k, v = (parts[s] for parts in inputs)
            call = {"batch": s, "expected": (rights[0][s], rights[1][s]), **self.whole.call}
            assert_attention(outs[s], None if lse is None else lses[s], q, k, v, **call)

    def check_backward(self, arrays: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        right = self.reference_backward(arrays)
        sides = {"q": 0, "k": 1, "v": 1}
        found, rights = {}, {}
        for name, side in sides.items():
            found[name], rest = self._split(gradients[f"d{name}"], side)
            assert not rest.any(), f"d{name} of rows that are no sequence's"
            rights[name] = self._split(right[f"d{name}"], side)[0]
        inputs = {name: self._split(arrays[name], name in "kv")[0] for name in ("dout", "q", "k", "v")}
        dlse = self._split(arrays["dlse"], 0, 2)[0] if "dlse" in arrays else [None] * self.batch
        for s in range(self.batch):
            assert_gradients(
                [found[name][s] for name in sides], *(parts[s] for parts in inputs.values()), dlse=dlse[s], batch=s,
                expected=[rights[name][s] for name in sides], **self.whole.call,
            )  # fmt: skip
        half = arrays["q"].dtype.itemsize == 2
        for name in self.case.differentiated:
            tolerance = 0.05 if half else 1e-4
            got = gradients[f"d{name}"].astype(np.float64)
            np.testing.assert_allclose(got, right[f"d{name}"], tolerance, tolerance, err_msg=f"d{name}")

    def reference_forward(self, arrays: dict[str, np.ndarray]):
        function = reference.attention if self.padded else reference.attention_varlen
        return function(*(arrays[name] for name in "qkv"), **self.lengths(), **self.whole.call)

    def reference_backward(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        function = reference.attention_backward if self.padded else reference.attention_varlen_backward
        given = (arrays[name] for name in ("dout", "q", "k", "v"))
        call = {**self.lengths(), **self.whole.call, **self.case.returns, "dlse": arrays.get("dlse")}
        names = ("dq", "dk", "dv", *(f"d{name}" for name in self.case.differentiated))
        return dict(zip(names, function(*given, **call), strict=True))


WINDOW = (("window", (40, 9)),)

PACKED: dict[str, Packed] = {
    "plain": Packed(),
    "causal": Packed(case=Case(options=CAUSAL, dlse=True), offsets="int64"),
    "one sequence": Packed((150,), (210,), Case(heads_q=4, options=CAUSAL)),
    "sequences of one": Packed((1,) * 9, (1,) * 9, Case(values="times 3")),
    "short and long": Packed((3, 260, 1, 129), (3, 260, 1, 129), Case(heads_q=4, options=CAUSAL, values="rising")),
    "empty sequences everywhere": Packed((0, 0, 70, 0, 65, 0), (0, 9, 0, 0, 65, 0), Case(options=CAUSAL, dlse=True)),
    "no sequences": Packed((), ()),
    "no tokens": Packed((0, 0), (0, 0)),
    "no keys": Packed((5, 70), (0, 0)),
    "window": Packed((140, 90), (150, 20), Case(options=WINDOW)),
    "gaps": Packed(room=(7, 70), case=Case(options=CAUSAL)),
    "gaps of keys": Packed(room=(0, 3), case=Case(values="row levels")),
    "padded": Packed((60, 0, 130, 129), (70, 60, 0, 200), padded=True, case=Case(options=CAUSAL, dlse=True)),
    "alibi": Packed(case=Case(heads_q=4, options=(*CAUSAL, ("alibi_slopes", "of batches and heads")))),
    "softcap, sinks, gaps": Packed(
        (5, 130), (70, 40), Case(heads_q=4, options=(*CAUSAL, ("softcap", 3.0), ("sinks", "of heads"))), room=(3, 0)
    ),
    "bias, mask": Packed(case=Case(options=(("bias", "of every element"), ("mask", "of every element")))),
    "bias of keys, dropout": Packed(case=Case(options=(("bias", "of keys"), ("dropout_p", 0.3)), seed=3), padded=True),
    "functions": Packed(case=Case(options=(("score_mod", "every operation"), ("mask_mod", "documents")))),
    "blocks": Packed(
        (150, 0, 290, 9), (300, 130, 260, 0), Case(heads_q=4, options=(("block_mask", "near or first"),), dlse=True)
    ),
    "blocks, padded, causal": Packed(
        (150, 0, 290), (300, 0, 130), Case(heads_q=4, options=(*CAUSAL, ("block_mask", "documents"))), padded=True
    ),
    "blocks, gaps": Packed(
        (150, 300, 1), (300, 60, 130), Case(options=(("block_mask", "near or first, larger blocks"),)), room=(70, 3)
    ),
    "few queries, grouped": Packed(
        (1, 5, 0, 9, 2), (150, 70, 3, 0, 9), Case(heads_q=4, heads_kv=1, options=CAUSAL, values="rising")
    ),
    "few queries, many keys": Packed((1, 3), (700, 400), Case(heads_q=4, heads_kv=1, options=CAUSAL)),
    "few queries of three heads, gaps": Packed(
        (1, 2, 20),
        (300, 7, 70),
        Case(heads_q=6, options=(("alibi_slopes", "of heads"), ("sinks", "of heads"))),
        room=(3, 1),
    ),
    "few queries, padded, everything": Packed(
        (2, 0, 7),
        (140, 9, 200),
        Case(
            heads_q=8,
            heads_kv=2,
            options=(
                ("window", (150, 0)),
                ("bias", "of every element"),
                ("mask", "of every element"),
                ("dropout_p", 0.2),
            ),
        ),
        padded=True,
    ),
    "grouped, wide heads": Packed((9, 130), (131, 70), Case(heads_q=6, heads_kv=2, head_dim=192, head_dim_v=256)),
    "odd heads": Packed((9, 130), (131, 70), Case(heads_q=4, head_dim=37, head_dim_v=81, options=CAUSAL)),
}


@st.composite
def packed(draw, *, tile: int = 64, dtypes=("float32", "float64"), max_head_dim: int = 64) -> Packed:
    """Any packed or padded call of moderate size."""
    length = st.one_of(st.sampled_from([0, 1, tile - 1, tile, tile + 1]), st.integers(0, 2 * tile + 3))
    case = draw(cases(tile=tile, dtypes=dtypes, max_head_dim=max_head_dim))
    # Where all scores are equal the error is a matter of luck, for ordinary attention too.
    values = draw(st.sampled_from(["normal", "times 3", "rising", "row levels", "sharp"]))
    batch = draw(st.integers(0, 4))
    queries, keys = (tuple(draw(st.lists(length, min_size=batch, max_size=batch))) for _ in range(2))
    return Packed(
        queries, keys, replace(case, layouts=("contiguous",) * 4, values=values),
        room=draw(st.sampled_from([(0, 0), (0, 0), (3, 0), (0, tile), (tile - 1, 5)])),
        padded=draw(st.booleans()),
        offsets=draw(st.sampled_from(["int32", "int64"])),
    )  # fmt: skip
