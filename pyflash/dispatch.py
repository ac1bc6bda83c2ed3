"""The way of a call from arrays to launches: its options are read, it is planned once, and run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from . import arrays, cpu, debug, device, entry, features, problem, sequences
from .errors import Unsupported
from .launch import SEED, WORKSPACE, Executable
from .plan import plan
from .tiles import FAMILIES


class Call(NamedTuple):
    """What a forward call and its backward have in common besides arrays, checked."""

    kind: arrays.Kind
    softmax_scale: float | None
    scalars: tuple[tuple[str, object], ...]  # the features that are on
    seed: int | None
    hosts: dict[str, np.ndarray]  # what says where sequences are and lies on the host
    longest: tuple[int | None, int | None]  # what is known of the longest sequence of queries and keys


def read(given: dict[str, object], softmax_scale, options: dict, seed, lengths: dict) -> Call:
    """Check the options of a call. Those that are arrays, and not the host's, join the arrays that are `given`."""
    scalars, joining = features.parted(features.check(options))
    given |= joining
    kind = arrays.common_kind(given)
    lengths = {name: value for name, value in lengths.items() if value is not None}
    hosts, longest = _lengths(kind, lengths, given) if lengths else ({}, (None, None))
    seed = None if seed is None else features.check_seed(seed)
    return Call(kind, problem.check_scale(softmax_scale), tuple(scalars.items()), seed, hosts, longest)


def _lengths(
    kind: arrays.Kind, lengths: dict[str, object], given: dict[str, object]
) -> tuple[dict[str, np.ndarray], tuple[int | None, int | None]]:
    """Of what says where sequences are: copies of the arrays that lie on the host, and what is known of the longest.
    Those of the GPU join `given`."""
    hosts = {}
    for name in (name for name in sequences.ARRAYS if name in lengths):
        value = lengths[name]
        host = sequences.on_host(name, value)
        if host is None:
            other = arrays.kind_of(value, name)
            if not other.gpu:
                host = sequences.on_host(name, np.asarray(other.view(value)))
            elif other is not kind:
                raise TypeError(f"{name}: got a {other.name} array, takes a list, a NumPy array or one of {kind.name}")
        if host is None:
            given[name] = value
        else:
            hosts[name] = host.copy()
    said = [sequences.check_longest(name, lengths.get(name)) for name in sequences.LONGEST]
    return hosts, tuple([sequences.longest(hosts, x) if n is None else n for n, x in zip(said, "qk", strict=True)])


def tensors_of(kind: arrays.Kind, keys: dict[str, arrays.Key]) -> dict[str, problem.Tensor]:
    tensors = {}
    for name, key in keys.items():
        try:
            tensors[name] = kind.tensor(key)
        except Unsupported as error:
            raise Unsupported(f"{problem.argument(name)}: {error}") from None
    return tensors


@dataclass(frozen=True)
class _Prepared:
    """A call whose checks and plan are done: what to allocate and what to run."""

    problem: problem.Problem
    forms: dict[str, tuple]  # what Kind.make makes the outputs of, and the workspace
    executable: Executable | None  # None: NumPy


# Calls seen before, by everything that they depend on besides the arrays' contents and addresses: a repeated call costs
# a look-up, its outputs and its launches.
_prepared: dict[tuple, _Prepared] = {}
_MAX_PREPARED = 4096


def _prepare(kind, seen, softmax_scale, scalars, backward, wants_lse, deterministic, gradients, longest) -> _Prepared:
    made = problem.make(
        tensors_of(kind, seen.keys),
        backward=backward,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        wants_lse=wants_lse,
        gradients=gradients,
        options=dict(scalars),
        longest=longest,
    )
    executable = None
    if kind.gpu:
        device_id = seen.device_id()
        gpu = device.present(device_id)
        executable = Executable(plan(made, gpu, debug.FAMILIES or FAMILIES), gpu, device_id)
    forms = {n: kind.form(made.shape(n), t.dtype) for n, t in made.tensors if n in made.outputs}
    if executable and executable.plan.workspace:
        forms[WORKSPACE] = kind.form((executable.plan.workspace_bytes,), "uint8")
    return _Prepared(made, forms, executable)


def run(
    call: Call,
    given: dict[str, object],
    *,
    backward: bool = False,
    wants_lse: bool = False,
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
) -> dict[str, object]:
    """Check what depends on the arrays, plan and run. Returns the arrays that were made, by name."""
    kind, softmax_scale, scalars, seed, hosts, longest = call
    seen = arrays.Inspected(kind, given)
    if hosts:  # numbers that this changes are refused below
        seen.upload(kind, {name: host.astype("int32", order="C") for name, host in hosts.items()})
    flags = (softmax_scale, scalars, backward, wants_lse, deterministic, gradients, longest)
    key = (kind.name, *seen.keys, *seen.keys.values(), *flags, debug.FAMILIES)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = _prepare(kind, seen, *flags)
    if hosts:
        check_sequences(call, prepared.problem)
    if not backward and "o" in given:
        _check_target(kind, seen, prepared.problem)
    like = given["q"]
    if prepared.executable is None:
        made = kind.make(prepared.forms, like, seen.addresses)
        _run_numpy(prepared.problem, seen.views | made, seed)
    else:
        made = filled(kind, prepared.executable, seen, prepared.forms, like, seed)
    return made if kind.direct else {name: kind.wrap(view, like) for name, view in made.items()}


def check_sequences(call: Call, made: problem.Problem) -> None:
    rows, bounds = {"q": made.rows_q, "k": made.rows_k}, dict(zip("qk", call.longest, strict=True))
    sequences.check(call.hosts, made.packed, rows, bounds, made)


def _run_numpy(made: problem.Problem, views: dict[str, object], seed: int | None) -> None:
    run, names = cpu.forward, ("q", "k", "v", "o", "lse")
    if made.backward:
        names = ("dout", "q", "k", "v", "o", "lse", "dlse", "dq", "dk", "dv")
        run = partial(cpu.backward, more={name: views[name] for name in made.outputs if name not in names})
    options = {**dict(made.options), **views, "seed": seed}
    on = features.check({name: x for name, x in options.items() if name in features.BY_NAME or name == "seed"})
    lengths = {name: views[name] for name in sequences.ARRAYS if name in views}
    run(*(views.get(name) for name in names), softmax_scale=made.softmax_scale, on=on, lengths=lengths)


def filled(kind: arrays.Kind, executable: Executable, seen: arrays.Inspected, forms: dict, like, seed) -> dict:
    """Make the arrays of `forms`, and queue what fills them. The workspace among them may be freed as soon as that is
    queued: the libraries' allocators hand memory on in the order of the stream."""
    addresses, device_id = seen.addresses, executable.device_id
    addresses[SEED] = seed
    with device.current(device_id):
        made = kind.make(forms, like, addresses)
        executable(addresses, kind.stream(device_id))
    return made


def _check_target(kind: arrays.Kind, seen: arrays.Inspected, made: problem.Problem) -> None:
    """`out` must not lie on the inputs: some of them are still to be read when its first rows are written."""
    if not kind.writable(seen.views["o"]):
        raise ValueError(f"out: got a {kind.name} array that is read-only, takes one that can be written; call {made}")
    tensors = dict(made.tensors)
    low, high = arrays.byte_range(tensors["o"], seen.addresses["o"])
    for name in tensors.keys() - {"o", "lse"}:
        start, end = arrays.byte_range(tensors[name], seen.addresses[name])
        if low < end and start < high:
            raise ValueError(f"out: got memory that overlaps {name}'s, takes memory of its own; call {made}")


entry.read, entry.run = read, run
