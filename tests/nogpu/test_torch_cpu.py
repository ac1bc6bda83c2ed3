"""torch tensors on the CPU: the glue that a GPU machine shares, and gradients through autograd."""

from __future__ import annotations

import numpy as np
import pytest
from cases import ARRAYS

import pyflash
from pyflash import arrays, reference

torch = pytest.importorskip("torch")


def tensors(dtype=torch.float32, seqlen_q=5, seqlen_k=7, heads=4, heads_kv=2, dim=8, dim_v=12, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlen_q, heads, dim), (2, seqlen_k, heads_kv, dim), (2, seqlen_k, heads_kv, dim_v)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(options.get("grad", False)) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_in_tensors_out(dtype):
    q, k, v = tensors(dtype)
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    gradients = pyflash.flash_attention_backward(out, q, k, v, out, lse, causal=True)
    assert [type(t) for t in (out, lse, *gradients)] == [torch.Tensor] * 5
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert [(g.dtype, g.shape) for g in gradients] == [(dtype, a.shape) for a in (q, k, v)]
    wide = [t.to(torch.float64).numpy() for t in (q, k, v)]
    bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-14}[dtype]
    np.testing.assert_allclose(out.double().numpy(), reference.attention(*wide, causal=True)[0], atol=3 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_shared_and_never_copied(dtype):
    q = torch.zeros((2, 5, 4, 8), dtype=dtype)
    view = arrays.kind_of(q, "q").view(q)
    assert view.ctypes.data == q.data_ptr() and view.shape == tuple(q.shape)
    back = arrays.kind_of(q, "q").wrap(view, q)
    assert back.data_ptr() == q.data_ptr() and back.dtype == dtype
    # Strides are bytes in one library and elements in the other.
    turned = q.transpose(1, 2)
    assert arrays.kind_of(q, "q").view(turned).strides == tuple(s * q.element_size() for s in turned.stride())


def test_the_reference_takes_tensors():
    q, k, v = tensors(torch.bfloat16, grad=True)
    table, ends = torch.randn(7, dtype=torch.bfloat16), torch.tensor([0, 2, 5])
    call = {"mask": torch.ones(5, 7, dtype=torch.bool).tril(2), "score_mod": lambda s, b, h, i, j: s + table[j]}
    out, lse = reference.attention(q, k, v, **call)
    table = table.double().numpy()
    wide_q = q.detach().double()
    wide = [t.detach().double().numpy() for t in (q, k, v)]
    expected = reference.attention(*wide, **{**call, "mask": call["mask"].numpy()})
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    ours = reference.attention_varlen(*(t[0, :5] for t in (q, k, v)), ends)
    for got, right in zip(ours, reference.attention_varlen(*(a[0, :5] for a in wide), [0, 2, 5]), strict=True):
        assert np.array_equal(got, right)
    negative = torch.complex(torch.zeros_like(wide_q), -wide_q).conj().imag  # whose memory has the other sign
    assert negative.is_neg() and np.array_equal(reference.attention(negative, k, v)[0], reference.attention(q, k, v)[0])
    gradients = reference.attention_backward(out, q, k, v, dlse=torch.ones(2, 4, 5))
    assert [g.shape for g in gradients] == [tuple(t.shape) for t in (q, k, v)]


def test_out_is_written():
    q, k, v = tensors()
    out = torch.full((2, 5, 4, 12), float("nan"))
    assert pyflash.flash_attention(q, k, v, out=out) is out
    assert torch.equal(out, pyflash.flash_attention(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 3), (4, 4)])
def test_gradients_by_finite_differences(lengths, causal):
    q, k, v = tensors(torch.float64, *lengths, grad=True)
    assert torch.autograd.gradcheck(lambda *a: pyflash.flash_attention(*a, causal=causal, softmax_scale=0.7), (q, k, v))


def test_gradients_through_lse():
    q, k, v = tensors(torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda *a: pyflash.flash_attention(*a, return_lse=True), (q, k, v))
    assert torch.autograd.gradcheck(lambda *a: pyflash.flash_attention(*a, return_lse=True)[1], (q, k, v))


