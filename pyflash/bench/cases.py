"""What is measured: one call, or many that differ in length, head_dim and options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .. import features, problem
from ..problem import Problem


@dataclass(frozen=True)
class Case:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    options: tuple[tuple[str, object], ...] = ()  # of `flash_attention`

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q": (self.batch, self.seqlen_q, self.heads, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            "v": (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
            "dout": (self.batch, self.seqlen_q, self.heads, self.head_dim_v),
        }

    @property
    def causal(self) -> bool:
        return bool(dict(self.options).get("causal"))

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(low, high): query i sees the keys from i + low to i + high. None is no bound."""
        return features.band(features.check(dict(self.options)), self.seqlen_q, self.seqlen_k)

    @property
    def softcap(self) -> float | None:
        return dict(self.options).get("softcap")

    @property
    def score_bytes(self) -> int:
        """Of one score matrix of all heads, which ordinary attention keeps."""
        itemsize = problem.DTYPES[self.dtype].itemsize
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k * itemsize

    @property
    def call(self) -> dict[str, object]:
        """The options as keywords; with a seed, so that all drop the same."""
        options = dict(self.options)
        return {**options, "seed": 0} if options.get("dropout_p") else options

    def problem(self, backward: bool) -> Problem:
        """Raises as `flash_attention` does."""
        options = dict(self.options)
        tensors = {name: problem.contiguous(self.shapes[name], self.dtype) for name in "qkv"}
        forward = problem.make(tensors, backward=False, wants_lse=backward, options=options)
        if not backward:
            return forward
        return problem.make(problem.backward_tensors(forward), backward=True, options=options)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        options = "".join(f" {n}" if x is True else f" {n}={x}" for n, x in self.options if x not in (None, False))
        return f"{self.batch} x {lengths}, {heads} heads of {dims}, {self.dtype}{options}"


def grid(
    *,
    seqlens: list[int],
    head_dims: list[int],
    options: list[tuple[tuple[str, object], ...]],
    dtype: str,
    seqlen_k: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim_v: int | None = None,
    tokens: int,
    hidden: int,
) -> list[Case]:
    """Every combination. Without `batch`, about `tokens` queries in all; without `heads`, about `hidden` columns."""
    cases = []
    for head_dim, on, seqlen in itertools.product(head_dims, options, seqlens):
        count = max(1, hidden // max(head_dim, 1)) if heads is None else heads
        cases.append(
            Case(
                batch=max(1, tokens // max(seqlen, 1)) if batch is None else batch,
                seqlen_q=seqlen,
                seqlen_k=seqlen if seqlen_k is None else seqlen_k,
                heads=count,
                heads_kv=count if heads_kv is None else heads_kv,
                head_dim=head_dim,
                head_dim_v=head_dim if head_dim_v is None else head_dim_v,
                dtype=dtype,
                options=on,
            )
        )
    return cases
