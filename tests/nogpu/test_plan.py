"""The planner: whatever valid call it is given, what it decides can be launched, and is right."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ADDED, BLOCKS, FUNCTIONS, device_of, devices, example, packed, problems

from pyflash import features, params, source, sums
from pyflash import softcap as softcap_series
from pyflash.device import KNOWN, Device
from pyflash.errors import Unsupported
from pyflash.explain import tile_row, tiles
from pyflash.feature import LOG2_E
from pyflash.launch import SEED, TILE_COUNTER
from pyflash.plan import Launch, Plan, plan
from pyflash.problem import MAX_HEAD_DIM, Problem
from pyflash.tiles import FAMILIES, KERNELS

HALF = ("float16", "bfloat16")
KERNEL_NAMES = sorted(KERNELS)


def planned(problem: Problem, device: Device, **options: object) -> Plan | None:
    """The plan; None where the refusal is one of those that the README states."""
    try:
        return plan(problem, device, **options)
    except Unsupported as error:
        grid = "a grid holds" in str(error) or "it counts to" in str(error)
        assert grid or (problem.dtype.name in HALF and device.capability < (8, 0)), error
        return None


def constants(launch: Launch) -> dict[str, object]:
    return dict(launch.config)


def nbytes(problem: Problem, *names: str) -> int:
    tensors = dict(problem.tensors)
    return sum(math.prod(tensors[name].shape) for name in names) * problem.dtype.itemsize


@settings(max_examples=400)
@given(problems(), devices)
def test_every_valid_problem_has_a_plan_that_can_be_launched(problem, device):
    made = planned(problem, device)
    if made is None:
        return
    assert made.family in FAMILIES
    for launch in made.launches:
        assert 1 <= launch.grid < 2**31, "the grid is one-dimensional: y and z end at 65535"
        assert launch.block % 32 == 0 and 32 <= launch.block <= 1024
        assert 0 <= launch.smem_bytes <= device.smem_bytes
        cfg = constants(launch)
        assert cfg["SMEM_BYTES"] == launch.smem_bytes and cfg["NUM_THREADS"] == launch.block
        assert cfg["TILE_D"] >= problem.head_dim and cfg["TILE_DV"] >= problem.head_dim_v
        assert cfg["RAGGED_D"] == ((cfg["TILE_D"], cfg["TILE_DV"]) != (problem.head_dim, problem.head_dim_v))
        flags = {"SCALE_FIRST": problem.softmax_scale <= 0 or features.changes_scores(problem.on)}
        flags |= features.flags(problem.on)
        if not params.computes_scores(launch.kernel):
            assert not flags.keys() & cfg.keys(), "compiled once for all features"
        else:
            assert flags.items() <= cfg.items()
            assert all(launch.kernel in features.BY_NAME[name].kernels for name in problem.on)


# Arguments that turn each feature on, as `example` takes them.
ON = {"causal": True, "window": (9, 9), "softcap": 20.0, "alibi_slopes": (4,), "bias": (1, 4, 1, 1),
      "mask": (2, 1, 1, 1), "sinks": (4,), "dropout_p": 0.5, **FUNCTIONS, "block_mask": BLOCKS}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda feature: feature.name)
def test_a_family_takes_a_feature_iff_the_table_says_so(feature, family, backward):
    kernel = f"{'bwd' if backward else 'fwd'}_{family}"
    problem = example(dtype=KERNELS[kernel].dtypes[0], backward=backward, **{feature.name: ON[feature.name]})
    if kernel in feature.kernels:
        plan(problem, KNOWN["H200"], families=(family,))
    else:
        with pytest.raises(Unsupported, match=f"{family}: does not take {feature.name}"):
            plan(problem, KNOWN["H200"], families=(family,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda feature: feature.name)
def test_a_family_takes_a_feature_in_every_kind_of_call(feature, family):
    """Where lengths differ, in a fixed order, and with the gradient that it has."""
    dtype = KERNELS[f"bwd_{family}"].dtypes[0]
    option = {**ON, **ADDED, "mask": (1, 4, 1, 1)}[feature.name]
    for backward, used in itertools.product((False, True), repeat=2):
        call = {"backward": backward, "used": used, "deterministic": backward, feature.name: option}
        plan(packed(dtype=dtype, **call), KNOWN["H200"], families=(family,))
    call = {"backward": True, "dtype": dtype, feature.name: option}
    plan(example(deterministic=True, **call), KNOWN["H200"], families=(family,))
    if feature.has_gradient:
        plan(example(gradients=(feature.name,), **call), KNOWN["H200"], families=(family,))


# Calls that a family refuses: gradients wanted, more arguments, families, and the reason.
REFUSED = {
    "dbias of softcap and a function": (
        ("bias",), {"bias": (1, 4, 1, 1), "softcap": 9.0, **ADDED}, ("sm90",), "does not take softcap and score_mod",
    ),
    "dscore_mod of softcap": (("score_mod",), {"softcap": 9.0, **ADDED}, ("sm90",), "does not take softcap"),
    "dscore_mod of what does not only add": (
        ("score_mod",), {"score_mod": FUNCTIONS["score_mod"]}, ("sm90",), "where score_mod adds to the score",
    ),
    "a fixed order of dbias": (("bias",), {"bias": (1, 4, 1, 1), "deterministic": True}, FAMILIES, "takes False"),
    "a fixed order of dscore_mod": (("score_mod",), {**ADDED, "deterministic": True}, FAMILIES, "takes False"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_readme_says_that_a_family_refuses(name, family):
    gradients, call, families, reason = REFUSED[name]
    problem = example(dtype=KERNELS[f"bwd_{family}"].dtypes[0], backward=True, gradients=gradients, **call)
    if family not in families:
        plan(problem, KNOWN["H200"], families=(family,))
    else:
        with pytest.raises(Unsupported, match=reason):
            plan(problem, KNOWN["H200"], families=(family,))


@pytest.mark.parametrize("used", [False, True])
def test_heads_share_tiles_where_sequences_have_few_queries(used):
    for tokens, batch, heads_kv, packed_heads in ((64, 64, 8, 4), (64, 64, 32, 1), (64000, 64, 8, 1), (5, 0, 8, 1)):
        problem = packed(tokens=tokens, batch=batch, heads=32, heads_kv=heads_kv, used=used)
        (launch,) = plan(problem, KNOWN["H200"], families=("sm90",)).launches
        assert constants(launch)["PACK"] == packed_heads
        queries = constants(launch)["TILE_M"] // packed_heads
        assert dict(launch.values)["num_tiles"] >= -(-tokens // queries) * 32 // packed_heads * (batch > 0)


@pytest.mark.parametrize("used", [False, True])
def test_keys_are_split_where_sequences_are_few(used):
    """And the results of the parts fit their workspace."""
    problem = packed(tokens=8192, batch=2, heads=2, head_dim=64, used=used)
    shapes = {"q": (1, 8, 2, 64), "o": (1, 8, 2, 64), "lse": (1, 2, 8)}
    tensors = ((name, x._replace(shape=shapes.get(name, x.shape))) for name, x in problem.tensors)
    few = replace(problem, tensors=tuple(tensors), seqlen_q=8)
    made = plan(few, KNOWN["H200"], families=("sm90",))
    main, merging = made.launches
    splits = dict(main.values)["num_splits"]
    assert constants(main)["SPLIT"] and merging.kernel == "combine" and splits == dict(merging.values)["num_splits"] > 1
    assert dict(main.values)["num_tiles"] % splits == 0
    pieces = {buffer.name: buffer.nbytes for buffer in made.workspace}
    assert pieces == {"o_partial": splits * 8 * 2 * 64 * 4, "lse_partial": splits * 8 * 2 * 4}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_numbers_of_tokens_and_sequences_compile_nothing(family, told):
    """But how a kernel's tiles are cut, of which the usual length decides."""
    dtype, programs = KERNELS[f"bwd_{family}"].dtypes[0], {}
    for tokens, batch, backward in itertools.product((1, 999, 4096, 70001), (1, 7, 64), (False, True)):
        call = {"tokens": tokens, "batch": batch, "max_seqlen": min(tokens, 4001) if told else None}
        made = plan(packed(dtype=dtype, backward=backward, causal=True, **call), KNOWN["H200"], families=(family,))
        for launch in made.launches:
            cut = tuple(constants(launch).get(name) for name in ("PHASE_DQ", "PACK", "SPLIT"))
            programs.setdefault((launch.kernel, tile_row(launch), cut), set()).add(source.program(launch))
    assert all(len(texts) == 1 for texts in programs.values())