@pytest.mark.parametrize(
    "name, shape", [("bias", (4, 5, 7)), ("bias", (2, 1, 1, 7)), ("bias", (5, 1)), ("sinks", (4,))]
)
def test_gradients_of_options(name, shape):
    generator = torch.Generator().manual_seed(1)
    option = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    q, k, v = tensors(torch.float64, grad=True)
    call = lambda q, k, v, x: pyflash.flash_attention(q, k, v, return_lse=True, **{name: x})  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, option))
    whole, alone = (
        torch.autograd.grad(call(*inputs, option)[0].sum(), option)
        for inputs in ((q, k, v), (q.detach(), k.detach(), v.detach()))
    )
    torch.testing.assert_close(whole, alone)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 1)},
        {"softcap": 1.5, "causal": True},
        {"alibi_slopes": (4,)},
        {"mask": (2, 1, 1, 7)},
        {"bias": (4, 1, 7), "softcap": 2.0},
        {"sinks": (4,), "window": (3, 0)},
        {"dropout_p": 0.3, "seed": 5, "bias": (2, 4, 5, 7), "sinks": (4,)},
    ],
    ids=str,
)
def test_gradients_with_options(options):
    generator = torch.Generator().manual_seed(1)
    drawn = {n: torch.randn(options[n], generator=generator, dtype=torch.float64) for n in ARRAYS if n in options}
    if "mask" in drawn:
        drawn["mask"] = drawn["mask"] > -0.5
    differentiated = {n: drawn[n].requires_grad_() for n in ("bias", "sinks") if n in drawn}
    others = {**{n: x for n, x in options.items() if n not in differentiated}, **drawn}

    def call(q, k, v, *values):
        return pyflash.flash_attention(q, k, v, **{**others, **dict(zip(differentiated, values, strict=True))})

    assert torch.autograd.gradcheck(call, (*tensors(torch.float64, grad=True), *differentiated.values()))


LEARNED = {
    "added": lambda x, y, ids: lambda s, b, h, i, j: s + x[h, pyflash.abs(i - j)] + y[ids[i]],
    "multiplied": lambda x, y, ids: lambda s, b, h, i, j: pyflash.tanh(s * y[b]) * x[h, ids[j]],
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_of_what_a_score_mod_captures(name, varlen):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((4, 7), (3,)))
    ids = torch.arange(7) // 3
    mask_mod = lambda b, h, i, j: ids[j] <= ids[i] + 1  # noqa: E731

    def call(q, k, v, x, y):
        options = {"score_mod": LEARNED[name](x, y, ids), "mask_mod": mask_mod, "return_lse": True}
        if not varlen:
            return pyflash.flash_attention(q, k, v, **options)
        q, k, v = (a.flatten(0, 1) for a in (q, k, v))
        return pyflash.flash_attention_varlen(q, k, v, [0, 5, 10], [0, 9, 14], **options)

    inputs = tensors(torch.float64, grad=True)
    assert torch.autograd.gradcheck(call, (*inputs, x, y))
    # One of them alone, and all without what needs none.
    (alone,) = torch.autograd.grad(call(*(a.detach() for a in (*inputs, x)), y)[0].sum(), y)
    torch.testing.assert_close(alone, torch.autograd.grad(call(*inputs, x, y)[0].sum(), y)[0])


def test_what_a_mask_mod_captures_has_no_gradient():
    x = torch.zeros(7, requires_grad=True)
    message = "^array 0 that score_mod or mask_mod captures: got a tensor that requires grad, takes one that does not"
    with pytest.raises(ValueError, match=message):
        pyflash.flash_attention(*tensors(torch.float32), mask_mod=lambda b, h, i, j: x[j] >= 0)
    with pytest.raises(pyflash.Unsupported, match="differentiated again"):
        out = pyflash.flash_attention(*tensors(torch.float32), score_mod=lambda s, b, h, i, j: s * x[j])
        torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum().backward()


