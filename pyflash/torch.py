"""torch: gradients, torch.compile, autocast, and torch's own attention function computed by PyFlash.

`pyflash.flash_attention` imports this module by itself where a torch tensor needs it. torch.compile sees two operators,
`pyflash::attention` and `pyflash::attention_backward`; eager calls do without, and so without what operators cost.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from . import entry, graphs, sequences
from .blocks import Blocks
from .errors import Unsupported
from .features import BY_NAME, CAPTURED, DEFAULTS, FUNCTIONS
from .problem import argument

_ARRAYS = tuple(name for name, feature in BY_NAME.items() if feature.is_array)

# The options that have gradients, in the order in which `flash_attention_backward` returns them.
_DIFFERENTIABLE = tuple(
    name.removeprefix("return_d") for name in inspect.signature(entry.backward).parameters if name[:8] == "return_d"
)
_WITH_GRADIENTS = ("q", "k", "v", *_DIFFERENTIABLE)
_MORE = (*_DIFFERENTIABLE, *(slot.name for slot in CAPTURED))  # names that tensors besides q, k, v may have


def records(given: Mapping[str, torch.Tensor], scalars: tuple[tuple[str, object], ...] = ()) -> bool:
    """Whether autograd must be told of a call. Raises where it would ask for a gradient that there is not. Functions
    are among the `scalars`, and what they capture among what is `given`."""
    return _records(given, lambda: _learned(dict(scalars)))


def _records(given: Mapping[str, torch.Tensor], learned: Callable[[], Sequence[str]]) -> bool:
    found = False
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if tensor.requires_grad:
                found = True
                if name not in _WITH_GRADIENTS and name not in learned():
                    takes = "one that does not: it has no gradient"
                    raise ValueError(f"{argument(name)}: got a tensor that requires grad, takes {takes}")
    return found


def _learned(scalars: dict[str, object]) -> tuple[str, ...]:
    """What score_mod captures that has gradients."""
    return BY_NAME["score_mod"].differentiated(scalars["score_mod"]) if "score_mod" in scalars else ()


def cast_to(q, k, v) -> torch.dtype | None:
    """What autocast makes of the inputs of torch's own attention, if they are not that already."""
    device = "cuda" if q.is_cuda else "cpu"  # a third of the time of q.device.type
    if not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    return dtype if any(t.dtype not in (dtype, torch.float64) for t in (q, k, v)) else None


def attention(call, given: dict[str, torch.Tensor], cast: torch.dtype | None, deterministic: bool):
    """`out` and `lse` of a `call` that is checked, differentiable through both; q, k and v are cast first, if that is
    asked for.

    The gradients are deterministic where torch.use_deterministic_algorithms asks for it, too.
    """
    if cast is not None:
        given |= {name: given[name].to(cast) for name in "qkv"}
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _Attention.apply(call, given, deterministic, *given.values())


def traced(q, k, v, options: dict[str, object], deterministic: bool):
    """The same where torch.compile looks on; `options` are those of `flash_attention`."""
    if dtype := cast_to(q, k, v):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if options.get("dropout_p") and options.get("seed") is None:
        options = {**options, "seed": torch.randint(2**63 - 1, ())}  # drawn when what is compiled runs
    options, learned = _without_functions(options)
    arrays = {name: options[name] for name in _ARRAYS if isinstance(options.get(name), torch.Tensor)}
    _records(arrays, lambda: learned)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return torch.ops.pyflash.attention(q, k, v, *_flattened(options), deterministic)


def traced_backward(dout, q, k, v, out, lse, dlse, options: dict[str, object], deterministic: bool, wanted):
    """What `flash_attention_backward` returns, likewise; `wanted` are the options to differentiate."""
    options, learned = _without_functions(options)
    names = [name for option in wanted for name in (learned if option == "score_mod" else [option])]
    flat = _flattened(options)
    found = torch.ops.pyflash.attention_backward(dout, q, k, v, out, lse, dlse, *flat, deterministic, names)
    more = dict(zip(names, found[3:], strict=True))
    by_option = [tuple([more[n] for n in learned]) if option == "score_mod" else more[option] for option in wanted]
    return (*found[:3], *by_option)


def _without_functions(options: dict[str, object]) -> tuple[dict[str, object], Sequence[str]]:
    """With text in their place, and the tensors that they capture beside it; and which of these have gradients."""
    if all(options.get(name) is None for name in (*FUNCTIONS, "block_mask")):
        return options, ()
    from . import torch_compile

    return torch_compile.flat(options)


# ---- Gradients