def test_the_support_matrix_is_in_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert features.support_matrix() in readme


@given(problems(), devices)
def test_the_grid_covers_every_row_and_every_key(problem, device):
    made = planned(problem, device)
    if made is None:
        return
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    keys = problem.batch * problem.num_heads_kv * problem.seqlen_k
    work = sum(tiles(x) * max(constants(x)["TILE_M"], constants(x)["TILE_N"]) for x in made.launches)
    if problem.backward and keys or not problem.backward and rows:
        assert work >= (keys if problem.backward else rows)
    assert all(launch.grid <= tiles(launch) for launch in made.launches), "no CTA is without a tile"
    if not rows and not keys:
        assert made.launches == ()


@given(problems(), devices)
def test_every_argument_of_every_kernel_is_given(problem, device):
    """Pointers come from arrays that exist, strides are the arrays' own, and every size is there."""
    made = planned(problem, device)
    if made is None:
        return
    tensors, pieces = dict(problem.tensors), {buffer.name for buffer in made.workspace}
    for launch in made.launches:
        layout = params.layout(launch.kernel, launch.real)
        values, arrays = dict(launch.values), dict(launch.arrays)
        layout.pack(values)
        assert set(arrays.values()) <= set(tensors) | pieces | {TILE_COUNTER, SEED}
        known = {field.name for name in problem.on for field in features.BY_NAME[name].fields}
        if params.computes_scores(launch.kernel):  # gradients are given where they are wanted
            assert known - set(sums.NAMES) <= values.keys() | arrays.keys()
        for field in layout.fields:
            if field.kind == "u64":
                assert (field.name in arrays) == (field.name in known), "a number that comes with the addresses"
            elif field in features.FIELDS:
                assert field.name in known or field.name not in values.keys() | arrays.keys()
            elif field.kind in ("i32", "real"):
                assert field.name in values, f"{launch.kernel} is not told {field.name}"
            elif field.name.endswith("_stride") and arrays.get(field.name.removesuffix("_stride")) in tensors:
                assert values[field.name] == tensors[field.name.removesuffix("_stride")].strides
            elif field.kind == "tensor_map":
                assert dict(launch.tensor_maps)[field.name].array in tensors
        for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv"):
            if name in arrays and arrays[name] in tensors:
                assert constants(launch)[f"WIDE_{name.upper()}"] == tensors[name].wide()


