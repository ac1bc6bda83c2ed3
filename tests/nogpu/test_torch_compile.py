"""torch.compile, torch.export and torch's own checks of operators, on CPU tensors."""

from __future__ import annotations

import io

import numpy as np
import pytest

import pyflash
from pyflash import dispatch, trace
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
def nothing_compiled_before(monkeypatch):
    """Nor prepared: behind a graph break torch looks at every entry of what it meets."""
    torch._dynamo.reset()
    monkeypatch.setattr(dispatch, "_prepared", {})


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
    model(q, k, v)  # defines the operators
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


GLOBAL = 1


class WithFunctions(torch.nn.Module):
    """Attention with functions that are made with it, and the tensors that they capture."""

    def __init__(self, scale: float = 0.5, mask: str = "mask_mod"):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.distances = distances = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64, generator=generator))
        self.ids = ids = torch.tensor([0, 0, 1, 1, 1, 2, 2])

        def score_mod(score, batch, head, q_idx, kv_idx):
            return score * scale + distances[head, pyflash.minimum(pyflash.abs(q_idx - kv_idx), 5)]

        documents = pyflash.masks.and_masks(pyflash.masks.documents(ids), pyflash.masks.causal(1))
        made = {"mask_mod": documents, "block_mask": pyflash.block_mask(documents, 1, 1, 5, 7)}
        self.functions = {"score_mod": score_mod, mask: made[mask]} if mask else {"score_mod": score_mod}

    def forward(self, q, k, v, **options):
        return model(q, k, v, **self.functions, **options)


def agree_by_parameters(compiled, eager, arguments, **options):
    """The same, the gradients of what functions capture included."""
    results = [f(*arguments, **options) for f in (compiled, eager)]
    gradients = [torch.autograd.grad(r.sum(), [*arguments, *eager.parameters()]) for r in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0][-1].any()


@pytest.mark.parametrize("mask", ["", "mask_mod", "block_mask"])
def test_functions_of_scores_and_masks(mask):
    layer = WithFunctions(mask=mask)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for options in ({}, {"causal": True, "bias": torch.randn(7, dtype=torch.float64)}):
        agree_by_parameters(compiled, layer, inputs(), **options)


def test_other_block_masks_are_seen():
    q, k, v = inputs(requires_grad=False)
    masks = [
        pyflash.block_mask(mask, 1, 1, 5, 7, block_q=16, block_k=16, like=q)
        for mask in (lambda b, h, i, j: j <= i, lambda b, h, i, j: j <= i + 1, lambda b, h, i, j: j >= i)
    ]
    compiled, graphs = graphs_of(lambda mask: pyflash.flash_attention(q, k, v, block_mask=mask))
    for mask in (*masks, *masks):
        torch.testing.assert_close(compiled(mask), pyflash.flash_attention(q, k, v, block_mask=mask))
    assert len(graphs) == len(masks)