def _keep(ctx, out, lse, tensors, names, deterministic: bool) -> None:
    """For `_gradients`. `names` are those of `tensors`, of which the first are q, k and v."""
    ctx.save_for_backward(out, lse, *tensors)
    ctx.names, ctx.deterministic = names, deterministic
    ctx.set_materialize_grads(False)


def _gradients(ctx, needed, dout, dlse, compute) -> list[torch.Tensor | None]:
    """Those of `ctx.names`, at least where `needed`."""
    if dout is None and dlse is None:
        return [None] * len(ctx.names)
    out, lse, *tensors = ctx.saved_tensors
    options = ctx.names[3:]  # in the order of the table, which is that of their gradients
    wanted = tuple([name for name, need in zip(options, needed[3:], strict=True) if need and name in _MORE])
    # Gradients of torch's may be views that say with a bit that their sign is the other.
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    dq, dk, dv, *more = compute(ctx, wanted, dout, dlse, out, lse, *tensors)
    found = dict(zip(wanted, more, strict=True))
    return [dq, dk, dv, *[found.get(name) for name in options]]


def _no_second_derivative(*_):
    raise Unsupported(
        "the gradient of attention was to be differentiated again, which is not implemented; torch's own can, "
        "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    )


# ---- Eager


class _Attention(torch.autograd.Function):
    # Not parted into forward and setup_context, as torch.func would have it: calling that costs 50 us.
    @staticmethod
    def forward(ctx, call, given, deterministic, *tensors):
        results = entry.run(call, given, wants_lse=True)
        out, lse = results["o"], results["lse"]
        ctx.call = call
        _keep(ctx, out, lse, tensors, tuple(given), deterministic)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        compute = _RecordedBackward.apply if torch.is_grad_enabled() else _run_backward
        return None, None, None, *_gradients(ctx, ctx.needs_input_grad[3:], dout, dlse, compute)


def _run_backward(kept, wanted, dout, dlse, out, lse, *tensors):
    given = dict(zip(kept.names, tensors, strict=True))
    return _computed_backward(kept.call, given, wanted, dout, dlse, out, lse, kept.deterministic)


def _computed_backward(call, given, wanted, dout, dlse, out, lse, deterministic) -> tuple[torch.Tensor, ...]:
    given["dout"], given["o"], given["lse"] = dout, out, lse
    if dlse is not None:
        given["dlse"] = dlse
    results = entry.run(call, given, backward=True, deterministic=deterministic, gradients=tuple(wanted))
    return tuple([results[f"d{name}"] for name in ("q", "k", "v", *wanted)])


class _RecordedBackward(torch.autograd.Function):
    """The backward where create_graph has it recorded itself."""

    @staticmethod
    def forward(ctx, *call):
        return _run_backward(*call)

    backward = staticmethod(_no_second_derivative)


# ---- Operators. Options come as JSON, in which a string is the place of a tensor in `arrays`, and a number that of a
# number in `numbers`: one that varies does not make torch compile anew. Functions are there as the graphs that they are
# traced to, and so in a program that is exported.


def _flattened(options: dict[str, object]) -> tuple[list[torch.Tensor], list[int | float], str]:
    arrays: list[torch.Tensor] = []
    numbers: list[int | float] = [0]  # torch.export.save takes no empty list of numbers

    def form(value) -> str:
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        if isinstance(value, torch.Tensor):
            arrays.append(value)
            return f'"{len(arrays) - 1}"'
        if isinstance(value, (int, float)):
            numbers.append(value)
            return f"{len(numbers) - 1}"
        if isinstance(value, (tuple, list)):
            return "[" + ",".join([form(x) for x in value]) + "]"
        raise Unsupported(
            f"torch.compile takes options that are numbers, tensors or tuples, not a {type(value).__name__}"
        )

    # What has its default is left out, and so not read again in each run.
    given = {n: x for n, x in options.items() if isinstance(x, torch.Tensor) or x != DEFAULTS.get(n)}
    forms = {n: x if n in FUNCTIONS else form(x) for n, x in given.items()}
    return arrays, numbers, "{" + ",".join([f'"{name}":{text}' for name, text in forms.items()]) + "}"


def _unflattened(options: str, arrays: list[torch.Tensor], numbers: list[int | float]) -> dict[str, object]:
    restored = _restored(_parsed(options), arrays, numbers)
    if isinstance(restored.get("seed"), torch.Tensor):
        restored["seed"] = int(restored["seed"])  # a tensor of the CPU: nothing waits for the GPU
    if "block_mask" in restored:
        restored["block_mask"] = Blocks(*restored["block_mask"])
    return restored


@lru_cache(maxsize=1024)
def _parsed(options: str) -> dict[str, object]:
    return {n: graphs.from_json(form) if n in FUNCTIONS else form for n, form in json.loads(options).items()}


def _names(options: str) -> list[str]:
    """Of q, k, v and the options that are tensors."""
    return ["q", "k", "v", *[name for name, value in _parsed(options).items() if isinstance(value, str)]]


def _restored(form, arrays, numbers):
    if isinstance(form, dict):
        return {name: _restored(value, arrays, numbers) for name, value in form.items()}
    if isinstance(form, list):
        return tuple(_restored(value, arrays, numbers) for value in form)
    if isinstance(form, str):
        return arrays[int(form)]
    return form if form is None or isinstance(form, (bool, graphs.Mod)) else numbers[form]


_OPTIONS = "Tensor[] arrays, Scalar[] numbers, str options"
_DEVICES = ("CPU", "CUDA")
torch.library.define(  # deterministic is for the gradients
    "pyflash::attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool deterministic) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "pyflash::attention_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_OPTIONS}, bool deterministic, str[] wanted) -> Tensor[]",
)


