"""The explanation's figures, counted another way."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import devices, example, problems

import pyflash
from pyflash import device, features
from pyflash.device import KNOWN
from pyflash.errors import Unsupported
from pyflash.explain import amount, duration, explain, tile_row, tiles, waves
from pyflash.tiles import KERNELS


@given(problems(), st.one_of(devices, st.none()))
def test_any_plan_can_be_explained(problem, gpu):
    try:
        x = explain(problem, gpu)
    except Unsupported:
        return
    text = str(x)
    assert str(problem) in text and all(line == line.rstrip() for line in text.splitlines())
    assert "nan" not in text and "inf" not in text
    if gpu is None:
        assert "NumPy" in text and x.plan is None and x.roofline_seconds is None
        return
    assert gpu.name in text and x.plan.family in text
    for launch in x.plan.launches:
        assert tile_row(launch) in KERNELS[launch.kernel].rows
        assert launch.kernel in text and tile_row(launch).why in text and f"{launch.grid} of" in text
        assert waves(launch, gpu) > 0
    for note in x.plan.notes:
        assert note in text


def test_split_keys_are_explained():
    text = str(explain(example(batch=1, seqlen_q=1, seqlen_k=65536, heads=32, heads_kv=8), KNOWN["H200"]))
    assert "keys are split in" in text and "rows of 4 query heads" in text and "combine: " in text


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_visible_pairs(seqlen_q, seqlen_k, causal):
    problem = example(seqlen_q=max(seqlen_q, 1), seqlen_k=max(seqlen_k, 1), batch=2, heads=3, causal=causal)
    pairs = itertools.product(range(problem.seqlen_q), range(problem.seqlen_k))
    count = sum(not causal or j <= i + problem.seqlen_k - problem.seqlen_q for i, j in pairs)
    assert explain(problem, None).visible_pairs == count * 2 * 3


@pytest.mark.parametrize("backward", [False, True])
def test_packed_sequences(backward):
    """The sum of what the sequences are on their own."""
    q, k = np.zeros((10, 4, 64), np.float16), np.zeros((14, 2, 64), np.float16)
    options = {"causal": True, "backward": backward, "gpu": "H200"}
    x = pyflash.explain(q, k, k, cu_seqlens_q=[0, 3, 3, 10], cu_seqlens_k=np.array([0, 5, 9, 14]), **options)
    parts = [pyflash.explain(q[None, :m], k[None, :n], k[None, :n], **options) for m, n in ((3, 5), (0, 4), (7, 5))]
    for name in ("visible_pairs", "flops", "score_bytes"):
        assert getattr(x, name) == sum(getattr(part, name) for part in parts)
    assert x.problem.packed and x.problem.seqlen_q == 7 and "(10, 4, 64)" in str(x) and "cu_seqlens_k" in str(x)
    used = pyflash.explain(q[None], k[None], k[None], seqused_q=[7], seqused_k=[5], **options)
    assert used.visible_pairs == parts[2].visible_pairs


def test_packed_sequences_are_checked():
    q = np.zeros((10, 4, 64), np.float16)
    with pytest.raises(ValueError, match="^cu_seqlens_q: got 9 as the last offset, takes 10"):
        pyflash.explain(q, q, q, cu_seqlens_q=[0, 9])
    with pytest.raises(TypeError, match="^cu_seqlens_q: got None, takes an array or a list"):
        pyflash.explain(q, q, q, cu_seqlens_k=[0, 10])
    with pytest.raises(ValueError, match="^seed: got -1"):
        pyflash.explain(q[None], q[None], q[None], seed=-1)


@pytest.mark.parametrize("backward", [False, True])
def test_tiles_that_ctas_draw_are_counted(backward):
    x = explain(example(batch=2, seqlen_q=4096, heads=4, backward=backward), KNOWN["H200"])
    (main,) = (launch for launch in x.plan.launches if launch.kernel in ("fwd_sm90", "bwd_sm90"))
    side = "TILE_N" if backward else "TILE_M"
    assert tiles(main) == 8 * -(-4096 // dict(main.config)[side]) > main.grid
    assert f"{tiles(main)} tiles" in str(x)


def test_flops_and_bytes():
    forward = explain(example(batch=1, seqlen_q=100, heads=2, head_dim=64, head_dim_v=32), None)
    assert forward.flops == 2 * 100 * 100 * 2 * (64 + 32)
    assert forward.least_bytes == 100 * 2 * 2 * (64 + 64 + 32 + 32) + 100 * 2 * 4
    assert forward.score_bytes == 2 * 100 * 100 * 2
    backward = explain(example(backward=True, batch=1, seqlen_q=100, heads=2, head_dim=64), None)
    assert backward.flops == 2.5 * explain(example(batch=1, seqlen_q=100, heads=2, head_dim=64), None).flops
    assert backward.least_bytes == 100 * 2 * 2 * 64 * 8 + 100 * 2 * 4


def test_what_ordinary_attention_costs():
    forward = explain(example(batch=1, seqlen_q=100, seqlen_k=300, heads=2, head_dim=64), KNOWN["A100"])
    assert forward.score_bytes == 2 * 100 * 300 * 2
    assert forward.ordinary_bytes == forward.least_bytes + 4 * forward.score_bytes
    assert forward.ordinary_held_bytes == forward.least_bytes + 2 * forward.score_bytes
    backward = explain(example(backward=True, batch=1, seqlen_q=100, seqlen_k=300, heads=2, head_dim=64), KNOWN["A100"])
    assert backward.ordinary_bytes == backward.least_bytes + 7 * backward.score_bytes
    assert backward.ordinary_held_bytes == backward.least_bytes + 3 * backward.score_bytes
    for x in (forward, backward):
        assert x.held_bytes == x.least_bytes + x.plan.workspace_bytes
        assert x.ordinary_intensity < x.intensity and x.ordinary_seconds >= x.roofline_seconds


@given(problems(), devices)
def test_the_longest_sequence_is_the_longest(problem, gpu):
    """With so many the call fits; with a little more it does not."""
    try:
        x = explain(problem, gpu)
    except Unsupported:
        return
    if x.longest_seqlen is None or problem.seqlen_q != problem.seqlen_k or not x.plan.launches:
        return
    matrices = 3 if problem.backward else 2
    for longest, linear, square in ((x.longest_seqlen, x.held_bytes, 0),
                                    (x.ordinary_longest_seqlen, x.least_bytes, matrices * x.score_bytes)):  # fmt: skip
        for length, fits in ((longest, True), (1.001 * longest + 1, False)):
            times = length / problem.seqlen_q
            assert (linear * times + square * times**2 <= gpu.memory_bytes * (1 + 1e-9)) == fits


def test_tiles_load_again_what_the_least_counts_once():
    x = explain(example(batch=1, seqlen_q=4096, heads=4), KNOWN["H200"])
    (launch,) = x.plan.launches
    assert x.tile_bytes == x.visible_pairs // dict(launch.config)["TILE_M"] * 2 * 128 * 2
    assert explain(example(seqlen_q=4096), None).tile_bytes is None


def test_the_expected_time_is_one_that_was_measured():
    """16 heads of 128, 16384 tokens: 757 TFLOP/s forward and 586 backward, full, on an H200."""
    for backward, flops in ((False, 757e12), (True, 586e12)):
        x = explain(example(backward=backward, batch=1, seqlen_q=16384, heads=16), KNOWN["H200"])
        assert x.expected_seconds == pytest.approx(x.flops / flops, rel=0.1)
        assert x.expected_is_measured and "by what was measured on such a GPU: products at" in str(x)
        present = dataclasses.replace(KNOWN["H200"], name="NVIDIA H200", memory_bytes=150_000_000_000)
        assert explain(x.problem, present).expected_is_measured


# TFLOP/s on an H200 by head_dim, causal, backward: 16384 tokens in sequences of 1024 and 8192, 2048 columns.
MEASURED = {
    (64, False, False): (524, 539), (64, True, False): (405, 547), (64, False, True): (431, 518),
    (128, False, False): (645, 762), (128, True, False): (474, 715), (128, True, True): (346, 528),
    (256, False, False): (703, 751), (256, True, False): (510, 724), (256, False, True): (373, 474),
}  # fmt: skip


@pytest.mark.parametrize(("key", "measured"), MEASURED.items(), ids=str)
def test_short_and_causal_sequences_are_expected_to_take_what_they_took(key, measured):
    head_dim, causal, backward = key
    for seqlen, flops in zip((1024, 8192), measured, strict=True):
        shape = {"batch": 16384 // seqlen, "seqlen_q": seqlen, "heads": 2048 // head_dim, "head_dim": head_dim}
        x = explain(example(**shape, causal=causal, backward=backward), KNOWN["H200"])
        assert x.flops / x.expected_seconds == pytest.approx(flops * 1e12, rel=0.12)


def test_what_was_not_measured_is_an_estimate():
    H200, A100, B200 = (KNOWN[name] for name in ("H200", "A100", "B200"))
    for problem, gpu in (
        (example(), KNOWN["H100"]),
        (example(head_dim=80), H200),
        (example(dtype="float32"), H200),
        (example(softcap=3.0), H200),
        (example(), A100),
    ):
        x = explain(problem, gpu)
        assert not x.expected_is_measured and "an estimate from what was measured on an H200" in str(x)
    long = example(batch=1, seqlen_q=16384, heads=16)
    on = {gpu: explain(long, KNOWN[gpu], ("sm80", "simt")) for gpu in ("A100", "H200", "B200", "L4")}
    reached = {gpu: x.reached_flops for gpu, x in on.items()}
    assert reached["H200"] == pytest.approx(356e12, rel=0.02), "as measured there, with Ampere's instructions"
    assert reached["A100"] / A100.half_flops == pytest.approx(2 * reached["H200"] / H200.half_flops)
    assert reached["B200"] / B200.sm_count == pytest.approx(reached["H200"] / H200.sm_count)
    seconds = {gpu: x.expected_seconds for gpu, x in on.items()}
    assert seconds["B200"] < seconds["H200"] < seconds["A100"] < seconds["L4"]
    small, large = (explain(example(head_dim=n, batch=1, seqlen_q=8192), H200) for n in (16, 64))
    assert small.expected_seconds == pytest.approx(large.expected_seconds, rel=0.05), "scores take the time"


@given(problems(), devices)
def test_the_expected_time_is_one_that_can_be(problem, gpu):
    """Not below the hardware's, nor that of launches; explained by what takes it; options are said to be missing."""
    try:
        x = explain(problem, gpu)
    except Unsupported:
        return
    if x.expected_seconds is None:
        assert ("unknown: the FLOP/s" in str(x)) == bool(x.flops and x.least_bytes)
        return
    assert x.expected_seconds >= max(x.roofline_seconds, 2e-6 * len(x.plan.launches))
    (line,) = (line for line in str(x).splitlines() if line.startswith("expected"))
    assert ("products" in line) == (x.expected_seconds > max(x.memory_seconds, 3e-6 * len(x.plan.launches)))
    for name in problem.on.keys() & (features.DEFAULTS.keys() - {"causal"}):
        assert name in line.partition("without the cost of")[2]


