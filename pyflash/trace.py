"""Python functions of scores and positions, traced into graphs.

A function is called once, with tracers in place of numbers. What it does to them is recorded, as is what it reads of
the arrays that it captures; captured Python numbers become constants. The derivatives by the score, and by what is
read of arrays, follow from the record.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np

from . import captured
from .graphs import ELEMENTS, INPUTS, MAX_ARRAYS, MAX_DIMENSIONS, OPERATIONS, RANK, Mod, Node, reduced

_SYMBOLS = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//", "remainder": "%", "less": "<",
    "less_equal": "<=", "greater": ">", "greater_equal": ">=", "equal": "==", "not_equal": "!=", "bitwise_and": "&",
    "bitwise_or": "|", "bitwise_xor": "^", "invert": "~", "negative": "-", "absolute": "abs",
}  # fmt: skip
_OF_UFUNC = {operation.numpy: name for name, operation in OPERATIONS.items() if name != "where"}
_ALLOWED = (
    "arithmetic, comparisons, & | ^ ~, and pyflash.where, exp, log, tanh, abs, minimum, maximum, sqrt, sin, cos, floor"
)


class _Recorder:
    def __init__(self, name: str):
        self.name, self.nodes, self.known, self.tables = name, [], {}, []

    def fail(self, got: str, takes: str, error: type[Exception] = TypeError):
        raise error(f"{self.name}: got {got}, takes {takes}")

    def node(self, operation: str, kind: str, operands: tuple[int, ...] = (), value=None) -> int:
        node = Node(operation, kind, operands, value)
        if node not in self.known:
            self.known[node] = len(self.nodes)
            self.nodes.append(node)
        return self.known[node]

    def operand(self, value, operation: str) -> int:
        if isinstance(value, Tracer):
            if value._recorder is not self:
                self.fail("a value kept from another call", "what belongs to this one")
            return value._index
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool):
            return self.node("constant", "bool", value=value)
        if isinstance(value, int):
            if not -(2**63) < value < 2**63:
                self.fail(f"the constant {value}", "integers of 64 bits", ValueError)
            return self.node("constant", "int" if -(2**31) < value < 2**31 else "long", value=value)
        if isinstance(value, float):
            if value != value:
                self.fail("the constant NaN", "numbers", ValueError)
            return self.node("constant", "real", value=value)
        if isinstance(value, _Table):
            self.fail(f"{operation} of a whole captured array, {value._name}", f"its elements: {value._name}[head]")
        self.fail(f"{operation} of a {type(value).__name__}", f"numbers: {_ALLOWED}")

    def cast(self, i: int, kind: str) -> int:
        node = self.nodes[i]
        if node.kind == kind:
            return i
        if node.operation == "constant":
            return self.node("constant", kind, value=float(node.value) if kind == "real" else int(node.value))
        return self.node("cast", kind, (i,))

    def apply(self, operation: str, *values) -> int:
        symbol, takes = _SYMBOLS.get(operation, f"pyflash.{operation}"), OPERATIONS[operation].takes
        operands = [self.operand(value, symbol) for value in values]
        chosen = operands[1:] if operation == "where" else operands
        kinds = [self.nodes[i].kind for i in chosen]
        kind = max(kinds, key=RANK.get)
        if operation == "where" and self.nodes[operands[0]].kind != "bool":
            self.fail("pyflash.where with a condition that is a number", "a comparison: pyflash.where(x != 0, a, b)")
        if takes == "integers" and kind == "real":
            instead = "pyflash.floor(a / b)" if operation == "floor_divide" else "a - b * pyflash.floor(a / b)"
            self.fail(f"{symbol} of numbers that are no integers", instead)
        if takes == "bits" and kind == "real":
            self.fail(f"{symbol} of numbers that are no integers", "comparisons or integers")
        if takes == "reals":
            kind = "real"
        elif kind == "bool" and takes in ("numbers", "integers") and operation != "where":
            kind = "int"
        operands = operands[: len(operands) - len(chosen)] + [self.cast(i, kind) for i in chosen]
        return self.node(operation, "bool" if takes == "comparable" else kind, tuple(operands))

    def load(self, table: _Table, index) -> int:
        indices = index if isinstance(index, tuple) else (index,)
        shown = f"{table._name}[{', '.join('...' for _ in indices)}]"
        if not 1 <= table._dimensions <= MAX_DIMENSIONS:
            takes = f"1 to {MAX_DIMENSIONS}; float(x), outside of the function, makes a constant"
            self.fail(f"the captured array {table._name} of {table._dimensions} dimensions", takes, ValueError)
        if table._dtype not in ELEMENTS:
            self.fail(f"the captured array {table._name} of dtype {table._dtype}", f"one of {', '.join(ELEMENTS)}")
        if len(indices) != table._dimensions:
            self.fail(f"{shown} of an array with {table._dimensions} dimensions", "an index for each")
        operands = []
        for x in indices:
            i = self.operand(x, f"{shown} by an index")
            if self.nodes[i].kind not in ("int", "long"):
                self.fail(f"{shown} with an index of kind {self.nodes[i].kind}", "integers, such as q_idx // 2")
            if self.nodes[i].operation == "constant" and self.nodes[i].value < 0:
                self.fail(f"{shown} with the index {self.nodes[i].value}", "indices from 0 on", IndexError)
            operands.append(i)
        if table not in self.tables:
            self.tables.append(table)
        place = self.tables.index(table)
        return self.node("load", ELEMENTS[table._dtype][1], tuple(operands), (place, table._dtype))

    def derivative(self, root: int, by: int) -> int:
        """Of a node, by another."""
        one, zero = self.operand(1.0, ""), self.operand(0.0, "")
        # Of each node, None where it is 0.
        slopes: list[int | None] = []

        def tracer(i: int) -> Tracer:
            return Tracer(self, i)

        for i in range(root + 1):
            operation, kind, operands, _ = self.nodes[i]
            inner = [slopes[x] for x in operands]
            if i == by:
                slopes.append(one)
                continue
            if kind != "real" or all(x is None for x in inner) or operation == "floor":
                slopes.append(None)
                continue
            x, *others = (tracer(o) for o in operands)
            dx, *dothers = (None if d is None else tracer(d) for d in inner)
            y, dy = (others[0], dothers[0]) if others else (None, None)
            found = _DERIVATIVES[operation](tracer(i), x, dx, y, dy, *(others[1:] + dothers[1:]))
            slopes.append(found._index)
        return zero if slopes[root] is None else slopes[root]

    def scatters(self, root: int) -> list[int]:
        """The gradients of what is read of floating-point arrays, from that of a node."""
        loads = [(i, n) for i, n in enumerate(self.nodes) if n.operation == "load" and n.kind == "real"]
        ds = Tracer(self, self.node("input", "real", value="ds")) if loads else None
        slopes = [_times(ds, Tracer(self, self.derivative(root, i))) for i, _ in loads]
        return [
            self.node("scatter", "real", (slope._index, *load.operands), load.value)
            for slope, (_, load) in zip(slopes, loads, strict=True)
        ]


def _sum(a, b):
    return b if a is None else a if b is None else a + b


def _times(a, b):
    """a times the derivative b."""
    if b is None:
        return None
    node = b._recorder.nodes[b._index]
    return a if node.operation == "constant" and node.value == 1.0 else a * b


def _minus(a):
    return None if a is None else -a


def _else_zero(a):
    return 0.0 if a is None else a


# Of r = f(x, y, z): from r, x, dx, y, dy, z, dz, each derivative None where it is 0.
_DERIVATIVES = {
    "add": lambda r, x, dx, y, dy: _sum(dx, dy),
    "subtract": lambda r, x, dx, y, dy: _sum(dx, _minus(dy)),
    "multiply": lambda r, x, dx, y, dy: _sum(_times(y, dx), _times(x, dy)),
    "divide": lambda r, x, dx, y, dy: _sum(None if dx is None else dx / y, None if dy is None else -_times(r, dy) / y),
    "negative": lambda r, x, dx, y, dy: -dx,
    "absolute": lambda r, x, dx, y, dy: where(x < 0.0, -dx, dx),
    "minimum": lambda r, x, dx, y, dy: where(x < y, _else_zero(dx), _else_zero(dy)),
    "maximum": lambda r, x, dx, y, dy: where(x > y, _else_zero(dx), _else_zero(dy)),
    "exp": lambda r, x, dx, y, dy: _times(r, dx),
    "log": lambda r, x, dx, y, dy: dx / x,
    "tanh": lambda r, x, dx, y, dy: _times(1.0 - r * r, dx),
    "sqrt": lambda r, x, dx, y, dy: dx / (2.0 * r),
    "sin": lambda r, x, dx, y, dy: _times(cos(x), dx),
    "cos": lambda r, x, dx, y, dy: _times(-sin(x), dx),
    "where": lambda r, x, dx, y, dy, z, dz: where(x, _else_zero(dy), _else_zero(dz)),
}


class Tracer:
    """Stands for a number while a function is traced."""

    __slots__ = ("_index", "_recorder")
    __hash__ = None

    def __init__(self, recorder: _Recorder, index: int):
        self._recorder, self._index = recorder, index

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        operation = _OF_UFUNC.get(ufunc)
        if operation is None or method != "__call__" or options:
            self._recorder.fail(f"numpy.{ufunc.__name__}", _ALLOWED)
        return Tracer(self._recorder, self._recorder.apply(operation, *inputs))

    def __array_function__(self, function, *_):
        instead = "pyflash.where(condition, a, b)" if function.__name__ == "where" else _ALLOWED
        self._recorder.fail(f"numpy.{function.__name__}", instead)

    @classmethod
    def __torch_function__(cls, function, *_):
        raise TypeError(f"score_mod or mask_mod: got torch.{getattr(function, '__name__', function)}, takes {_ALLOWED}")

    def __pow__(self, exponent):
        if type(exponent) is not int or not 1 <= exponent <= 8:
            self._recorder.fail(f"** {exponent!r}", "** with 1 to 8; otherwise pyflash.exp(y * pyflash.log(x))")
        power = self
        for _ in range(exponent - 1):
            power = power * self
        return power


def _binary(operation: str, reverse: bool = False):
    def method(self, other):
        pair = (other, self) if reverse else (self, other)
        return Tracer(self._recorder, self._recorder.apply(operation, *pair))

    return method


def _unary(operation: str):
    return lambda self: Tracer(self._recorder, self._recorder.apply(operation, self))


def _refused(got: str, instead: str):
    def method(self, *_, **__):
        self._recorder.fail(got, instead)

    return method


_IF = "pyflash.where(condition, a, b) in place of if, and & | ~ in place of and, or, not"
for _method, _operation in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}.items():  # fmt: skip
    setattr(Tracer, f"__{_method}__", _binary(_operation))
    setattr(Tracer, f"__r{_method}__", _binary(_operation, reverse=True))
for _method, _operation in {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}.items():  # fmt: skip
    setattr(Tracer, f"__{_method}__", _binary(_operation))
for _method, _operation in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(Tracer, f"__{_method}__", _unary(_operation))
for _method, _got, _instead in (
    ("bool", "bool() of a traced value, as in if, and, or, not, min and max", _IF),
    ("float", "float() of a traced value, as in a function of math", _ALLOWED),
    ("int", "int() of a traced value", "the value itself; pyflash.floor rounds"),
    ("index", "a traced value as a Python index", "an array that the function captures under a name of its own"),
    ("array", "a traced value where an array is wanted", "an array that the function captures under a name of its own"),
    ("round", "round() of a traced value", "pyflash.floor(x + 0.5)"),
    ("iter", "a loop over a traced value", _ALLOWED),
    ("getitem", "a traced value that is indexed", "captured arrays, indexed by traced values"),
    ("rpow", "a power with a traced exponent", "pyflash.exp(exponent * log_of_base)"),
    ("lshift", "<<", "* 2"),
    ("rshift", ">>", "// 2"),
):
    setattr(Tracer, f"__{_method}__", _refused(_got, _instead))


def _function(operation: str) -> Callable:
    def function(*values):
        recorder = next((value._recorder for value in values if isinstance(value, Tracer)), None)
        if recorder is None:
            return OPERATIONS[operation].numpy(*values)
        return Tracer(recorder, recorder.apply(operation, *values))

    function.__name__ = function.__qualname__ = operation
    function.__doc__ = (
        f"numpy.{OPERATIONS[operation].numpy.__name__}, in functions for `score_mod` and `mask_mod` too.\n\n"
        "Parameters\n----------\nvalues : what such a function computes with, numbers, or NumPy arrays\n"
    )
    return function


where, exp, log, tanh, minimum, maximum, sqrt, sin, cos, floor = map(
    _function, ("where", "exp", "log", "tanh", "minimum", "maximum", "sqrt", "sin", "cos", "floor")
)
abs = _function("absolute")


class _Table:
    """Stands for a captured array."""

    def __init__(self, recorder: _Recorder, name: str, array):
        self._recorder, self._name = recorder, name
        self._dimensions, self._dtype = len(array.shape), captured.dtype_of(array)

    def __getitem__(self, index):
        return Tracer(self._recorder, self._recorder.load(self, index))

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._recorder.fail(f"{self._name}.{attribute}", f"{self._name}[...]; keep other facts in variables outside")


_traced: dict[object, tuple[Mod, tuple[captured.Steps, ...]]] = {}  # and the ways to the arrays
_MAX_TRACED = 1024


def trace(name: str, function) -> Mod:
    """`function` as the argument `name`, a key of INPUTS. It is not called again while all that it captures, but for
    the contents and the sizes of arrays, is the same."""
    if isinstance(function, Mod):
        return function
    mod, ways = found(name, function)
    return mod._replace(arrays=tuple([captured.reached(function, steps) for steps in ways])) if ways else mod


def found(name: str, function) -> tuple[Mod, tuple[captured.Steps, ...]]:
    """The same without arrays, and the ways to these."""
    inputs = INPUTS[name]
    if not isinstance(function, types.FunctionType):
        got = getattr(type(function), "__name__", function)
        raise TypeError(f"{name}: got a {got}, takes None or a Python function of {', '.join(inputs)}")
    try:
        key = name, captured.function_key(function)
    except (captured.Unknown, RecursionError):
        key = None
    made = _traced.get(key)
    if made is None:
        made = _trace(name, function)
        if len(_traced) >= _MAX_TRACED:
            _traced.clear()
        if key is not None:
            _traced[key] = made
    return made


def _trace(name: str, function) -> tuple[Mod, tuple[captured.Steps, ...]]:
    recorder, inputs = _Recorder(name), INPUTS[name]
    arguments = [Tracer(recorder, recorder.node("input", "real" if x == "score" else "int", value=x)) for x in inputs]
    code = function.__code__
    required = code.co_argcount - len(function.__defaults__ or ())
    if required > len(inputs) or (code.co_argcount < len(inputs) and not code.co_flags & 4):
        recorder.fail(f"a function of {code.co_argcount} arguments", f"one of {', '.join(inputs)}")
    standing_in = captured.standing_in(function, lambda path, array: _Table(recorder, path, array))
    result = standing_in(*arguments)
    if result is None:
        recorder.fail("a function that returns None", f"one that returns a {'score' if name[0] == 's' else 'bool'}")
    root = recorder.operand(result, "the result")
    made = []
    if name == "score_mod":
        root = recorder.cast(root, "real")
        made = [[recorder.derivative(root, arguments[0]._index)], recorder.scatters(root)]
    elif recorder.nodes[root].kind != "bool":
        recorder.fail("a function that returns a number", "one that returns a comparison: x != 0")
    names = tuple(table._name for table in recorder.tables)
    if len(names) > MAX_ARRAYS:
        recorder.fail(f"{len(names)} captured arrays, {', '.join(names)}", f"up to {MAX_ARRAYS}", ValueError)
    ways = {found.path: found.steps for found in captured.everything(function)}
    mod = Mod(*(reduced(recorder.nodes, roots) if roots else None for roots in ([root], *made)))
    return mod, tuple(ways[name] for name in names)