def _read(given: dict[str, torch.Tensor], arrays, numbers, options):
    restored = _unflattened(options, arrays, numbers)
    lengths = {name: restored.pop(name) for name in sequences.ARRAYS + sequences.LONGEST if name in restored}
    return entry.read(given, restored.pop("softmax_scale", None), restored, restored.pop("seed", None), lengths)


@torch.library.impl("pyflash::attention", _DEVICES)
def _forward_operator(q, k, v, arrays, numbers, options, deterministic):
    given = {"q": q, "k": k, "v": v}
    call = _read(given, arrays, numbers, options)
    results = entry.run(call, given, wants_lse=True)
    return results["o"], results["lse"]


@torch.library.register_fake("pyflash::attention")
def _forward_fake(q, k, v, arrays, numbers, options, deterministic):
    *lead, seqlen_q, heads_q, _ = q.shape  # no batch of packed sequences
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*lead, seqlen_q, heads_q, v.shape[-1])), q.new_empty((*lead, heads_q, seqlen_q), dtype=real)


@torch.library.impl("pyflash::attention_backward", _DEVICES)
def _backward_operator(dout, q, k, v, out, lse, dlse, arrays, numbers, options, deterministic, wanted):
    given = {"q": q, "k": k, "v": v}
    call = _read(given, arrays, numbers, options)
    return list(_computed_backward(call, given, wanted, dout, dlse, out, lse, deterministic))


@torch.library.register_fake("pyflash::attention_backward")
def _backward_fake(dout, q, k, v, out, lse, dlse, arrays, numbers, options, deterministic, wanted):
    named = dict(zip(_names(options), (q, k, v, *arrays), strict=True))
    return [t.new_empty(t.shape) for t in (q, k, v, *(named[name] for name in wanted))]


def _keep_operator(ctx, inputs, output):
    q, k, v, arrays, ctx.numbers, ctx.options, deterministic = inputs
    _keep(ctx, *output, (q, k, v, *arrays), _names(ctx.options), deterministic)


def _differentiate_operator(ctx, dout, dlse):
    def compute(ctx, wanted, dout, dlse, out, lse, q, k, v, *arrays):
        options = (arrays, ctx.numbers, ctx.options)
        return torch.ops.pyflash.attention_backward(dout, q, k, v, out, lse, dlse, *options, ctx.deterministic, wanted)

    *needed, needed_arrays, _, _, _ = ctx.needs_input_grad
    dq, dk, dv, *rest = _gradients(ctx, (*needed, *needed_arrays), dout, dlse, compute)
    return dq, dk, dv, rest, None if ctx.numbers else [], None, None  # torch has it that an empty list holds tensors


torch.library.register_autograd("pyflash::attention", _differentiate_operator, setup_context=_keep_operator)
torch.library.register_autograd("pyflash::attention_backward", _no_second_derivative)


