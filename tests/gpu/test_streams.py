"""Streams, graphs, devices and memory: how a call fits into what else runs."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case
from runs import DTYPES, cp

import pyflash
from pyflash import debug, device, dispatch
from pyflash.errors import LaunchError, Unsupported

CASE = Case(2, 300, 400, 4, 2, 64, 64, "float16")


def forward_and_backward(q, k, v, dout, **options) -> list:
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True, **options)
    return [out, lse, *pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)]


def test_work_is_queued_on_the_current_stream():
    """The inputs are still being copied, behind a long queue, when the call is made."""
    arrays = list(CASE.arrays(cp).values())
    expected = [cp.asnumpy(a) for a in forward_and_backward(*arrays)]
    block = cp.zeros(2**28, np.uint8)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        late = [cp.full(a.shape, np.nan, a.dtype) for a in arrays]
        for _ in range(200):
            cp.cuda.runtime.memsetAsync(block.data.ptr, 1, block.nbytes, stream.ptr)
        for target, array in zip(late, arrays, strict=True):
            cp.cuda.runtime.memcpyAsync(
                target.data.ptr, array.data.ptr, array.nbytes, cp.cuda.runtime.memcpyDeviceToDevice, stream.ptr
            )
        results = forward_and_backward(*late)
        assert not stream.done, "the queue was too short to prove anything"
    stream.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert np.array_equal(cp.asnumpy(got), want)


def test_a_graph_replays_with_new_data():
    arrays = list(CASE.arrays(cp).values())
    other = [cp.asarray(a) for a in Case(*(2, 300, 400, 4, 2, 64, 64, "float16"), seed=1).arrays().values()]
    expected = [[cp.asnumpy(a) for a in forward_and_backward(*x)] for x in (arrays, other)]
    fixed = [a.copy() for a in arrays]
    out = cp.empty_like(fixed[3])
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        forward_and_backward(*fixed, out=out)  # compiles, loads, and leaves the pool with blocks of the right sizes
        stream.begin_capture()
        results = forward_and_backward(*fixed, out=out)
        graph = stream.end_capture()
        for data, want in zip((other, arrays, other), (expected[1], expected[0], expected[1]), strict=True):
            for target, array in zip(fixed, data, strict=True):
                target[...] = array
            graph.launch(stream)
            stream.synchronize()
            assert results[0] is out
            for got, right in zip(results, want, strict=True):
                assert np.array_equal(cp.asnumpy(got), right)


def peak(call) -> tuple[int, list]:
    """Bytes that a call held at most, of which its results are a part, and its results."""
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        results = call()
    cp.cuda.Device().synchronize()
    return pool.total_bytes(), results


@pytest.mark.parametrize("family", DTYPES)
def test_memory(family):
    """Forward: out and lse, and at most a counter. Backward: at most three times q's bytes beyond the gradients."""
    q, k, v, dout = Case(2, 3000, 3000, 4, 4, 128, 128, DTYPES[family][0]).arrays(cp).values()
    slack = 4 * 512  # the pool's rounding
    with debug.families(family):
        try:
            pyflash.flash_attention(q, k, v)
        except Unsupported as error:
            pytest.skip(str(error))
        used, (out, lse) = peak(lambda: list(pyflash.flash_attention(q, k, v, return_lse=True)))
        assert used <= out.nbytes + lse.nbytes + slack
        used, _ = peak(lambda: [pyflash.flash_attention(q, k, v)])
        assert used <= out.nbytes + slack
        used, _ = peak(lambda: [pyflash.flash_attention(q, k, v, out=out)])
        assert used <= slack
        used, gradients = peak(lambda: list(pyflash.flash_attention_backward(dout, q, k, v, out, lse)))
        assert used <= sum(g.nbytes for g in gradients) + 3 * q.nbytes + slack


def test_memory_is_in_proportion_to_the_inputs():
    """Sequences of one token: nothing is padded to tiles."""
    q, k, v, dout = Case(8300, 1, 1, 16, 16, 128, 128, "bfloat16").arrays(cp).values()
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    used, gradients = peak(lambda: list(pyflash.flash_attention_backward(dout, q, k, v, out, lse, deterministic=True)))
    assert used <= sum(g.nbytes for g in gradients) + 3 * q.nbytes + 4 * 512


def test_the_current_device_is_left_alone(monkeypatch):
    """The arrays' device is made current for the launch, and what was current before is current after."""
    entered = []

    class Spy(device.current):
        def __enter__(self):
            entered.append(self.device_id)
            return super().__enter__()

    monkeypatch.setattr(device, "current", Spy)
    arrays = CASE.arrays(cp)
    before = cp.cuda.Device().id
    forward_and_backward(arrays["q"], arrays["k"], arrays["v"], arrays["dout"])
    assert entered == [arrays["q"].device.id] * 2 and cp.cuda.Device().id == before


def second_device() -> int:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    return 1


def test_arrays_on_a_device_that_is_not_current():
    other = second_device()
    expected = [cp.asnumpy(a) for a in forward_and_backward(*CASE.arrays(cp).values())]
    with cp.cuda.Device(other):
        arrays = list(CASE.arrays(cp).values())
    with cp.cuda.Device(0):
        results = forward_and_backward(*arrays)
        assert cp.cuda.Device().id == 0
    assert all(a.device.id == other for a in results)
    for got, want in zip(results, expected, strict=True):
        assert np.array_equal(cp.asnumpy(got), want)


def test_arrays_on_two_devices_are_refused():
    other = second_device()
    q, k, v, _ = CASE.arrays(cp).values()
    with cp.cuda.Device(other):
        k = cp.asarray(cp.asnumpy(k))
    with pytest.raises(ValueError, match=r"^k: got an array on CUDA device 1, takes one on device 0, as q"):
        pyflash.flash_attention(q, k, v)


def test_numpy_arrays_next_to_cupys_are_refused():
    q, k, v, _ = CASE.arrays(cp).values()
    with pytest.raises(TypeError, match=r"^v: got a numpy array, takes cupy, as q"):
        pyflash.flash_attention(q, k, cp.asnumpy(v))


def test_a_launch_that_the_driver_refuses_is_reported():
    """Whatever the driver says of a launch reaches the user, with the call."""
    q, k, v, _ = (cp.asarray(a) for a in Case(1, 33, 44, 1, 1, 32, 32).arrays().values())
    dispatch._prepared.clear()
    pyflash.flash_attention(q, k, v)
    (prepared,) = dispatch._prepared.values()

    before = prepared.executable._launch_kernel
    prepared.executable._launch_kernel = lambda *arguments: 701
    try:
        with pytest.raises(LaunchError, match=r"fwd_simt .*q \(1, 33, 1, 32\).*LAUNCH_OUT_OF_RESOURCES"):
            pyflash.flash_attention(q, k, v)
    finally:
        prepared.executable._launch_kernel = before
    assert pyflash.flash_attention(q, k, v) is not None
