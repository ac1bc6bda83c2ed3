"""Functions of scores and positions as graphs of steps: what NumPy evaluates and what the kernels compile."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_ARRAYS, MAX_DIMENSIONS = 4, 4
INPUTS = {"score_mod": ("score", "batch", "head", "q_idx", "kv_idx"), "mask_mod": ("batch", "head", "q_idx", "kv_idx")}

# Kinds of numbers, each of which holds those before it: their C type and their NumPy type ("real" is that of lse).
KINDS = {"bool": ("bool", np.bool_), "int": ("int", np.int32), "long": ("i64", np.int64), "real": ("Real", None)}
RANK = {kind: rank for rank, kind in enumerate(KINDS)}

# What a captured array may hold: the type in the kernels, and the kind of what is read.
ELEMENTS = {
    "bool": ("unsigned char", "bool"),
    "int32": ("int", "int"),
    "int64": ("i64", "long"),
    "float16": ("fp16", "real"),
    "bfloat16": ("bf16", "real"),
    "float32": ("float", "real"),
    "float64": ("double", "real"),
}


class _Operation(NamedTuple):
    """What an operation is in C and in NumPy, and what it takes."""

    c: str
    numpy: Callable
    takes: str  # numbers, integers, bits (integers or booleans), reals, comparable


OPERATIONS = {
    "add": _Operation("{0} + {1}", np.add, "numbers"),
    "subtract": _Operation("{0} - {1}", np.subtract, "numbers"),
    "multiply": _Operation("{0} * {1}", np.multiply, "numbers"),
    "divide": _Operation("divide({0}, {1})", np.true_divide, "reals"),
    "floor_divide": _Operation("floor_divide({0}, {1})", np.floor_divide, "integers"),
    "remainder": _Operation("remainder({0}, {1})", np.remainder, "integers"),
    "negative": _Operation("-{0}", np.negative, "numbers"),
    "absolute": _Operation("{0} < 0 ? -{0} : {0}", np.absolute, "numbers"),
    "minimum": _Operation("{0} < {1} || {0} != {0} ? {0} : {1}", np.minimum, "numbers"),
    "maximum": _Operation("{0} > {1} || {0} != {0} ? {0} : {1}", np.maximum, "numbers"),
    "less": _Operation("{0} < {1}", np.less, "comparable"),
    "less_equal": _Operation("{0} <= {1}", np.less_equal, "comparable"),
    "greater": _Operation("{0} > {1}", np.greater, "comparable"),
    "greater_equal": _Operation("{0} >= {1}", np.greater_equal, "comparable"),
    "equal": _Operation("{0} == {1}", np.equal, "comparable"),
    "not_equal": _Operation("{0} != {1}", np.not_equal, "comparable"),
    "bitwise_and": _Operation("{0} & {1}", np.bitwise_and, "bits"),
    "bitwise_or": _Operation("{0} | {1}", np.bitwise_or, "bits"),
    "bitwise_xor": _Operation("{0} ^ {1}", np.bitwise_xor, "bits"),
    "invert": _Operation("inverted({0})", np.invert, "bits"),
    "exp": _Operation("exp_of({0})", np.exp, "reals"),
    "log": _Operation("log_of({0})", np.log, "reals"),
    "tanh": _Operation("tanh_of({0})", np.tanh, "reals"),
    "sqrt": _Operation("sqrt_of({0})", np.sqrt, "reals"),
    "sin": _Operation("sin_of({0})", np.sin, "reals"),
    "cos": _Operation("cos_of({0})", np.cos, "reals"),
    "floor": _Operation("floor_of({0})", np.floor, "reals"),
    "where": _Operation("{0} ? {1} : {2}", np.where, "numbers"),
}


class Node(NamedTuple):
    """One step. An `input` has its name as value, a `constant` its number, a `load` its array's place and dtype. A
    `scatter` adds its first operand to the gradient of an array, to the element that a load of the others reads."""

    operation: str
    kind: str
    operands: tuple[int, ...] = ()
    value: object = None


@dataclass(frozen=True, eq=False)
class Graph:
    """Steps, each after those that it uses; the last is the result, unless they scatter. There is one object of each
    graph."""

    nodes: tuple[Node, ...]
    text: str  # the same as JSON

    def evaluate(self, inputs: dict[str, np.ndarray], arrays: tuple, real: type) -> np.ndarray:
        return self._values(inputs, arrays, real)[-1]

    def scatter(self, inputs: dict[str, np.ndarray], arrays: tuple, totals: Mapping[int, np.ndarray], real: type):
        """Add to the gradients of arrays, by their places; nothing where ds is 0, which has the full shape."""
        values, chosen = self._values(inputs, arrays, real), inputs["ds"] != 0
        for node in self.nodes:
            if node.operation == "scatter" and node.value[0] in totals:
                x, *index = (np.broadcast_to(values[i], chosen.shape)[chosen] for i in node.operands)
                total = totals[node.value[0]]
                flat = np.ravel_multi_index(index, total.shape, mode="clip")
                total += np.bincount(flat, x, total.size).reshape(total.shape)

    def _values(self, inputs: dict[str, np.ndarray], arrays: tuple, real: type) -> list[np.ndarray | None]:
        values = []
        for operation, kind, operands, value in self.nodes:
            of, dtype = [values[i] for i in operands], KINDS[kind][1] or real
            if operation == "input":
                values.append(np.asarray(inputs[value], dtype))
            elif operation == "constant":
                values.append(dtype(value))
            elif operation == "cast":
                values.append(of[0].astype(dtype))
            elif operation == "load":
                array = np.asarray(arrays[value[0]])
                places = (np.clip(index, 0, size - 1) for index, size in zip(of, array.shape, strict=True))
                values.append(array[tuple(places)].astype(dtype))
            elif operation == "scatter":
                values.append(None)
            else:
                values.append(OPERATIONS[operation].numpy(*of))
        return values

    def cuda(self, name: str, inputs: tuple[str, ...]) -> str:
        """A function of the kernels, inside of the namespace of mod.cuh."""
        names, lines = [], []
        for operation, kind, operands, value in self.nodes:
            of = [names[i] for i in operands]
            if operation == "input":
                names.append(value)
                continue
            if operation == "constant":
                names.append(_literal(kind, value))
                continue
            array = f"mod_array_{value[0]}" if operation in ("load", "scatter") else None
            if operation == "scatter":
                sums = f"sums[{names.count(None)}]"
                names.append(None)
                lines.append(f"  scatter({', '.join([sums, f'p.d{array}', f'p.{array}_size', *of])});")
                continue
            if operation == "cast":
                text = f"{KINDS[kind][0]}({of[0]})"
            elif operation == "load":
                read = [f"p.{array}", f"p.{array}_stride", f"p.{array}_size", *of]
                text = f"load<{ELEMENTS[value[1]][0]}>({', '.join(read)})"
            else:
                text = OPERATIONS[operation].c.format(*of)
            names.append(f"x{len(lines)}")
            lines.append(f"  const {KINDS[kind][0]} {names[-1]} = {text};")
        types = {node.value: KINDS[node.kind][0] for node in self.nodes if node.operation == "input"}
        arguments = ", ".join(f"{types.get(x, 'Real' if x in ('score', 'ds') else 'int')} {x}" for x in inputs)
        result = KINDS[self.nodes[-1].kind][0] if names[-1] else "void"
        sums = "" if names[-1] else "RunningSum<Real>* sums, "
        head = f"__device__ __forceinline__ {result} {name}(const Params& p, {sums}{arguments}) {{"
        return "\n".join([head, *lines, *([f"  return {names[-1]};"] if names[-1] else []), "}"])


def _literal(kind: str, value) -> str:
    if kind == "real" and np.isinf(value):
        return "Real(NEG_INF)" if value < 0 else "(-Real(NEG_INF))"
    return str(value).lower() if kind == "bool" else f"{KINDS[kind][0]}({value!r})"


_graphs: dict[tuple[Node, ...], Graph] = {}


def reduced(nodes, roots: Collection[int]) -> Graph:
    """What of `nodes` leads to `roots`."""
    used = set(roots)
    for i in range(max(roots), -1, -1):
        if i in used:
            used.update(nodes[i].operands)
    places = {old: new for new, old in enumerate(sorted(used))}
    kept = tuple(nodes[i]._replace(operands=tuple(places[x] for x in nodes[i].operands)) for i in sorted(used))
    return graph_of(kept)


def graph_of(nodes: tuple[Node, ...]) -> Graph:
    return _graphs.get(nodes) or _graphs.setdefault(nodes, Graph(nodes, json.dumps(nodes)))


@lru_cache(maxsize=1024)
def _renumbered(graph: Graph, places: tuple[int, ...]) -> Graph:
    """The graph with its arrays in other places."""
    nodes = graph.nodes
    moved = {i: (places[n.value[0]], n.value[1]) for i, n in enumerate(nodes) if n.operation in ("load", "scatter")}
    nodes = [n._replace(value=moved[i]) if i in moved else n for i, n in enumerate(nodes)]
    return graph_of(tuple(nodes))


@lru_cache(maxsize=1024)
def shared(graph: Graph, place: str, name: str = "fact") -> tuple[Graph, Graph] | None:
    """What a graph reads of memory for a key, or for a query, whatever the other is: that value by itself, and the
    graph with it as an input of that name. None where there is no such value, or more than one."""
    of, at, reads = [], [], []  # of each node: whether it depends on nothing else, on the place, and reads there
    for operation, _, operands, value in graph.nodes:
        of.append(value in (place, "batch", "head") if operation == "input" else all(of[i] for i in operands))
        at.append((operation, value) == ("input", place) or any(at[i] for i in operands))
        reads.append(at[-1] and (operation == "load" or any(reads[i] for i in operands)))
    users = [(i, x) for i, node in enumerate(graph.nodes) for x in node.operands]
    found = {x for i, x in users if of[x] and reads[x] and not of[i]}
    if len(found) != 1 or graph.nodes[root := found.pop()].kind == "bool":
        return None
    nodes = list(graph.nodes)
    nodes[root] = Node("input", nodes[root].kind, (), name)
    return reduced(graph.nodes, [root]), reduced(nodes, [len(nodes) - 1])


@lru_cache(maxsize=1024)
def by_position(graph: Graph) -> tuple[Graph, Graph | None]:
    """Of a condition: what of it depends on memory, be it by a "fact" (`shared`), and the rest, if there is one. Where
    the rest is true it is the former, elsewhere false."""
    reads, joined = [], [len(graph.nodes) - 1]  # of each node: whether it does; conditions that are joined by "and"
    for operation, _, operands, value in graph.nodes:
        reads.append(operation == "load" or value == "fact" or any(reads[i] for i in operands))
    for i in joined:
        if graph.nodes[i][:2] == ("bitwise_and", "bool"):
            joined.extend(graph.nodes[i].operands)
    terms = [i for i in joined if graph.nodes[i][:2] != ("bitwise_and", "bool")]

    def without(reading: bool) -> Graph:
        nodes = list(graph.nodes)
        for i in terms:
            if reads[i] == reading:
                nodes[i] = Node("constant", "bool", (), True)
        return reduced(nodes, [len(nodes) - 1])

    return (graph, None) if all(reads[i] for i in terms) else (without(False), without(True))


class Mod(NamedTuple):
    """A traced function, and the arrays that it captures: those of all functions of a call."""

    graph: Graph
    slope: Graph | None = None  # the derivative by the score, of one that has it
    scatter: Graph | None = None  # from ds, the gradient of what it makes, to those of floating-point arrays
    arrays: tuple = ()

    @property
    def scatters(self) -> tuple[Node, ...]:
        nodes = self.scatter.nodes if self.scatter else ()
        return tuple(node for node in nodes if node.operation == "scatter")

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The places of the arrays that have gradients."""
        return tuple(sorted({node.value[0] for node in self.scatters}))

    @property
    def adds(self) -> bool:
        """Whether it adds something to the score which does not depend on it."""
        one = Node("constant", "real", (), 1.0)
        nodes = self.scatter.nodes if self.scatter else ()
        return self.slope.nodes == (one,) and not any(node[:4:3] == ("input", "score") for node in nodes)

    @property
    def text(self) -> str:
        """Its graphs as JSON, for `from_json`."""
        return "[" + ",".join(["null" if graph is None else graph.text for graph in self[:3]]) + "]"

    def __repr__(self) -> str:
        return f"<function of {len(self.graph.nodes)} steps>"


def from_json(graphs: list) -> Mod:
    def node(operation, kind, operands, value):
        return Node(operation, kind, tuple(operands), tuple(value) if isinstance(value, list) else value)

    return Mod(*(graph and graph_of(tuple([node(*fields) for fields in graph])) for graph in graphs))


def moved(mod: Mod, places: tuple[int, ...]) -> Mod:
    """The function with its arrays in other places."""
    return Mod(*(graph and (_renumbered(graph, places) if places else graph) for graph in mod[:3]))


def joined(mods: list[Mod]) -> list[Mod]:
    """The functions of a call with one list of arrays, each in it once."""
    arrays = []
    places = []
    for mod in mods:
        for array in mod.arrays:
            if not any(array is other for other in arrays):
                arrays.append(array)
        places.append(tuple(next(i for i, other in enumerate(arrays) if other is array) for array in mod.arrays))
    if len(arrays) > MAX_ARRAYS:
        raise ValueError(f"score_mod and mask_mod: got {len(arrays)} captured arrays, take {MAX_ARRAYS} together")
    return [moved(mod, at)._replace(arrays=tuple(arrays)) for mod, at in zip(mods, places, strict=True)]