@settings(max_examples=300)
@given(problems(), devices)
def test_workspace_is_in_proportion_to_the_arrays(problem, device):
    made = planned(problem, device)
    if made is None:
        return
    slack = 256 * len(made.workspace)  # each piece starts on a multiple of 256 bytes
    if not problem.backward:
        split = any(constants(launch).get("SPLIT") for launch in made.launches)
        assert split or made.workspace_bytes == 0, "forward needs out and lse, and nothing else"
        # Of the parts of the keys, o and lse: of four tiles of 128 rows a multiprocessor at most.
        assert made.workspace_bytes <= 4 * device.sm_count * 128 * (problem.head_dim_v + 1) * 4 + slack
        return
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    # delta, the float32 sum of dq, and one number a query tile: nothing is padded to tiles.
    assert made.workspace_bytes <= rows * (8 + 4 + 4 * problem.head_dim) + slack
    if problem.head_dim >= 16:
        assert made.workspace_bytes <= 3 * nbytes(problem, "q") + slack


@given(problems(), devices)
def test_pieces_of_the_workspace_do_not_overlap(problem, device):
    made = planned(problem, device)
    if made is None:
        return
    end = 0
    for piece in sorted(made.workspace, key=lambda piece: piece.offset):
        assert piece.offset >= end and piece.offset % 256 == 0
        end = piece.offset + piece.nbytes
    assert made.workspace_bytes == end