def test_a_peak_that_the_kernels_cannot_reach_is_noted():
    for gpu, noted in (("B200", True), ("A100", False), ("RTX 4090", False), ("RTX 5090", False), ("H200", False)):
        assert ("uses Ampere's instructions" in str(explain(example(), KNOWN[gpu]))) == noted


@pytest.mark.parametrize("backward", [False, True])
def test_the_blocks_of_a_mask_are_counted(backward):
    q, k = np.zeros((2, 300, 4, 64), np.float32), np.zeros((2, 200, 4, 64), np.float32)
    mod = pyflash.masks.documents(np.repeat(np.arange(2), 150)[None].repeat(2, 0))
    masked = pyflash.block_mask(lambda b, h, i, j: mod(b, h, i, pyflash.minimum(j, 199)), 2, 1, 300, 200)
    x = pyflash.explain(q, k, k, block_mask=masked, backward=backward, gpu="H200")
    edges = [(m, n, min(m + 128, 300), min(n + 128, 200)) for m in (0, 128, 256) for n in (0, 128)]
    kinds = masked.kinds.reshape(2, -1)
    pairs = sum(
        (bottom - m) * (right - n)
        for kind in kinds
        for (m, n, bottom, right), one in zip(edges, kind, strict=True)
        if one
    )
    assert x.visible_pairs == 4 * pairs < 2 * 4 * 300 * 200 and x.uncounted == ["mask_mod"]
    assert "of the scores that are visible; not counted: mask_mod" in str(x)
    hidden = pyflash.explain(q, k, k, mask=np.zeros((300, 200), bool), softcap=3.0, gpu="H200")
    assert hidden.uncounted == ["softcap", "mask"] and "not counted: softcap, mask" in str(hidden)


