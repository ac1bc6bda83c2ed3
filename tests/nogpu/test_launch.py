"""The way of a GPU call up to the driver: what is launched, with which arguments, on which device and stream."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import FakeCuPy
from test_params import ctypes_struct

import pyflash
from pyflash import debug, dispatch, features, params, problem, tma
from pyflash.errors import LaunchError

KERNELS_OF = {
    ("sm80", False): ["fwd_sm80"],
    ("sm80", True): ["bwd_delta", "bwd_sm80", "bwd_convert"],
    ("simt", False): ["fwd_simt"],
    ("simt", True): ["bwd_delta", "bwd_simt", "bwd_simt"],
    ("sm90", False): ["fwd_sm90"],
    ("sm90", True): ["bwd_delta", "bwd_sm90"],
}
DTYPE_OF = {"sm80": "float16", "sm90": "float16", "simt": "float32"}


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeCuPy()
    fake.install(monkeypatch)
    yield fake
    fake.uninstall()


def inputs(gpu, dtype="float16", seqlen=100, offset=0):
    return [gpu.ndarray((2, seqlen, 4, 64), dtype, offset) for _ in range(3)]


def structs(gpu, calls):
    """The arguments of each call, as C sees them. Read while the memory still holds them."""
    found = []
    for call in calls:
        launch = gpu.functions[call.function]
        found.append((launch, call.read(ctypes_struct(launch.kernel, launch.real))))
    return found


def expected_value(launch, field):
    """What a scalar argument must be; 0 where its feature is off."""
    values = dict(launch.values)
    return (
        values.get(field.name, 0 if field.count == 1 else (0,) * field.count)
        if field in features.FIELDS
        else values[field.name]
    )


@pytest.mark.parametrize("family, backward", KERNELS_OF)
def test_every_argument_arrives(gpu, family, backward):
    dtype = DTYPE_OF[family]
    q, k, v = inputs(gpu, dtype)
    seen = []
    gpu.on_launch = lambda call: seen.append((call, structs(gpu, [call])[0]))
    gpu.stream = 77
    with debug.families(family):
        if backward:
            dout, out = (gpu.ndarray((2, 100, 4, 64), dtype) for _ in range(2))
            lse, dlse = (gpu.ndarray((2, 4, 100), "float32") for _ in range(2))
            results = pyflash.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
            arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse, "dlse": dlse}
            arrays |= dict(zip(("dq", "dk", "dv"), results, strict=True))
        else:
            out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
            arrays = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    assert [launch.kernel for _, (launch, _) in seen] == KERNELS_OF[family, backward]
    for call, (launch, struct) in seen:
        assert (call.grid, call.block, call.smem_bytes) == (launch.grid, launch.block, launch.smem_bytes)
        assert call.stream == 77 and call.device_id == 0 and call.overlaps == launch.overlaps
        given = dict(launch.arrays)
        for field in params.TABLES[launch.kernel]:
            got = getattr(struct, field.name)
            if field.kind == "tensor_map":
                spec = dict(launch.tensor_maps).get(field.name)
                assert got[0] == (arrays[spec.array].data.ptr if spec else 0)
            elif field.kind == "pointer" and given.get(field.name) in arrays:
                assert got == arrays[given[field.name]].data.ptr
            elif field.kind == "pointer":
                assert (got is None) == (field.name not in given), field.name
            elif field.name.endswith("_stride") and field.name.removesuffix("_stride") in arrays:
                array = arrays[field.name.removesuffix("_stride")]
                if field.name.removesuffix("_stride") in given:
                    assert tuple(got) == tuple(s // array.dtype.itemsize for s in array.strides)
            elif field.kind == "real":
                assert got == pytest.approx(expected_value(launch, field), rel=1e-6)
            elif field.kind == "i32":
                assert (got if field.count == 1 else tuple(got)) == expected_value(launch, field)


def test_what_functions_capture_arrives(gpu):
    table, ids = gpu.ndarray((4, 100), "float32"), gpu.ndarray((100,), "int32")
    call = {"score_mod": lambda s, b, h, i, j: s + table[h, j], "mask_mod": lambda b, h, i, j: ids[i] == ids[j]}
    seen = []
    gpu.on_launch = lambda call: seen.extend(structs(gpu, [call]))
    pyflash.flash_attention(*inputs(gpu), **call)
    [(_, struct)] = seen
    for place, (array, strides) in enumerate([(table, (100, 1, 0, 0)), (ids, (1, 0, 0, 0))]):
        name = f"mod_array_{place}"
        assert getattr(struct, name) == array.data.ptr
        assert tuple(getattr(struct, f"{name}_stride")) == strides
        assert tuple(getattr(struct, f"{name}_size")) == (*array.shape, 0, 0, 0)[:4]
    assert struct.mod_array_2 is None
    numbers = np.zeros(100)
    with pytest.raises(TypeError, match="array 0 that score_mod or mask_mod captures: got a numpy array, takes cupy"):
        pyflash.flash_attention(*inputs(gpu), score_mod=lambda s, b, h, i, j: s + numbers[i])


def test_the_map_of_a_bias_points_at_the_bias(gpu):
    seen = []
    gpu.on_launch = lambda call: seen.extend(structs(gpu, [call]))
    for bias in (gpu.ndarray((4, 1, 104), "float16") for _ in range(2)):
        with debug.families("sm90"):
            pyflash.flash_attention(*inputs(gpu, seqlen=104), bias=bias)
        _, struct = seen.pop()
        assert struct.tma_bias[0] == struct.bias == bias.data.ptr


@pytest.mark.parametrize("seqlen", [100, 1000])  # one key tile, whose dq is never summed, and several
def test_hoppers_backward_overlaps_its_own_launches_and_no_others(gpu, seqlen):
    q, k, v = inputs(gpu, seqlen=seqlen)
    out, lse = gpu.ndarray(q.shape, "float16"), gpu.ndarray((2, 4, seqlen), "float32")
    with debug.families("sm90"):
        pyflash.flash_attention_backward(out, q, k, v, out, lse)
    kernels = ["bwd_delta", "bwd_sm90"] + ["bwd_convert_sm90"] * (seqlen > 128)
    assert [gpu.functions[call.function].kernel for call in gpu.calls] == kernels
    assert [call.overlaps for call in gpu.calls] == [False, *[True] * (len(kernels) - 1)]


def test_pieces_of_the_workspace_are_handed_to_all_kernels_alike(gpu):
    q, k, v = inputs(gpu)
    out, lse = gpu.ndarray(q.shape, "float16"), gpu.ndarray((2, 4, 100), "float32")
    seen = []
    gpu.on_launch = lambda call: seen.append(structs(gpu, [call])[0][1])
    with debug.families("sm80"):
        pyflash.flash_attention_backward(out, q, k, v, out, lse, deterministic=True)
    delta, main, convert = seen
    assert delta.delta == main.delta and delta.dq_accum == main.dq_accum == convert.dq_accum
    assert delta.semaphore == main.semaphore
    rows = 2 * 4 * 100
    assert main.dq_accum >= main.delta + 4 * rows and main.semaphore >= main.dq_accum + 4 * rows * 64


def test_a_repeated_call_makes_no_new_plan_but_uses_the_new_arrays(gpu):
    pointers = []
    gpu.on_launch = lambda call: pointers.append([structs(gpu, [call])[0][1].q, call.function])
    first, second = inputs(gpu), inputs(gpu)
    for arrays in (first, second, first):
        pyflash.flash_attention(*arrays)
    assert [p for p, _ in pointers] == [first[0].data.ptr, second[0].data.ptr, first[0].data.ptr]
    assert len({function for _, function in pointers}) == 1 and len(dispatch._prepared) == 1


@pytest.mark.parametrize("change", [{"seqlen": 101}, {"dtype": "float32"}, {"offset": 2}, {"device": 1}, {"scale": 0.5},
                                    {"causal": True}, {"lse": True}, {"families": ("sm80",)}], ids=str)  # fmt: skip
def test_whatever_a_plan_depends_on_makes_a_new_one(gpu, change):
    """And in either order of the calls the right one is used."""
    kernels = []
    gpu.on_launch = lambda call: kernels.append(call.function)

    def call(seqlen=100, dtype="float16", offset=0, device=0, scale=None, causal=False, lse=False, families=()):
        gpu.current = device
        arrays = inputs(gpu, dtype, seqlen, offset)
        gpu.current = 0
        with debug.families(*(families or ("sm90", "sm80", "simt"))):
            pyflash.flash_attention(*arrays, softmax_scale=scale, causal=causal, return_lse=lse)

    for options in ({}, change, {}, change):
        call(**options)
    assert kernels[0] == kernels[2] != kernels[1] == kernels[3]


def test_the_arrays_device_is_current_for_the_launch_and_only_for_it(gpu):
    gpu.current = 1
    arrays = inputs(gpu)
    gpu.current = 0
    out = pyflash.flash_attention(*arrays)
    assert gpu.calls[0].device_id == 1 and out.data.device_id == 1 and gpu.current == 0


def test_the_current_device_is_restored_after_a_failure_too(gpu):
    gpu.current = 1
    arrays = inputs(gpu)
    gpu.current = 0

    gpu.on_launch = lambda call: 701  # out of resources
    with pytest.raises(LaunchError, match=r"refused to launch fwd_.*\[q \(2, 100, 4, 64\).*CUDA_ERROR_701"):
        pyflash.flash_attention(*arrays)
    assert gpu.current == 0


def test_arrays_on_two_devices_are_refused(gpu):
    q, k, v = inputs(gpu)
    gpu.current = 1
    k = gpu.ndarray(k.shape, k.dtype)
    with pytest.raises(ValueError, match=r"^k: got an array on CUDA device 1, takes one on device 0, as q"):
        pyflash.flash_attention(q, k, v)
    assert not gpu.calls


def test_an_array_of_the_cpu_among_them_is_refused(gpu):
    q, k, v = inputs(gpu)
    with pytest.raises(TypeError, match=r"^v: got a numpy array, takes cupy, as q"):
        pyflash.flash_attention(q, k, np.zeros(v.shape, v.dtype))


def test_nothing_is_launched_where_there_is_nothing_to_compute(gpu):
    q, k, v = (gpu.ndarray((2, length, 4, 64), "float16") for length in (0, 100, 100))
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 0) and not gpu.calls


def test_threads_do_not_share_arguments(gpu):
    """Two threads in the same prepared call at the same moment each pass their own arrays."""
    barrier, seen, lock = threading.Barrier(4, timeout=10), {}, threading.Lock()
    pyflash.flash_attention(*inputs(gpu))

    def slow(call):
        barrier.wait()
        struct = structs(gpu, [call])[0][1]
        with lock:
            seen[threading.get_ident()] = struct.q

    gpu.on_launch = slow
    expected = {}

    def work():
        arrays = inputs(gpu)
        expected[threading.get_ident()] = arrays[0].data.ptr
        pyflash.flash_attention(*arrays)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == expected and len(set(seen.values())) == 4


def test_tile_counters_are_shared_along_a_stream_and_never_beside_it(gpu):
    counters = []

    def note(call):
        launch, struct = structs(gpu, [call])[0]
        counters.append(struct.tile_counter if "tile_counter" in dict(launch.arrays) else None)

    gpu.on_launch = note
    arrays = inputs(gpu)
    for gpu.stream, gpu.captures in ((1, False), (1, False), (5, False), (1, True), (1, True), (1, False)):
        pyflash.flash_attention(*arrays, causal=True)
    if counters[0] is None:
        pytest.skip("no kernel that this call uses counts its tiles")
    first, again, other, captured, recaptured, last = counters
    assert first == again == last and len({first, other, captured, recaptured}) == 4
    word = 8
    assert all(address % word == 0 for address in counters)


def test_the_address_word_of_a_tensor_map_is_found_or_not_used(gpu, monkeypatch):
    tensor = problem.contiguous((2, 100, 4, 64), "float16")
    assert tma.address_word(tensor, (64, 64)) == 0

    def encrypted(tensor, box, address, into):
        for word in range(16):
            tma.ctypes.c_uint64.from_address(into + 8 * word).value = address * (word + 3) % 2**64

    monkeypatch.setattr(tma, "encode", encrypted)
    assert tma.address_word(tensor, (64, 64)) is None


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_offsets_arrive(gpu, family, on_host):
    """Those of the host are brought to the device of q; those of the device are not looked at."""
    gpu.current, ends = 1, np.array([0, 30, 100], "int64")
    q, k, v, out = (gpu.ndarray((100, 4, 64), DTYPE_OF[family]) for _ in range(4))
    lse, offsets = gpu.ndarray((4, 100), "float32"), gpu.module.asarray(ends)
    gpu.current, seen = 0, []

    def look(call):
        launch, struct = structs(gpu, [call])[0]
        if params.by_sequence(launch.kernel):
            places = struct.cu_seqlens_q, struct.cu_seqlens_k
            numbers = [((ctypes.c_int32 if on_host else ctypes.c_int64) * 3).from_address(place)[:] for place in places]
            seen.append((launch.kernel, call.device_id, places[0] == offsets.data.ptr, numbers, struct.seqused_q))

    gpu.on_launch = look
    call = {"cu_seqlens_q": ends.tolist() if on_host else offsets, "max_seqlen_q": 70}
    with debug.families(family):
        result = pyflash.flash_attention_varlen(q, k, v, **call, return_lse=True)
        gradients = pyflash.flash_attention_varlen_backward(out, q, k, v, out, lse, **call)
    assert [a.shape for a in (*result, *gradients)] == [q.shape, lse.shape, q.shape, q.shape, q.shape]
    assert [kernel for kernel, *_ in seen if kernel[:3] in ("fwd", "bwd")][0] == f"fwd_{family}"
    assert {name for name, *_ in seen} >= {f"fwd_{family}", f"bwd_{family}"}
    assert all(rest == [1, not on_host, [ends.tolist()] * 2, None] for _, *rest in seen)


def test_offsets_of_another_device_or_library_are_refused(gpu):
    q = gpu.ndarray((10, 4, 64), "float16")
    gpu.current = 1
    offsets = gpu.module.asarray(np.array([0, 10]))
    gpu.current = 0
    with pytest.raises(ValueError, match="cu_seqlens_q: got an array on CUDA device 1, takes one on device 0, as q"):
        pyflash.flash_attention_varlen(q, q, q, offsets)
    with pytest.raises(TypeError, match="cu_seqlens_q: got a cupy array, takes a list, a NumPy array or one of numpy"):
        host = np.zeros((10, 4, 64), np.float32)
        pyflash.flash_attention_varlen(host, host, host, offsets)
    with pytest.raises(ValueError, match="cu_seqlens_q: got 9 as the last offset, takes 10, the tokens of q"):
        pyflash.flash_attention_varlen(q, q, q, [0, 9])


def test_a_repeated_call_is_short(gpu):
    """What the host does for a call, counted: a measure of its time that is the same on every machine."""
    arrays = inputs(gpu)
    out, lse = pyflash.flash_attention(*arrays, causal=True, return_lse=True)
    calls = {
        "forward": lambda: pyflash.flash_attention(*arrays, causal=True),
        "backward": lambda: pyflash.flash_attention_backward(out, *arrays, out, lse, causal=True),
    }
    counts = dict.fromkeys(calls, 0)
    for name, call in calls.items():
        call()

        def count(frame, event, _, name=name):
            counts[name] += event == "call" and Path(frame.f_code.co_filename).parent == Path(pyflash.__file__).parent

        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert 0 < counts["forward"] <= 28 and counts["forward"] < counts["backward"] <= 36