@settings(max_examples=300)
@given(problems(backward=False, dtype="float16"))
def test_tiles_of_hoppers_forward_hold_every_row_and_every_key(problem):
    made = planned(problem, KNOWN["H200"])
    if made is None or made.family != "sm90" or not made.launches:
        return
    main, *others = made.launches
    cfg, values = constants(main), dict(main.values)
    pack, splits, warpgroups = cfg["PACK"], values["num_splits"], cfg["TILE_M"] // 64
    queries = warpgroups * (64 // pack)
    assert problem.qheads_per_kv % pack == 0, "heads of a tile share k and v"
    assert (values["num_m_blocks"] - 1) * queries < problem.seqlen_q <= values["num_m_blocks"] * queries
    heads = problem.batch * problem.num_heads_q
    assert values["num_tiles"] * pack == values["num_m_blocks"] * heads * splits
    assert values["packs_per_section"] >= 1
    assert dict(main.tensor_maps)["tma_q"].box == (64, 64 // pack, pack)
    assert 1 <= splits <= max(1, -(-problem.seqlen_k // cfg["TILE_N"])), "no part is without a key tile"
    assert cfg["SPLIT"] == (splits > 1) == bool(others) == bool(made.workspace)
    assert [launch.kernel for launch in others] == ["combine"] * (splits > 1)
    if splits > 1:
        assert values["num_m_blocks"] * heads // pack < KNOWN["H200"].sm_count, "there were multiprocessors to spare"
        assert cfg["Output"] == "float" and dict(main.arrays)["o"] == "o_partial"


@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_with_many_keys_keep_the_gpu_busy(causal):
    for sizes in ({"seqlen_q": 128, "heads": 8}, {"seqlen_q": 1, "heads": 32, "heads_kv": 8}, {"heads": 1}):
        made = plan(example(batch=1, seqlen_k=32768, causal=causal, **{"seqlen_q": 64, **sizes}), KNOWN["H200"])
        assert [launch.kernel for launch in made.launches] == ["fwd_sm90", "combine"]
        assert made.launches[0].grid >= 0.9 * KNOWN["H200"].sm_count
        assert any("keys are split" in note for note in made.notes)


def test_queries_of_several_heads_fill_a_tile():
    made = plan(example(batch=64, seqlen_q=9, seqlen_k=4096, heads=28, heads_kv=4), KNOWN["H200"])
    assert constants(made.launches[0])["PACK"] == 7
    assert any("7 query heads" in note for note in made.notes)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_many_long_sequences_are_neither_split_nor_packed(head_dim):
    for seqlen, causal in itertools.product((512, 2048, 16384), (False, True)):
        made = plan(
            example(batch=4, seqlen_q=seqlen, heads=64, heads_kv=8, head_dim=head_dim, causal=causal), KNOWN["H200"]
        )
        assert len(made.launches) == 1
        assert constants(made.launches[0])["PACK"] == 1


@given(problems(), devices)
def test_a_plan_depends_on_nothing_else(problem, device):
    made = planned(problem, device)
    assert made == planned(replace(problem), replace(device))
    if made is not None:
        hash(made)


@given(problems(), devices)
def test_hoppers_kernels_run_on_hopper_only(problem, device):
    made = planned(problem, device)
    if made is not None and made.family == "sm90":
        assert device.capability == (9, 0)
        assert all(t.wide() for _, t in problem.tensors if len(t.shape) == 4)
    for launch in made.launches if made else ():
        only = KERNELS[launch.kernel].only_capability
        assert only in (None, device.capability)


@given(problems(), devices, st.sampled_from(FAMILIES))
def test_a_family_that_is_asked_for_is_used_or_refused(problem, device, family):
    try:
        made = plan(problem, device, families=(family,))
    except Unsupported as error:
        text = str(error)
        assert f"{family}: " in text or "a grid holds" in text or "it counts to" in text
        assert str(problem) in text, "the message carries the whole call"
        assert "\n" not in text
    else:
        assert made.family == family


@pytest.mark.parametrize("dtype", HALF)
def test_what_half_precision_needs_is_said(dtype):
    with pytest.raises(Unsupported, match=r"compute capability 7\.5.*need compute capability 8\.0") as caught:
        plan(example(dtype=dtype), KNOWN["T4"])
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", KNOWN)
def test_full_precision_runs_on_any_gpu(name, dtype, backward):
    for head_dim in (1, 64, 128, 192, MAX_HEAD_DIM):
        made = plan(example(dtype=dtype, backward=backward, head_dim=head_dim), KNOWN[name])
        assert made.family == "simt", "float32 means float32: no tensor cores"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name, device in KNOWN.items() if device.capability >= (8, 0)])
def test_half_precision_runs_on_tensor_cores_from_ampere_on(name, backward):
    for head_dim in (1, 64, 96, 128, 192, MAX_HEAD_DIM):
        made = plan(example(backward=backward, head_dim=head_dim), KNOWN[name])
        assert made.family in ("sm80", "sm90")
        assert made.launches


@pytest.mark.parametrize("backward", [False, True])
def test_why_not_a_faster_family_is_noted(backward):
    made = plan(example(backward=backward, narrow=("q",)), KNOWN["H200"])
    if made.family != FAMILIES[0]:
        assert any(note.startswith(f"{FAMILIES[0]}: ") for note in made.notes)
    assert any(note.startswith("q: element-wise") for note in made.notes)


@given(problems(backward=True), devices)
def test_only_a_deterministic_backward_waits_its_turn(problem, device):
    made = planned(problem, device)
    if made is None:
        return
    waits = any(piece.name == "semaphore" for piece in made.workspace)
    ordered = any(constants(launch).get("DETERMINISTIC", False) for launch in made.launches)
    assert ordered <= waits <= problem.deterministic


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_tile_rows_are_well_formed(name):
    kernel = KERNELS[name]
    assert set(kernel.dtypes) <= {"float16", "bfloat16", "float32", "float64"}
    assert name in params.TABLES
    for row in kernel.rows:
        assert row.head_dim % kernel.pad == 0
        assert row.threads % 32 == 0 and row.min_ctas >= 1 and row.stages >= 1
        assert row.threads * row.min_ctas <= 2048, "what a multiprocessor holds"
        assert len(row.why) > 10, "a row says why it is so"
    assert max(row.head_dim for row in kernel.rows) == MAX_HEAD_DIM


@pytest.mark.parametrize("name", [n for n in KERNEL_NAMES if params.computes_scores(n)])
def test_every_kernel_has_a_row_for_every_head_dim_and_dtype_somewhere(name):
    kernel = KERNELS[name]
    family = name.rpartition("_")[2]
    able = [d for d in KNOWN.values()
            if kernel.only_capability in (None, d.capability) and d.capability >= kernel.min_capability]  # fmt: skip
    able = {d.smem_bytes: d for d in able}.values()  # what a row is fit for, or not
    for dtype in kernel.dtypes:
        for head_dim in range(1, MAX_HEAD_DIM + 1) if family != "sm90" else range(8, MAX_HEAD_DIM + 1, 8):
            for causal in (False, True):
                problem = example(dtype=dtype, backward=name.startswith("bwd"), head_dim=head_dim, causal=causal)
                for device in able:
                    assert plan(problem, device, families=(family,)).launches


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("capability, family", [((8, 0), "sm80"), ((9, 0), "sm90")])
def test_packed_sequences(capability, family, backward, used):
    """Tiles for any lengths that the offsets may have, and nothing that depends on the longest."""
    device = device_of(capability)
    plans = [
        plan(packed(tokens=5000, batch=30, backward=backward, used=used, max_seqlen=n), device) for n in (300, None)
    ]
    for made in plans:
        main = next(launch for launch in made.launches if launch.kernel == f"{'bwd' if backward else 'fwd'}_{family}")
        config, values = dict(main.config), dict(main.values)
        assert config["PACKED"] and config["GAPS"] == used
        assert (values["batch"], values["rows_q"], values["rows_k"]) == (30, 5000, 5000)
        tile = config["TILE_N" if backward else "TILE_M"]
        most = 5000 // tile + 30 * (1 + used) + 1  # of a head
        assert values.get("num_tiles", main.grid) in (most * 4, device.sm_count)
        assert {f"cu_seqlens_{side}" for side in "qk"} <= set(dict(main.arrays))
        assert used == ("seqused_q" in dict(main.arrays))
        for launch in made.launches:
            if launch.kernel == "bwd_delta":
                assert dict(launch.values)["batch"] == 1 and dict(launch.values)["seqlen_q"] == 5000
    first, second = ([(x.kernel, x.config, x.grid) for x in made.launches] for made in plans)
    assert first == second


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize(("seqlen_k", "wide"), [(1024, True), (1023, False)])
def test_rows_of_elements_are_read_16_bytes_at_a_time_where_they_can_be(name, seqlen_k, wide):
    for backward in (False, True):
        made = plan(example(seqlen_k=seqlen_k, backward=backward, **{name: (1, 4, 1024, "k")}), device_of((9, 0)))
        [config] = [dict(x.config) for x in made.launches if x.kernel in ("fwd_sm90", "bwd_sm90")]
        assert config[f"WIDE_{name.upper()}"] is wide
        assert any(note.startswith(f"{name}: element-wise") for note in made.notes) is not wide


@pytest.mark.parametrize(
    ("shape", "strides", "extents", "box"),
    [
        ((64, 28, 9, "k"), None, (64, 9, 28, 4096), (9, 7)),
        ((1, 28, 1, "k"), None, (1, 1, 28, 4096), (1, 7)),
        (("k",), None, (1, 1, 1, 4096), (1, 1)),
        ((64, 28, 9, "k"), (0, 0, 4096, 1), (1, 9, 1, 4096), (9, 1)),
    ],
)
def test_a_bias_is_loaded_once_for_what_it_is_broadcast_over(shape, strides, extents, box):
    made = example(batch=64, seqlen_q=9, seqlen_k=4096, heads=28, heads_kv=4, bias=shape)
    if strides:
        bias = dict(made.tensors)["bias"]._replace(strides=strides)
        made = replace(made, tensors=tuple({**dict(made.tensors), "bias": bias}.items()))
    [launch] = plan(made, device_of((9, 0))).launches
    found, cfg = dict(launch.tensor_maps)["tma_bias"], constants(launch)
    assert cfg["PACK"] == 7 and found.tensor.shape == extents
    assert found.box == (64, *box)


def test_a_bias_with_negative_strides_is_read_by_element():
    made = example(seqlen_k=1024, bias=(1, 4, 1024, "k"))
    bias = dict(made.tensors)["bias"]._replace(strides=(0, 2**20, -1024, 1))
    made = plan(replace(made, tensors=tuple({**dict(made.tensors), "bias": bias}.items())), device_of((9, 0)))
    assert not constants(made.launches[0])["WIDE_BIAS"]
    assert any(note.startswith("bias: element-wise") for note in made.notes)


@pytest.mark.parametrize("softmax_scale", [1 / math.sqrt(128), -0.3, 1 / 16, 1e-3, -1e-7])
@pytest.mark.parametrize("softcap", [5.0, 30.0, 50.0, 1e3, 1e5, 1e12, 1e30])
def test_series_of_softcap(softcap, softmax_scale):
    made = plan(example(head_dim=128, softcap=softcap, softmax_scale=softmax_scale), KNOWN["H200"])
    values = {name: np.float32(value) for name, value in made.launches[0].values if name.startswith("softcap")}
    assert values["softcap_small"] > 0
    tried, most = [("softcap_series", values["softcap_small"])], softcap / abs(softmax_scale) * softcap_series.TANH_TINY
    if values["softcap_levels"][1] > 0:
        tried.append(("softcap_short_series", most))
    for series, most in tried:
        products = np.linspace(-1, 1, 1000) * float(most)
        assert np.isfinite(np.float32(most) ** 2)
        expected = LOG2_E * softcap * np.tanh(softmax_scale * products / softcap)
        found = np.polyval(values[series][::-1].astype(np.float64), products**2) * products
        np.testing.assert_allclose(found, expected, rtol=2**-20.9, atol=1e-12)


@given(
    softcap=st.floats(1, 1e4),
    spread=st.floats(0.1, 20),
    middle=st.floats(-20, 20),
    far=st.floats(-1e3, 1e3),
    size=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_levels_of_softcap(softcap, spread, middle, far, size, seed):
    """What sums between the two levels tell: that the short series served."""
    values = dict(plan(example(softcap=softcap, softmax_scale=1.0), KNOWN["H200"]).launches[0].values)
    s = middle + spread * np.random.default_rng(seed).standard_normal(size)
    s[0] = far
    exponents = np.polyval(values["softcap_short_series"][::-1], s**2) * s
    with np.errstate(over="ignore", divide="ignore"):
        level = np.log2(np.exp2(exponents).sum())
    low, high = values["softcap_levels"]
    if low <= level <= high:
        exact = LOG2_E * softcap * np.tanh(s / softcap)
        served = abs(s) <= softcap_series.TANH_TINY * softcap
        assert (s <= softcap_series.TANH_TINY * softcap).all()
        np.testing.assert_allclose(exponents[served], exact[served], rtol=2**-20.9, atol=1e-12)
        assert abs(np.exp2(exponents) - np.exp2(exact))[~served].sum() <= 1.01 * 2**-22 * np.exp2(exact).sum()


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_levels_of_softcap_hold_ordinary_scores(softcap):
    values = dict(plan(example(softcap=softcap, softmax_scale=1.0), KNOWN["H200"]).launches[0].values)
    s = np.random.default_rng(0).standard_normal((10000, 16))
    levels = np.log2(np.exp2(np.polyval(values["softcap_short_series"][::-1], s**2) * s).sum(-1))
    low, high = values["softcap_levels"]
    assert low < levels.min() and levels.max() < high


def test_tiles_of_heads_are_in_one_order_where_walks_differ_in_length():
    options = {"mask_mod": FUNCTIONS["mask_mod"], "block_mask": BLOCKS}
    sizes = {"batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "heads": 4, "heads_kv": 4, "head_dim": 128}
    for on, together in (({}, False), ({"causal": True}, True), (options, True)):
        values = dict(plan(example(**sizes, **on), KNOWN["H200"]).launches[0].values)
        assert (values["packs_per_section"] > 1) == together


def test_ctas_that_share_a_multiprocessor():
    made = plan(example(batch=256, seqlen_q=128, seqlen_k=128, heads=16, head_dim=64), KNOWN["H200"])
    main = made.launches[0]
    assert constants(main)["MIN_CTAS"] == 2 and main.grid == 2 * KNOWN["H200"].sm_count
    assert 2 * (main.smem_bytes + 1024) <= KNOWN["H200"].smem_bytes + 1024