def test_dropout_without_a_seed_has_one_in_autograd():
    q, k, v = tensors(torch.float64, grad=True)
    out = pyflash.flash_attention(q, k, v, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    # Each query head hands the sum of its weights to v: it is what out would be, were v 1.
    weights = gradient.sum(dim=(1, 3)) / v.shape[3]
    assert torch.isfinite(weights).all() and not torch.equal(weights, torch.full_like(weights, 10.0))


def dropped_alike(out, dout, v):
    """Whether forward and backward dropped the same: out is linear in v, whatever was."""
    (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
    return torch.allclose((dv * v).sum(), (out * dout).sum()) and out.detach().abs().sum() > 0


def test_dropout():
    q, k, v = tensors(torch.float64, grad=True)
    dout = torch.randn(2, 5, 4, 12, dtype=torch.float64)
    torch.manual_seed(0)
    first, second = (pyflash.flash_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second) and dropped_alike(first, dout, v) and dropped_alike(second, dout, v)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(pyflash.flash_attention(q, k, v, dropout_p=0.5), first)


def test_dropout_that_is_checkpointed_drops_the_same_again():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors(torch.float64, grad=True)
    dout = torch.randn(2, 5, 4, 12, dtype=torch.float64)
    for reentrant in (False, True):
        out = checkpoint(lambda *a: pyflash.flash_attention(*a, dropout_p=0.5), q, k, v, use_reentrant=reentrant)
        (dv,) = torch.autograd.grad(out, v, dout) if not reentrant else (out.backward(dout), v.grad)[1:]
        assert torch.allclose((dv * v).sum(), (out * dout).sum())


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_gradients_of_some_inputs_only(wanted):
    inputs = dict(zip("qkv", tensors(torch.float64), strict=True))
    for name in wanted:
        inputs[name].requires_grad_()
    pyflash.flash_attention(**inputs, causal=True).sum().backward()
    expected = reference.attention_backward(
        np.ones((2, 5, 4, 12)), *(t.detach().numpy() for t in inputs.values()), causal=True
    )
    for name, gradient in zip("qkv", expected, strict=True):
        if name in wanted:
            np.testing.assert_allclose(inputs[name].grad.numpy(), gradient, atol=1e-13)
        else:
            assert inputs[name].grad is None


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    q, k, v = tensors(grad=True)
    with torch.no_grad():
        assert not pyflash.flash_attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert not pyflash.flash_attention(q, k, v).requires_grad
    assert not pyflash.flash_attention(q.detach(), k.detach(), v.detach()).requires_grad


def test_out_with_a_gradient_is_refused():
    q, k, v = tensors(grad=True)
    with pytest.raises(ValueError, match="^out: got a tensor, takes None where"):
        pyflash.flash_attention(q, k, v, out=torch.zeros(2, 5, 4, 12))


def test_a_second_derivative_is_refused():
    q, k, v = tensors(torch.float64, grad=True)
    (dq,) = torch.autograd.grad((pyflash.flash_attention(q, k, v) ** 2).sum(), q, create_graph=True)
    with pytest.raises(pyflash.Unsupported, match="differentiated again.*SDPBackend.MATH"):
        dq.sum().backward()
    expected = torch.autograd.grad((pyflash.flash_attention(q, k, v) ** 2).sum(), q)[0]
    assert torch.equal(dq, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_does_as_to_torchs_own_attention(dtype):
    q, k, v = tensors(dtype, heads_kv=4, seqlen_k=5, dim_v=8, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = pyflash.flash_attention(q, k, v)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert out.dtype == theirs.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    out.sum().backward()
    assert all(t.grad.dtype == dtype for t in (q, k, v))


def test_autocast_makes_one_type_of_several():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = pyflash.flash_attention(q, k.bfloat16(), v, return_lse=True)
        assert torch.equal(out, pyflash.flash_attention(*(t.bfloat16() for t in (q, k, v))))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_functional_transforms_are_refused():
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="torch.func|functorch"):
        torch.func.grad(lambda *a: pyflash.flash_attention(*a).sum())(q, k, v)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "score_mod"])
def test_forward_mode_is_refused(name):
    from torch.autograd import forward_ad

    given = dict(zip("qkv", tensors(torch.float64), strict=True))
    given |= {"bias": torch.zeros(5, 7).double(), "sinks": torch.zeros(4).double()}
    table = torch.zeros(7).double()
    shown = "array 0 that score_mod or mask_mod captures" if name == "score_mod" else name
    with forward_ad.dual_level():
        pyflash.flash_attention(**given)  # without a tangent
        if name == "score_mod":
            table = forward_ad.make_dual(table, torch.ones_like(table))
            given["score_mod"] = lambda s, b, h, i, j: s + table[j]
        else:
            given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(pyflash.Unsupported, match=f"^{shown}: got a tensor with a tangent, takes one without"):
            pyflash.flash_attention(**given)
        if name in "qkv":
            given[name].requires_grad_()
            with pytest.raises(pyflash.Unsupported, match=f"^{name}: got a tensor with a tangent"):
                pyflash.flash_attention(**given)
            q, k, v = (given[n] for n in "qkv")
            out, lse = torch.zeros(2, 5, 4, 12).double(), torch.zeros(2, 4, 5).double()
            with pytest.raises(pyflash.Unsupported, match=f"^{name}: got a tensor with a tangent"):
                pyflash.flash_attention_backward(out, q, k, v, out, lse)
    q, k, v = tensors()
    with pytest.raises(pyflash.Unsupported, match="^k: got a tensor with a tangent"):
        torch.func.jvp(lambda k: pyflash.flash_attention(q, k, v), (k,), (k,))


def negative(tensor):
    """The same numbers, stored with the other sign."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "out"])
def test_the_negative_bit_is_refused(name, dtype):
    real = torch.float64 if dtype == torch.float64 else torch.float32
    given = {**dict(zip("qkv", tensors(dtype), strict=True)), "bias": torch.ones(5, 7, dtype=dtype)}
    given |= {"sinks": torch.ones(4, dtype=real), "out": torch.zeros(2, 5, 4, 12, dtype=dtype)}
    pyflash.flash_attention(**given)
    given[name] = negative(given[name])
    with pytest.raises(pyflash.Unsupported, match=rf"^{name}: got a tensor with the negative bit set.*resolve_neg\(\)"):
        pyflash.flash_attention(**given)


def test_the_negative_bit_of_a_tensor_on_a_gpu():
    """Whose address is taken as it is: nothing behind would notice."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    q, _, _ = (t.as_subclass(OnGpu) for t in tensors())
    assert arrays.kind_of(q, "q") is arrays.TORCH
    with pytest.raises(pyflash.Unsupported, match="^q: got a tensor with the negative bit set"):
        arrays.kind_of(negative(q), "q")


def test_the_negative_bit_of_a_complex_tensors_part():
    q, k, v = tensors()
    part = torch.complex(k, -v[..., :8]).conj().imag
    assert part.is_neg()
    with pytest.raises(pyflash.Unsupported, match="^v: got a tensor with the negative bit set"):
        pyflash.flash_attention(q, k, part)
    assert pyflash.flash_attention(q, k, part.resolve_neg()).equal(pyflash.flash_attention(q, k, v[..., :8]))


def test_gradients_with_the_negative_bit():
    """Those come from torch, where a part of a complex tensor goes into a loss."""
    q, k, v = tensors(torch.float64, grad=True)
    results = pyflash.flash_attention(q, k, v, return_lse=True)
    gradients = [torch.randn_like(x) for x in results]
    expected = torch.autograd.grad(results, (q, k, v), gradients, retain_graph=True)
    ours = torch.autograd.grad(results, (q, k, v), [negative(g) for g in gradients])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torchs_own_attention(causal):
    ours, theirs = (tensors(torch.float64, 6, 6, heads_kv=4, dim_v=8, grad=True) for _ in range(2))
    a = pyflash.flash_attention(*ours, causal=causal)
    b = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in theirs), is_causal=causal)
    torch.testing.assert_close(a, b.transpose(1, 2))
    dout = torch.randn_like(a)
    a.backward(dout)
    b.backward(dout.transpose(1, 2))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_a_gradient_of_stride_zero():
    q, k, v = tensors(torch.float64, grad=True)
    gradients = torch.autograd.grad(pyflash.flash_attention(q, k, v).sum(), (q, k, v))
    explicit = torch.autograd.grad(pyflash.flash_attention(q, k, v), (q, k, v), torch.ones(2, 5, 4, 12).double())
    assert all(torch.equal(a, b) for a, b in zip(gradients, explicit, strict=True))