# ---- torch's own function


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch.nn.functional.scaled_dot_product_attention, computed by PyFlash: the same arguments and meaning.

    Parameters
    ----------
    query : tensor (..., heads, seqlen_q, head_dim)
        All three may be without heads: (seqlen, head_dim).
    key : tensor (..., heads_kv, seqlen_k, head_dim)
    value : tensor (..., heads_kv, seqlen_k, head_dim_v)
    attn_mask : tensor, optional
        Broadcasts to (..., heads, seqlen_q, seqlen_k). Boolean: which query sees which key. Otherwise it is added to
        the scores.
    dropout_p : float
        From 0 to 1.
    is_causal : bool
        Query i sees key j only if j <= i: aligned to the top-left corner, as in torch and unlike `flash_attention`.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool
        Whether heads may be a multiple of heads_kv.

    Returns
    -------
    tensor (..., heads, seqlen_q, head_dim_v)
        A query that sees no key gives 0.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
    """
    call = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if torch.compiler.is_compiling():
        return _scaled_dot_product_attention(*call)
    try:
        BY_NAME["causal"].check(is_causal)
        return _scaled_dot_product_attention(*call)
    except (TypeError, ValueError, Unsupported) as error:
        name, _, rest = str(error).partition(": ")
        if name not in _THEIR_NAMES:
            raise
        raise type(error)(f"{_THEIR_NAMES[name]}: {rest}") from None


_THEIR_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "causal": "is_causal",
    "softmax_scale": "scale",
}


def _scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """It, with errors that name arguments of ours."""
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: got a mask and is_causal=True, takes one of them")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            got = f"{tensor.dim()} dimensions" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise (TypeError if got[0].isalpha() else ValueError)(f"{name}: got {got}, takes a tensor of 2 or more")
    if dropout_p == 1:  # nothing is left to compute with, but the gradients are to be zeros, too
        return 0.0 * _scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if isinstance(dropout_p, (int, float)) and not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: got {dropout_p!r}, takes a number from 0 to 1")
    if min(query.dim(), key.dim(), value.dim()) == 2:
        tensors = [tensor[None] if tensor.dim() == 2 else tensor for tensor in (query, key, value)]
        out = _scaled_dot_product_attention(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out[0] if max(query.dim(), key.dim(), value.dim()) == 2 else out
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask: got {type(attn_mask).__name__}, takes a torch tensor")
    query, key, value = _broadcast(query, key, value, enable_gqa)
    *lead, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[-2]
    options = {"softmax_scale": scale}
    if attn_mask is not None:
        option = "mask" if attn_mask.dtype == torch.bool else "bias"
        if attn_mask.dim() > 3:
            try:
                attn_mask = _batched(attn_mask.expand(*lead, *attn_mask.shape[-3:]))
            except RuntimeError:
                takes = f"{(*lead, heads, seqlen_q, seqlen_k)}"
                raise ValueError(f"attn_mask: got {tuple(attn_mask.shape)}, takes what broadcasts to {takes}") from None
        options[existing(option, "attn_mask")] = attn_mask
    if dropout_p:
        options[existing("dropout_p", "dropout_p")] = dropout_p
    q, k, v = _batched(query).transpose(1, 2), _batched(key).transpose(1, 2), _batched(value).transpose(1, 2)
    if not is_causal or seqlen_q == seqlen_k:
        out = entry.forward(q, k, v, causal=is_causal, **options)
    elif seqlen_q < seqlen_k:
        out = entry.forward(q, k[:, :seqlen_q], v[:, :seqlen_q], causal=True, **options)
    else:  # the last queries see every key
        first = entry.forward(q[:, :seqlen_k], k, v, causal=True, **options)
        out = torch.cat((first, entry.forward(q[:, seqlen_k:], k, v, **options)), 1)
    out = out.transpose(1, 2)
    return out if len(lead) == 1 else out.reshape(*lead, heads, seqlen_q, value.shape[-1])


def _broadcast(query, key, value, enable_gqa: bool) -> tuple[torch.Tensor, ...]:
    """With the same sizes before the heads; and as many heads, but where those of keys serve several of the queries."""
    heads, heads_k, heads_v = query.shape[-3], key.shape[-3], value.shape[-3]
    own = 3 if enable_gqa or (heads_k == heads_v and heads_k in (1, heads)) else 2  # dimensions that do not broadcast
    tensors = query, key, value
    front, *others = [tensor.shape[:-own] for tensor in tensors]
    if others == [front, front]:
        return tensors
    try:
        front = torch.broadcast_shapes(front, *others)
    except RuntimeError:
        if own == 2 and 1 not in (heads, heads_k) and heads != heads_k:
            takes = f"{heads_k}, as key, or enable_gqa=True"
            raise ValueError(f"query: got {heads} heads, takes {takes}") from None
        shapes = ", ".join(f"{tuple(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"query, key, value: got {shapes}, takes shapes that broadcast before seqlen") from None
    return tuple(tensor.expand(*front, *tensor.shape[-own:]) for tensor in tensors)


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """(..., heads, seqlen, head_dim) with one dimension before the heads."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[None]


def existing(option: str, argument: str) -> str:
    """The name of an option, if there is one; `argument` is what asks for it."""
    if option in BY_NAME:
        return option
    raise Unsupported(f"{argument}: got one, takes its default: attention with it is not implemented")
