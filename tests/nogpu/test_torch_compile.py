"""torch.compile, torch.export and torch's own checks of operators, on CPU tensors."""

from __future__ import annotations

import pytest

import pyflash
from pyflash.features import FEATURES

torch = pytest.importorskip("torch")

OPTIONS = [{}, {"causal": True}, {"softmax_scale": 0.3}, {"causal": True, "softmax_scale": -2}]
# The rows of the table of features, as far as they are there.
OPTIONS += [
    {name: value}
    for name, value in {
        "window": (2, None),
        "softcap": 1.5,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], requires_grad=True),
        "bias": torch.randn(1, 4, 1, 7, requires_grad=True),
        "mask": torch.rand(5, 7) < 0.7,
    }.items()
    if name in {feature.name for feature in FEATURES}
]


def inputs(dtype=torch.float64, seqlen_q=5, seqlen_k=7, batch=2, requires_grad=True):
    shapes = (batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 12)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


def model(q, k, v, **options):
    """Attention in the middle of something: views before it, both results used after it."""
    out, lse = pyflash.flash_attention(
        q.sin(), k.transpose(1, 2).contiguous().transpose(1, 2), v, return_lse=True, **options
    )
    return (out.transpose(1, 2) @ out.permute(0, 2, 3, 1)).sum((-1, -2)) + lse.cos().sum(-1)


def agree(compiled, eager, arguments, **options):
    """Results and gradients, those of options that have one included."""
    results = [f(*arguments, **options) for f in (compiled, eager)]
    leaves = [t for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = [torch.autograd.grad(r.sum(), leaves) for r in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_one_graph_and_the_same_numbers(options):
    arrays = {n: x.double() for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    agree(torch.compile(model, fullgraph=True, backend="aot_eager"), model, inputs(), **options | arrays)


@pytest.mark.parametrize("seed", [None, 5])
def test_dropout(seed):
    """Drawn anew in each run, by the generator that torch.manual_seed sets; the backward drops the same."""
    q, k, v = inputs()
    call = torch.compile(
        lambda q, k, v: pyflash.flash_attention(q, k, v, dropout_p=0.5, seed=seed), fullgraph=True, backend="aot_eager"
    )
    outs = []
    for _ in range(2):
        torch.manual_seed(1)
        outs.append([call(q, k, v) for _ in range(2)])
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(outs[0][0], outs[0][1]) == (seed is not None)
    for out in outs[0]:
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        torch.testing.assert_close((dv * v).sum(), (out * dout).sum())
    if seed is not None:
        torch.testing.assert_close(outs[0][0], pyflash.flash_attention(q, k, v, dropout_p=0.5, seed=seed))


def test_an_option_without_a_gradient_is_not_differentiated():
    slopes = torch.ones(4, requires_grad=True)
    if "alibi_slopes" in {feature.name for feature in FEATURES}:
        with pytest.raises(ValueError, match="^alibi_slopes: got a tensor that requires grad, takes one that does not"):
            pyflash.flash_attention(*inputs(torch.float32), alibi_slopes=slopes)


def test_inductor():
    agree(torch.compile(model, fullgraph=True), model, inputs(), causal=True)


def test_new_sizes_and_numbers_do_not_compile_without_end():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for n in range(3, 9):
        arguments = inputs(seqlen_q=n, seqlen_k=2 * n, batch=n)
        torch.testing.assert_close(compiled(*arguments, softmax_scale=n / 3), model(*arguments, softmax_scale=n / 3))
    assert len(graphs) <= 2


def test_a_scale_made_of_a_symbolic_size():
    def scaled(q, k, v):
        return pyflash.flash_attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=True)

    arguments = inputs(requires_grad=False)
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), scaled(*arguments))


def test_without_gradients():
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments = inputs(requires_grad=False)
    torch.testing.assert_close(compiled(*arguments), model(*arguments))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs()), model(*arguments))


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_gradients_of_some_inputs_only(wanted):
    arguments = [t.requires_grad_(name in wanted) for name, t in zip("qkv", inputs(requires_grad=False), strict=True)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    leaves = [t for t in arguments if t.requires_grad]
    expected = torch.autograd.grad(model(*arguments).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*arguments).sum(), leaves), expected)


