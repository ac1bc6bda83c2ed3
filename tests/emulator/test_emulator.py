"""The emulator itself: right miniatures pass under every seed, and every planted bug is found under every seed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import emulator
import numpy as np
import pytest
from cases import numpy_dtype

from pyflash import source

MINIATURES = Path(__file__).parent / "miniatures"
SEEDS = range(16)
ELEMENTS = {"float16": "fp16", "bfloat16": "bf16"}


@cache
def miniature(name: str, *macros: str, element: str = "bf16", constants: str = "") -> emulator.Kernel:
    """A kernel of miniatures/, with `macros` defined."""
    text = "\n".join(
        [
            '#include "dtypes.cuh"',
            *(f"#define {macro}" for macro in macros),
            f"namespace cfg {{ using Element = {element}; {constants} }}",
            f'#include "{name}.cu"',
        ]
    )
    program = (MINIATURES / f"{name}.cu").read_text(encoding="utf-8")
    return emulator.build(text, name, {f"{name}.cu": program, **source.headers(program)})


def outcomes(run, seeds: Iterable[int] = SEEDS) -> list[str]:
    """What comes of each seed: "right", "wrong" results, or the kind of error."""

    def outcome(seed: int) -> str:
        try:
            return "right" if run(seed) else "wrong"
        except emulator.EmulatorError as error:
            return error.kind

    return [outcome(seed) for seed in seeds]


@pytest.mark.parametrize(("overlaps", "waits"), [(False, False), (True, True), (True, False)])
def test_what_launches_share_is_touched_after_the_wait(overlaps, waits):
    text = f"""#include "ptx.cuh"
    struct Params {{ int* x; }};
    extern "C" __global__ void count(const __grid_constant__ Params p) {{
      {"await_launches_before();" if waits else ""}
      p.x[threadIdx.x] = threadIdx.x;
    }}"""
    kernel = emulator.build(text, "count", {"ptx.cuh": ""})

    def run(seed: int) -> bool:
        with emulator.Memory(seed) as memory:
            x = memory.shared_by_launches("x", 128)
            emulator.run(kernel, 1, 32, params=struct.pack("<Q", x.pointer), seed=seed, overlaps=overlaps)
            return np.array_equal(x.array.view(np.int32), np.arange(32))

    assert set(outcomes(run)) == {"right" if waits or not overlaps else "race"}


# ---- copies ----------------------------------------------------------------------------------------------------------


def run_copies(*macros: str, check_races: bool = True):
    x = np.arange(6 * 128 * 4, dtype=np.float32).reshape(6, 128, 4)

    def run(seed: int) -> bool:
        with emulator.Memory(seed) as memory:
            given, y = memory.constant("x", x), memory.empty("y", (128, 4), np.float32)
            params = struct.pack("<2Q", given.pointer, y.pointer)
            emulator.run(miniature("copies", *macros), 1, 128, 4096, params, seed=seed, check_races=check_races)
            return np.array_equal(y.array, x.sum(0)[::-1])

    return run


@pytest.mark.parametrize("check_races", [True, False])
def test_right_copies_pass(check_races):
    assert set(outcomes(run_copies(check_races=check_races), range(64))) == {"right"}


@pytest.mark.parametrize("bug", ["NO_WAIT", "WEAK_WAIT", "BARRIER_BEFORE_WAIT", "NO_BARRIER", "BUFFER_REUSED_EARLY"])
def test_unordered_copies_are_races_and_give_wrong_results(bug):
    assert set(outcomes(run_copies(bug))) == {"race"}
    timed = outcomes(run_copies(bug, check_races=False), range(64))
    assert timed.count("wrong") >= len(timed) * 3 / 4, timed


@pytest.mark.parametrize(
    ("bug", "kind"),
    [
        ("SHARED_OVERRUN", "out of bounds"),
        ("READS_PAST_END", "out of bounds"),
        ("WRITES_PAST_END", "out of bounds"),
        ("WRITES_BEFORE_START", "out of bounds"),
        ("WRITES_INPUT", "write to constant"),
        ("MISALIGNED_COPY", "misaligned"),
        ("MISALIGNED_VECTOR", "misaligned"),
    ],
)
def test_bad_addresses(bug, kind):
    assert set(outcomes(run_copies(bug))) == {kind}


def test_errors_name_thread_buffer_and_line():
    with pytest.raises(emulator.EmulatorError) as caught:
        run_copies("WRITES_PAST_END")(0)
    lines = (MINIATURES / "copies.cu").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "y[i] = sum[i]" in text)
    assert (
        "thread 127 (warp 3 lane 31) of block 0 writes 4 bytes 0 bytes past the end of y (2048 bytes) "
        f"at copies.cu:{line}"
    ) in str(caught.value)


# ---- meetings --------------------------------------------------------------------------------------------------------


def run_meetings(*macros: str, check_races: bool = True):
    x = np.arange(128, dtype=np.float32)

    def run(seed: int) -> bool:
        with emulator.Memory(seed) as memory:
            given, y = memory.constant("x", x), memory.empty("y", 1, np.float32)
            flag = memory.empty("flag", 1, np.int32)
            flag.array[0] = 0
            params = struct.pack("<3Q", given.pointer, y.pointer, flag.pointer)
            kernel = miniature("meetings", *macros)
            emulator.run(kernel, 1, 128, 528, params, seed=seed, check_races=check_races)
            return y.array[0] == x.sum()

    return run


def test_right_meetings_pass():
    assert set(outcomes(run_meetings(), range(64))) == {"right"}


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("NO_SYNCWARP", {"race"}),
        ("NO_BARRIER", {"race"}),
        ("LANE_LEAVES", {"divergence"}),
        ("DIVERGENT_SHUFFLE", {"divergence"}),
        ("INDEX_PAST_ARRAY", {"out of bounds"}),
        ("BARRIER_IN_HALF_A_WARP", {"divergence", "deadlock"}),
        ("SKIPPED_BARRIER", {"deadlock"}),
        ("WRONG_COUNT", {"barrier misuse"}),
        ("TOO_MANY", {"barrier misuse"}),
        ("FLAG_NEVER_SET", {"deadlock"}),
    ],
)
def test_bad_meetings(bug, kinds):
    assert set(outcomes(run_meetings(bug))) <= kinds


def test_an_arrival_too_many():  # which opens the barrier early, unless it comes so late that it counts for the next
    assert "barrier misuse" in outcomes(run_meetings("ARRIVES_TWICE"))


def test_a_missing_syncwarp_gives_wrong_results():
    timed = outcomes(run_meetings("NO_SYNCWARP", check_races=False), range(64))
    assert timed.count("wrong") >= len(timed) * 3 / 4, timed


def test_a_deadlock_tells_who_waits_on_what():
    with pytest.raises(emulator.EmulatorError) as caught:
        run_meetings("SKIPPED_BARRIER")(0)
    assert re.search(
        r"block 0 warp  0 lanes 0-31: wait at barrier 1 for 128 threads, of which 96 came \(warps [ 013]+\) at "
        r"meetings.cu:\d+",
        str(caught.value),
    )


# ---- products and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_mma(dtype, transposed):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(np.float32).astype(numpy_dtype(dtype)) for _ in range(2))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected = wide_a.T @ wide_b if transposed else wide_a @ wide_b.T
    kernel = miniature("product", *["TRANSPOSED"] * transposed, element=ELEMENTS[dtype])
    for seed in SEEDS:
        with emulator.Memory(seed) as memory:
            given = memory.constant("a", a), memory.constant("b", b)
            c = memory.empty("c", (16, 16), np.float32)
            params = struct.pack("<3Q", *(buffer.pointer for buffer in (*given, c)))
            emulator.run(kernel, 1, 32, 1024, params, seed=seed)
            np.testing.assert_allclose(c.array, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_conversions_round_as_numpy(dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), (rng.standard_normal(2048) * 1e-5).astype(np.float32)])
    x = np.concatenate([x, np.array([0, -0.0, np.inf, -np.inf, 65519.996, 65520, 2**-24, 2**-25, 2**-14], np.float32)])
    x = np.resize(x, -(-x.size // 32) * 32)
    kernel = miniature("conversions", element=ELEMENTS[dtype])
    with emulator.Memory() as memory, np.errstate(all="ignore"):
        given, back = memory.constant("x", x), memory.empty_like("back", x)
        half = memory.empty("half", x.size, np.uint16)
        params = struct.pack("<3Q", given.pointer, half.pointer, back.pointer)
        emulator.run(kernel, x.size // 32, 32, 0, params)
        expected = x.astype(numpy_dtype(dtype))
        same = (half.array == expected.view(np.uint16)) | np.isnan(x)
        assert same.all(), x[~same]
        np.testing.assert_array_equal(back.array, expected.astype(np.float32))


# ---- Hopper ----------------------------------------------------------------------------------------------------------


def run_pipeline(*macros: str, in_registers: bool = False, dtype: str = "bfloat16", check_races: bool = True):
    slices = 5
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32).astype(numpy_dtype(dtype)) for s in ((64, 300), (300, 64)))
    expected = a.astype(np.float64) @ b.astype(np.float64)  # the last slice reaches past a and b: zeros
    constants = f"constexpr bool A_IN_REGISTERS = {str(in_registers).lower()};"
    kernel = miniature("pipeline", *macros, element=ELEMENTS[dtype], constants=constants)

    def tensor_map(buffer: emulator.Buffer) -> bytes:
        rows, columns = buffer.array.shape
        strides = (2, buffer.array.strides[0], 1 << 20, 1 << 20)
        return emulator.tensor_map(buffer.pointer, strides, (columns, rows, 1, 1), (64, 64, 1, 1), 2, 128)

    def run(seed: int) -> bool:
        with emulator.Memory(seed) as memory:
            wide = np.empty((64, 304), a.dtype)[:, :300]  # strides in multiples of 16 bytes
            wide[...] = a
            given = memory.constant("a", wide), memory.constant("b", b)
            c = memory.empty("c", (64, 64), a.dtype)
            params = b"".join(map(tensor_map, (*given, c))) + struct.pack("<i", slices)
            emulator.run(kernel, 1, 256, 41984, params, seed=seed, check_races=check_races)
            return np.allclose(c.array.astype(np.float64), expected, rtol=1e-2, atol=1e-1)

    return run


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_right_pipelines_pass(in_registers, dtype):
    assert set(outcomes(run_pipeline(in_registers=in_registers, dtype=dtype))) == {"right"}


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("NO_FULL_WAIT", {"race", "deadlock"}),
        ("NO_EMPTY_WAIT", {"race", "barrier misuse"}),
        ("RELEASES_EARLY", {"race"}),
        ("EXPECTS_TOO_MUCH", {"deadlock"}),
        ("EXPECTS_TOO_LITTLE", {"barrier misuse"}),
        ("ALL_RELEASE", {"barrier misuse", "race", "deadlock"}),
        ("NO_INIT_FENCE", {"missing proxy fence"}),
        ("NO_INIT_BARRIER", {"race", "barrier misuse"}),
        ("NO_WGMMA_FENCE", {"wgmma misuse"}),
        ("NO_WGMMA_WAIT", {"race", "wgmma misuse", "deadlock"}),
        ("WEAK_WGMMA_WAIT", {"race", "wgmma misuse", "deadlock"}),
        ("CHANGES_C", {"wgmma misuse"}),
        ("NO_PROXY_FENCE", {"missing proxy fence"}),
        ("FENCE_AFTER_BARRIER", {"missing proxy fence"}),
        ("NO_STORE_BARRIER", {"race", "missing proxy fence"}),
        ("OVERWRITES_STORE", {"race"}),
        ("NO_STORE_WAIT", {"misuse"}),
    ],
)
def test_bad_pipelines(bug, kinds):
    assert set(outcomes(run_pipeline(bug))) <= kinds


def test_a_changed_register_operand():
    late = [seed for seed in SEEDS if seed % 8 in (0, 3, 5)]
    assert set(outcomes(run_pipeline("CHANGES_A", in_registers=True), late)) == {"wgmma misuse"}


def test_a_stage_released_before_all_have_read_it():
    assert set(outcomes(run_pipeline("RELEASES_UNREAD", in_registers=True))) == {"race"}


@pytest.mark.parametrize("bug", ["NO_FULL_WAIT", "NO_EMPTY_WAIT", "RELEASES_EARLY"])
def test_unordered_pipelines_give_wrong_results(bug):
    timed = outcomes(run_pipeline(bug, check_races=False), range(32))
    assert timed.count("right") <= len(timed) / 2, timed


# ---- the headers -----------------------------------------------------------------------------------------------------


def signatures(text: str, own: bool) -> dict[str, list[str]]:
    """The parameter types of every function of a header, by name."""
    text = re.sub(r"//[^\n]*", "", text)
    head = r"inline" if own else r"__device__\s+__forceinline__"
    function = rf"{head}\s+(?:[\w:]+\s+)+?(\w+)(?:<\w+>)?\(((?:[^()]|\([^()]*\))*)\)\s*[;{{]"
    found: dict[str, list[str]] = {}
    for name, parameters in re.findall(function, text):
        plain = re.sub(r",?\s*EMU_SITE", "", parameters)
        found.setdefault(name, []).append(re.sub(r"\s+", " ", plain).strip())
    return found


@pytest.mark.parametrize("header", ["ptx.cuh", "ptx_sm90.cuh"])
def test_headers_have_the_functions_of_the_gpus(header):
    real = signatures(source.read(header), own=False)
    own = signatures((Path(emulator.__file__).parent / "device" / header).read_text(encoding="utf-8"), own=True)

    def types(parameters: str) -> str:  # without the parameters' names
        return re.sub(r"(?<=[\s&*])\w+(?=\)|,|$|\[)", "", parameters).replace(" ", "")

    for name, overloads in real.items():
        assert name in own, f"the emulator's {header} lacks {name}"
        assert set(map(types, overloads)) == set(map(types, own[name])), name