def test_a_training_step_learns():
    """Gradient descent through attention lowers a loss: signs and sums are right end to end."""
    q, k, v = tensors(torch.float64, grad=True)
    optimizer = torch.optim.SGD([q, k, v], lr=0.03)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (pyflash.flash_attention(q, k, v, causal=True) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_other_devices_are_refused():
    q, k, v = tensors()
    with pytest.raises(pyflash.Unsupported, match=r"^q: got a torch tensor on meta, takes one on a CUDA device or the"):
        pyflash.flash_attention(q.to("meta"), k, v)


def test_other_libraries_next_to_it_are_refused():
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"^k: got a numpy array, takes torch on the CPU, as q"):
        pyflash.flash_attention(q, k.numpy(), v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype):
    q, k, v = (torch.zeros(t.shape, dtype=dtype) for t in tensors())
    with pytest.raises(TypeError, match=rf"^q: got dtype {str(dtype).removeprefix('torch.')}, takes one of float16"):
        pyflash.flash_attention(q, k, v)


def test_a_mask_of_numbers_is_told_what_it_takes():
    with pytest.raises(TypeError, match="^mask: got dtype int32, takes .*bool"):
        pyflash.flash_attention(*tensors(), mask=torch.ones(1, dtype=torch.int32))


def test_sparse_tensors_are_refused():
    q, k, v = tensors()
    with pytest.raises((TypeError, pyflash.Unsupported), match="^q: "):
        pyflash.flash_attention(q.to_sparse(), k, v)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    """Works, or says what to install; never an error that names neither the argument nor the remedy."""
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    q, k, v = tensors(torch.bfloat16)
    try:
        out = pyflash.flash_attention(q, k, v)
    except pyflash.Unsupported as error:
        assert "pip install ml_dtypes" in str(error)
    else:
        assert out.dtype == torch.bfloat16