def test_autocast():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return pyflash.flash_attention(q, k, v)

    q, k, v = inputs(torch.float32)
    expected = pyflash.flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(compiled(q, k, v), expected)


def test_the_backward_itself_can_be_compiled():
    q, k, v = inputs(requires_grad=False)
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)

    def backward(dout, dlse):
        return pyflash.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, deterministic=True)

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(dout, dlse), backward(dout, dlse))


def test_a_second_derivative_is_refused():
    q, k, v = inputs()
    out, _ = torch.ops.pyflash.attention(q, k, v, [], [], "{}", False)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(pyflash.Unsupported, match="differentiated again"):
        dq.sum().backward()


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return pyflash.flash_attention(q, k, v, causal=True)

    arguments = tuple(inputs(requires_grad=False))
    for strict in (False, True):
        program = torch.export.export(Layer(), arguments, strict=strict)
        assert any("pyflash.attention" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


def test_out_is_refused():
    q, k, v = inputs(requires_grad=False)
    compiled = torch.compile(lambda *a: pyflash.flash_attention(*a[:3], out=a[3]), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="out: got a tensor, takes None .* in torch.compile"):
        compiled(q, k, v, torch.empty(2, 5, 4, 12, dtype=torch.float64))


def test_functions_break_the_graph():
    table = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = inputs(requires_grad=False)
    earlier = lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx  # noqa: E731
    score_mod = {"score_mod": lambda score, batch, head, q_idx, kv_idx: score + table[head]}
    block_mask = {"block_mask": pyflash.block_mask(earlier, q.shape[0], 1, q.shape[1], k.shape[1], like=q)}
    both = score_mod | block_mask
    compiled = torch.compile(lambda *a: model(*a, **both), backend="eager")
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v, **both))
    for options in (score_mod, {"mask_mod": earlier}, block_mask):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda *a, o=options: model(*a, **o), backend="eager", fullgraph=True)(q, k, v)


# The ways in which an option can come: as itself, and as text with what varies beside it.
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.25},
        {"window": (None, 3), "softcap": 2.0, "softmax_scale": 7},
        {"bias": torch.zeros(2, 3), "seed": 5, "sinks": torch.ones(4)},
    ],
    ids=str,
)
def test_options_as_text(options):
    from pyflash import torch as glue

    arrays, numbers, text = glue._flattened({**options, "absent": None})
    restored = glue._restored(glue._parsed(text), arrays, numbers)
    assert restored.keys() == options.keys()
    assert all(restored[name] is value if isinstance(value, torch.Tensor) else restored[name] == value
               for name, value in options.items())  # fmt: skip
    with pytest.raises(pyflash.Unsupported, match="not a function"):
        glue._flattened({"score_mod": lambda s: s})


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torchs_checks_of_operators(dtype, dlse):
    q, k, v = inputs(dtype)
    operands = ([], [0.4], '{"softmax_scale":0,"causal":true}', False)
    torch.library.opcheck(torch.ops.pyflash.attention.default, (q, k, v, *operands))
    torch.library.opcheck(torch.ops.pyflash.attention.default, (q.detach(), k.detach(), v.detach(), [], [], "{}", True))
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = torch.ops.pyflash.attention(q, k, v, *operands)
    tensors = torch.randn_like(out), q, k, v, out, lse, torch.randn_like(lse) if dlse else None
    torch.library.opcheck(torch.ops.pyflash.attention_backward.default, (*tensors, *operands, []))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_fake_results_lie_as_the_real_ones(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = inputs(dtype, requires_grad=False)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    real = torch.ops.pyflash.attention(q, k, v, [], [], "{}", False)
    real += tuple(torch.ops.pyflash.attention_backward(real[0], q, k, v, *real, None, [], [], "{}", False, []))
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in (q, k, v))
        fake = torch.ops.pyflash.attention(q, k, v, [], [], "{}", False)
        fake += tuple(torch.ops.pyflash.attention_backward(fake[0], q, k, v, *fake, None, [], [], "{}", False, []))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
