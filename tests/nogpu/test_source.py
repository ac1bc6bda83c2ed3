"""The generated program text: the same for the same kernel, another for anything that the kernel is built from."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from problems import devices, example, problems

from pyflash import features, params, source
from pyflash.device import KNOWN
from pyflash.errors import Unsupported
from pyflash.plan import Launch, plan
from pyflash.tiles import KERNELS

LINE = re.compile(
    r"inline constexpr (int \w+ = -?\d+|bool \w+ = (true|false));"
    r"|using (Element|Bias|Output) = (bf16|fp16|float|double);"
    r"|using (CuSeqlens|SeqUsed)[QK] = (int|long long);"
    r"|using (Row)?Fact = (int|i64|float);"
)

# What every kernel file, and every header, may rely on.
ALWAYS = {"Element", "TILE_M", "TILE_N", "TILE_D", "TILE_DV", "RAGGED_D", "NUM_THREADS", "MIN_CTAS", "STAGES",
          "SMEM_BYTES"}  # fmt: skip


def texts(problem, device) -> dict[str, str]:
    return {launch.kernel: source.program(launch) for launch in plan(problem, device).launches}


def constants_of(text: str) -> list[str]:
    return text.partition("namespace cfg {\n")[2].partition("\n}\n")[0].splitlines()


@settings(max_examples=200)
@given(problems(), devices)
def test_the_shape_of_a_program(problem, device):
    try:
        launches = plan(problem, device).launches
    except Unsupported:
        return
    for launch in launches:
        text = source.program(launch)
        assert text.startswith('#include "dtypes.cuh"\n')
        assert text.endswith(f'#include "{launch.kernel}.cu"\n')
        assert params.c_struct(launch.kernel, launch.real) in text
        lines = constants_of(text)
        assert all(LINE.fullmatch(line) for line in lines), lines
        names = [re.search(r"(\w+) =", line)[1] for line in lines]
        assert len(set(names)) == len(names) == len(launch.config)
        assert set(names) >= ALWAYS
        assert (set(names) >= {"SCALE_FIRST", *features.flags({})}) == params.computes_scores(launch.kernel)
        assert {f"WIDE_{name.upper()}" for name in params.strided_tensors(launch.kernel)} <= set(names)
        assert f"using Element = {problem.dtype.element};" in lines


@settings(max_examples=50)
@given(problems(), devices)
def test_same_launch_same_text(problem, device):
    try:
        first, second = (plan(problem, device).launches for _ in range(2))
    except Unsupported:
        return
    assert [source.program(x) for x in first] == [source.program(x) for x in second]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_are_arguments_and_never_compiled_in(dtype, backward):
    """So a new length, batch or number of heads never compiles anything."""
    base = texts(example(backward=backward, dtype=dtype), KNOWN["A100"])
    for change in ({"batch": 7}, {"seqlen_q": 333, "seqlen_k": 5000}, {"heads": 12, "heads_kv": 3},
                   {"softmax_scale": 0.7}):  # fmt: skip
        assert texts(example(backward=backward, dtype=dtype, **change), KNOWN["A100"]) == base, change


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"causal": True}, {"head_dim": 64}, {"head_dim_v": 64}, {"head_dim": 120},
     {"narrow": ("q",)}, {"narrow": ("k",)}, {"narrow": ("v",)}, {"softmax_scale": 0.0}, {"softmax_scale": -1.0}],
    ids=str,
)  # fmt: skip
def test_what_a_kernel_is_built_for_is_in_its_text(change, backward):
    base, other = (texts(example(backward=backward, **c), KNOWN["A100"]) for c in ({}, change))
    assert base.keys() == other.keys()
    main = "bwd_sm80" if backward else "fwd_sm80"
    assert base[main] != other[main]


def test_each_tensor_has_its_own_width():
    """One misaligned array never slows, or speeds, the access to another."""
    names = params.strided_tensors("fwd_sm80")
    for name in ("q", "k", "v"):
        (launch,) = plan(example(narrow=(name,)), KNOWN["A100"]).launches
        wide = {n: dict(launch.config)[f"WIDE_{n.upper()}"] for n in names}
        assert wide == {n: n != name for n in names}


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_includes_are_closed(kernel):
    """Every file is in the folder, includes by name, comes once, and after what it includes is known."""
    launch = Launch(kernel, "float", (), 1, 32, 0, (), ())
    found = source.headers(source.program(launch))
    assert found[f"{kernel}.cu"] == (source.kernels_folder() / f"{kernel}.cu").read_text(encoding="utf-8")
    for name, text in found.items():
        included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
        assert set(included) <= found.keys(), name
        assert name not in source.includes(name)[1:], f"{name} includes itself"
    assert not {n for n in found if n.endswith(".cu")} - {f"{kernel}.cu"}


def test_the_sources_are_found_from_a_checkout_and_when_installed():
    folder = source.kernels_folder()
    assert {f"{name}.cu" for name in KERNELS} <= {path.name for path in folder.iterdir()}
