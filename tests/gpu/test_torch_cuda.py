"""torch tensors on the GPU: kinds, streams, memory, graphs and gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pyflash
from pyflash import reference

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA")


def tensors(dtype=torch.bfloat16, seqlen_q=100, seqlen_k=150, heads=4, heads_kv=2, dim=64, grad=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (2, seqlen_q, heads, dim), (2, seqlen_k, heads_kv, dim), (2, seqlen_k, heads_kv, dim)
    made = [torch.randn(s, generator=generator, device="cuda", dtype=torch.float64).to(dtype) for s in shapes]
    return [t.requires_grad_(grad) for t in made]


def host(*arrays):
    return [a.detach().double().cpu().numpy() for a in arrays]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_in_tensors_out(dtype):
    q, k, v = tensors(dtype)
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    gradients = pyflash.flash_attention_backward(out, q, k, v, out, lse, causal=True)
    assert all(type(t) is torch.Tensor and t.device == q.device for t in (out, lse, *gradients))
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bound = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    expected = reference.attention(*host(q, k, v), causal=True)[0]
    np.testing.assert_allclose(host(out)[0], expected, atol=bound)
    for got, want in zip(gradients, reference.attention_backward(*host(out, q, k, v), causal=True), strict=True):
        np.testing.assert_allclose(host(got)[0], want, atol=bound * np.abs(want).max())


def test_gradients_by_finite_differences():
    for causal in (False, True):
        inputs = tensors(torch.float64, 5, 7, dim=8, grad=True)
        assert torch.autograd.gradcheck(lambda *a, c=causal: pyflash.flash_attention(*a, causal=c), inputs)
        assert torch.autograd.gradcheck(lambda *a: pyflash.flash_attention(*a, return_lse=True), inputs)


def test_autograd_equals_torchs_own_attention():
    ours, theirs = (tensors(torch.float32, 130, 130, heads_kv=4, grad=True) for _ in range(2))
    a = pyflash.flash_attention(*ours, causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        b = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in theirs), is_causal=True)
    dout = torch.randn_like(a)
    a.backward(dout)
    b.backward(dout.transpose(1, 2))
    torch.testing.assert_close(a, b.transpose(1, 2), rtol=1e-4, atol=1e-4)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_memory_is_torchs():
    q, k, v = tensors()
    pyflash.flash_attention(q, k, v)
    before = torch.cuda.memory_allocated()
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    rounded = sum(-(-t.nbytes // 512) * 512 for t in (out, lse))
    assert torch.cuda.memory_allocated() - before == rounded
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = pyflash.flash_attention_backward(out, q, k, v, out, lse)
    assert torch.cuda.max_memory_allocated() - before <= sum(g.nbytes for g in gradients) + 3 * q.nbytes + 4096


def test_the_current_stream_is_used():
    q, k, v = tensors()
    expected = pyflash.flash_attention(q, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.full_like(t, float("nan")) for t in (q, k, v)]
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, (q, k, v), strict=True):
            target.copy_(source)
        out = pyflash.flash_attention(*late)
        assert not stream.query(), "the queue was too short to prove anything"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_replays_with_new_data():
    fixed, other = tensors(), tensors(seed=1)
    expected = pyflash.flash_attention(*other, causal=True)
    pyflash.flash_attention(*fixed, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = pyflash.flash_attention(*fixed, causal=True, return_lse=True)
        gradients = pyflash.flash_attention_backward(out, *fixed, out, lse, causal=True, deterministic=True)
    for target, source in zip(fixed, other, strict=True):
        target.copy_(source)
    graph.replay()
    assert torch.equal(out, expected)
    again = pyflash.flash_attention_backward(out, *fixed, out, lse, causal=True, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def test_a_graph_of_a_call_never_made_before():
    """Compiling and loading happen in the middle of the capture."""
    q, k, v = tensors(torch.float16, 77, 99, dim=48)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = pyflash.flash_attention(q, k, v)
    except (RuntimeError, pyflash.LaunchError) as error:
        pytest.skip(f"the driver does not load kernels during a capture: {error}")
    graph.replay()
    assert torch.equal(out, pyflash.flash_attention(q, k, v))


def test_deterministic_algorithms():
    q, k, v = tensors(torch.bfloat16, 700, 700, grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        first = None
        for _ in range(10):
            gradients = torch.autograd.grad(pyflash.flash_attention(q, k, v, causal=True).sum(), (q, k, v))
            first = first or gradients
            assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_of_a_training_step():
    """Forward, autograd's backward and an update, captured once and replayed."""
    start, x = tensors(torch.float32, 64, 64, heads_kv=4, dim=32), torch.randn(2, 64, 4, 32, device="cuda")

    def step(weights):
        loss = (pyflash.flash_attention(*weights, causal=True) - x).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 100 * gradient
        return loss

    eager, captured = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    losses = [step(eager).item() for _ in range(4)]
    warm = [t.clone().requires_grad_() for t in start]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(warm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(captured)
    replayed = []
    for _ in range(4):
        graph.replay()
        replayed.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(losses), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_and_eager_give_the_same_bits(causal):
    def model(q, k, v):
        out, lse = pyflash.flash_attention(q.sin(), k, v, causal=causal, return_lse=True)
        return out.float().square().mean() + lse.mean()

    inputs = tensors(torch.bfloat16, grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
        gradients = [torch.autograd.grad(f(*inputs), inputs) for f in (compiled, model)]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=1e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_operators():
    q, k, v = tensors(torch.bfloat16, grad=True)
    options = ([], [0.1], '{"softmax_scale":0,"causal":true}', False)
    torch.library.opcheck(torch.ops.pyflash.attention.default, (q, k, v, *options))


def test_autocast():
    q, k, v = tensors(torch.float32, grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = pyflash.flash_attention(q, k, v)
    assert torch.equal(out, pyflash.flash_attention(*(t.bfloat16() for t in (q, k, v))))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("lengths", [(100, 150), (150, 100)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_in_place_of_torchs_own_function(is_causal, lengths):
    from pyflash.torch import scaled_dot_product_attention

    inputs = [t.transpose(1, 2) for t in tensors(torch.float32, *lengths, grad=True)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
    out = scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    gradients = [torch.autograd.grad(o, inputs, dout) for o in (out, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def host_seconds(call) -> float:
    """What the host takes to queue a call."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return min(times)


@pytest.mark.parametrize(("grad", "additions"), [(False, 3.5), (True, 7)])
def test_host_time_of_a_call(grad, additions):
    """In proportion to an addition of CuPy, as hosts differ: mostly 2.5 to 3 times it, with gradients 5 or 6."""
    q, k, v = tensors(torch.bfloat16, 64, 64, heads_kv=4, grad=grad)
    ours = host_seconds(lambda: pyflash.flash_attention(q, k, v))
    x = cupy.ones(64)
    assert ours < additions * host_seconds(lambda: x + x)


def test_devices_are_not_mixed():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="^v: got a torch on the CPU array, takes torch, as q"):
        pyflash.flash_attention(q, k, v.cpu())


def test_without_ml_dtypes():
    """bfloat16 goes straight from torch to the kernel and back: PyFlash itself needs no library for it. (CuPy may.)"""
    code = (
        "import builtins\n"
        "ordinary = builtins.__import__\n"
        "def refusing(name, namespace=None, *rest, **named):\n"
        "    importer = (namespace or {}).get('__name__', '')\n"
        "    if name.startswith('ml_dtypes') and importer.startswith('pyflash'): raise ImportError(name)\n"
        "    return ordinary(name, namespace, *rest, **named)\n"
        "builtins.__import__ = refusing\n"
        "import torch, pyflash\n"
        "q = torch.randn(1, 64, 2, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "out = pyflash.flash_attention(q, q, q, causal=True)\n"
        "out.sum().backward()\n"
        "print(out.dtype, q.grad.dtype, torch.isfinite(q.grad).all().item())\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert run.stdout.split() == ["torch.bfloat16", "torch.bfloat16", "True"], run.stderr