def graphs_of(function):
    """It compiled, and the list of the graphs that it is compiled to."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    return torch.compile(function, fullgraph=True, backend=backend), graphs


def test_a_function_is_compiled_anew_where_what_it_is_made_of_changes():
    q, k, v = inputs(requires_grad=False)

    def made(inner, table, scale=2.0, number=1):
        return lambda score, batch, head, q_idx, kv_idx: inner(score, number) * scale + table[0][head]

    twice, more = (lambda s, n: s * 2 + n), (lambda s, n: s + n + 1)
    tables = [(torch.full((4,), float(n)),) for n in range(3)]
    compiled, graphs = graphs_of(lambda f: pyflash.flash_attention(q, k, v, score_mod=f))
    calls = [
        (made(twice, tables[0]), 1),
        (made(twice, tables[1]), 1),  # other numbers in a tensor, and another function object
        (made(more, tables[1]), 2),
        (made(twice, tables[2], scale=3.0), 3),
        (made(twice, tables[2], scale=4.0), 4),
        (made(twice, tables[2], number=3), 5),
        (made(twice, tables[1], scale=2.0), 5),
        (made(twice, tables[1], number=4), 6),
    ]
    for function, count in calls:
        expected = pyflash.flash_attention(q, k, v, score_mod=function)
        torch.testing.assert_close(compiled(function), expected)
        assert len(graphs) <= count, "compiled once too often"


def test_functions_made_in_what_is_compiled():
    """As long as they capture no tensors."""
    q, k, v = inputs(requires_grad=False)

    def call(q, k, v):
        left = 2
        return pyflash.flash_attention(q, k, v, mask_mod=lambda b, h, i, j: pyflash.abs(j - i) <= left)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))

    def with_tensor(q, k, v):
        twice = q[0, :, 0, 0] * 2
        return pyflash.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + twice[i])

    def with_global(q, k, v):
        return pyflash.flash_attention(q, k, v, mask_mod=lambda b, h, i, j: i + GLOBAL < j)

    with pytest.raises(Exception, match="captures the global GLOBAL, takes one that torch.compile does not see made"):
        torch.compile(with_global, fullgraph=True, backend="eager")(q, k, v)
    with pytest.raises(Exception, match="captures tensors, takes one that is made before"):
        torch.compile(with_tensor, fullgraph=True, backend="eager")(q, k, v)


def test_functions_that_are_refused():
    q, k, v = inputs(requires_grad=False)
    tables = [torch.zeros(4) for _ in range(5)]
    a, b, c, d, e = tables
    tracked, counted, small = torch.zeros(4, requires_grad=True), [1.0], np.float32(2)
    ids = np.zeros(4)
    block_mask = pyflash.block_mask(lambda b, h, i, j: j <= i, 1, 1, 5, 7, like=q)
    for options, message in (
        ({"score_mod": lambda s, _, h, i, j: s * counted[0]}, "score_mod: got a function that captures a list, takes"),
        ({"score_mod": lambda s, _, h, i, j: s * small}, "score_mod: .* takes a Python number: 2.0"),
        ({"score_mod": lambda s, _, h, i, j: s + ids[h]}, "score_mod: .* captures a ndarray, takes one of torch"),
        ({"mask_mod": lambda _, h, i, j: tracked[h] > 0}, "captures: got a tensor that requires grad"),
        ({"mask_mod": lambda _, h, i, j: i if j > i else j}, "mask_mod: got bool.. of a traced value"),
        ({"mask_mod": lambda _, h, i, j: j > i, "block_mask": block_mask}, "mask_mod: .* takes None where there is a"),
        (
            {
                "score_mod": lambda s, _, h, i, j: s + a[h] + b[h] + c[h],
                "mask_mod": lambda _, h, i, j: d[h] <= e[h],
            },
            "5 captured arrays, take 4 together",
        ),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(lambda o=options: pyflash.flash_attention(q, k, v, **o), fullgraph=True, backend="eager")()


def test_a_graph_breaks_where_a_function_does_not_fit_into_it():
    """If it may: the result is that without torch.compile, or its error."""
    q, k, v = inputs()
    scales = [2.0]

    def with_tensor(q, k, v):
        twice = q[0, :, 0, 0] * 2
        return pyflash.flash_attention(q.sin(), k, v, score_mod=lambda s, b, h, i, j: s + twice[i])

    def with_list(q, k, v):
        return pyflash.flash_attention(q.sin(), k, v, score_mod=lambda s, b, h, i, j: s * scales[0])

    out = torch.compile(with_tensor, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, with_tensor(q, k, v))
    compiled = torch.compile(with_list, backend="aot_eager")
    q, k, v = inputs(requires_grad=False)
    for scales[0] in (2.0, 3.0) if torch.__version__ >= "2.12" else ():  # 2.11 fails on its own behind a graph break
        torch.testing.assert_close(compiled(q, k, v), with_list(q, k, v))
    with pytest.raises(TypeError, match="^mask_mod: got bool.. of a traced value"):
        torch.compile(lambda: pyflash.flash_attention(q, k, v, mask_mod=lambda b, h, i, j: i or j), backend="eager")()


def test_the_backward_of_functions_itself_can_be_compiled():
    layer, (q, k, v) = WithFunctions(mask="block_mask"), inputs(requires_grad=False)
    options = layer.functions | {"causal": True}
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)

    def backward(dout):
        more = {"return_dscore_mod": True}
        return pyflash.flash_attention_backward(dout, q, k, v, out.detach(), lse.detach(), **options, **more)

    dout = torch.randn_like(out)
    with torch.no_grad():
        found = torch.compile(backward, fullgraph=True, backend="aot_eager")(dout)
        torch.testing.assert_close(found, backward(dout))


def test_functions_in_a_program_that_is_exported():
    """What it runs is in its text, so another process can run it."""
    layer, arguments = WithFunctions(), tuple(inputs(requires_grad=False))
    program = torch.export.export(layer, arguments, strict=True)
    assert any('"multiply"' in str(node.args) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*arguments), layer(*arguments))


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

    defaults = {"sinks": None, "causal": False, "window": (None, None), "dropout_p": 0.0}
    arrays, numbers, text = glue._flattened({**defaults, **options})
    restored = glue._restored(glue._parsed(text), arrays, numbers)
    assert restored.keys() == options.keys()
    assert all(restored[name] is value if isinstance(value, torch.Tensor) else restored[name] == value
               for name, value in options.items())  # fmt: skip
    with pytest.raises(pyflash.Unsupported, match="not a dict"):
        glue._flattened({"bias": {}})


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torchs_checks_of_operators(dtype, dlse):
    q, k, v = inputs(dtype)
    operands = ([], [0.4], '{"softmax_scale":0,"causal":true}', False)
    torch.library.opcheck(torch.ops.pyflash.attention.default, (q, k, v, *operands))
    table, function = torch.ones(4), lambda s, b, h, i, j: s + table[h]
    text = trace.trace("score_mod", function).text
    functions = [table.requires_grad_()], [], f'{{"score_mod":{text},"mod_array_0":"0"}}', False
    torch.library.opcheck(torch.ops.pyflash.attention.default, (q, k, v, *functions))
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