@pytest.mark.parametrize("name", ["backward", "deterministic"])
def test_flags_are_checked(name):
    q = np.zeros((1, 8, 1, 8), np.float32)
    with pytest.raises(TypeError, match=f"^{name}: got 'yes', takes True or False"):
        pyflash.explain(q, q, q, **{name: "yes"})


def test_empty_calls_and_units():
    empty = str(explain(example(seqlen_q=0, seqlen_k=0), KNOWN["H200"]))
    assert "nothing to compute" in empty and "bound by" not in empty and "expected" not in empty
    assert "in 151 GB (141 GiB) fit" in str(explain(example(), KNOWN["H200"]))


@given(problems(), st.one_of(devices, st.none()))
def test_facts_for_programs(problem, gpu):
    try:
        facts = explain(problem, gpu).facts()
    except Unsupported:
        return
    read = json.loads(json.dumps(facts, default=dataclasses.asdict))
    assert read["flops"] == facts["flops"] and (read["plan"] is None) == (gpu is None)


@pytest.mark.parametrize("gpu", ["H200", "T4"])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1, 65536)])
def test_a_plot(tmp_path, gpu, lengths):
    pytest.importorskip("matplotlib")
    from pyflash import plots

    dtype = "float32" if gpu == "T4" else "bfloat16"
    x = explain(example(dtype=dtype, seqlen_q=lengths[0], seqlen_k=lengths[1]), KNOWN[gpu])
    plots.explanation(x, tmp_path / "x.png")
    unlisted = dataclasses.replace(KNOWN[gpu], half_flops=0.0, single_flops=0.0)
    plots.explanation(dataclasses.replace(x, device=unlisted), tmp_path / "y.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(Unsupported, match="bandwidth"):
        plots.explanation(explain(example(), None), tmp_path / "x.png")


def test_roofline():
    gpu = KNOWN["H200"]
    long, short = (explain(example(seqlen_q=n, seqlen_k=8192, batch=1), gpu) for n in (8192, 1))
    assert long.roofline_seconds == long.flops / gpu.half_flops > long.memory_seconds
    assert short.roofline_seconds == short.least_bytes / gpu.bandwidth > short.compute_seconds
    assert "bound by arithmetic" in str(long) and "bound by memory" in str(short)


@pytest.mark.parametrize("gpu", KNOWN)
def test_every_type_has_a_ceiling(gpu):
    """float32 and float64 that of the plain units, which no tensor core raises."""
    peaks = {dtype: explain(example(dtype=dtype), KNOWN[gpu]).peak_flops for dtype in ("float32", "float64")}
    assert KNOWN[gpu].half_flops > peaks["float32"] >= 1.9 * peaks["float64"] > 0
    unlisted = dataclasses.replace(KNOWN[gpu], half_flops=0.0, single_flops=0.0, double_flops=0.0)
    x = explain(example(dtype="float32"), unlisted)
    assert x.compute_seconds is None and "float32 FLOP/s of this GPU are not in the table" in str(x)


@pytest.mark.parametrize(
    "driver_name, sm_count, name",
    [
        ("NVIDIA H200", 132, "H200"),
        ("NVIDIA A100-SXM4-80GB", 108, "A100"),
        ("Tesla T4", 40, "T4"),
        ("NVIDIA L4", 58, "L4"),
        ("NVIDIA GeForce RTX 4090", 128, "RTX 4090"),
        ("NVIDIA L40S", 142, None),
        ("NVIDIA H100 PCIe", 114, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
    ],
)
def test_data_sheet_figures_are_those_of_the_gpu_itself(driver_name, sm_count, name):
    listed = device._listed(driver_name, sm_count)
    assert (listed.name if listed else None) == name


def test_public_function():
    np = pytest.importorskip("numpy")
    q = np.zeros((2, 64, 4, 32), np.float32)
    assert callable(pyflash.explain), "the function, not the module of the same name"
    assert "NumPy" in str(pyflash.explain(q, q, q, causal=True))
    with pytest.raises(ValueError, match="^k: got shape"):
        pyflash.explain(q, q[:1], q)


def test_numbers_are_written_for_people():
    assert [amount(x, "B") for x in (0, 12, 1536, 134217728, 2e12)] == ["0 B", "12 B", "1.54 kB", "134 MB", "2 TB"]
    assert [duration(x) for x in (2.5, 0.0125, 4.4e-5, 1e-9)] == ["2.5 s", "12.5 ms", "44 us", "0.001 us"]
