"""ONNX LSTM, GRU and RNN (https://onnx.ai/onnx/operators/onnx__LSTM.html): a matmul of all inputs, then a recurrence
for each direction (lowering/tensorir/recurrence.py). Computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from tvm import relax, tirx

from ..importing.compute import number
from ..importing.node import Node
from ..importing.values import Size, Value
from ..tensorir.recurrence import BLOCK, GATES, Activation, Recurrence, plain_recurrence
from . import op
from .asserted import asserted
from .kernels import compute
from .matmul import emit_matmul, permuted, rounded
from .movement import join
from .reshape import reshape_to
from .slice import cut

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
# Of activations that have them: alpha and beta where none are given.
_NUMBERS: dict[str, tuple[float, ...]] = {
    "Affine": (1.0, 0.0), "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,), "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5), "Elu": (1.0,), "Sigmoid": (), "Tanh": (), "Relu": (), "Softsign": (), "Softplus": (),
}  # fmt: skip
_FLOATS = ("float32", "float16", "bfloat16")

Place = Callable[..., tuple[Any, Any]]
"""Of arithmetic on indices: whether an element exists, and its index in the tensor that it comes from."""


class QuantizedWeights(Protocol):
    """W [directions, gates H, I] and R [directions, gates H, H] as int8."""

    @property
    def holds_lowest(self) -> bool:
        """Whether -128 is among R's values."""

    def multiply_inputs(self, node: Node, x: Value, columns: int, place: Place) -> Value:
        """Return x [L, B, I] times W, float32 [L, B, columns]; `place` has the index of W's element [i, column]."""

    def pack_recurrent(self, node: Node, record: Recurrence, place: Place) -> dict[str, Value]:
        """Return r, r_scale, r_zero and r_sum; `place` has the index of R's element [block, k, gate, inside]."""


@op("LSTM", since=7)
def lstm(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    initial_c: Value | None = None,
    peepholes: Value | None = None,
) -> tuple[Value, ...]:
    """Y [L, directions, B, H], Y_h and Y_c [directions, B, H]; with layout 1 batches come first."""
    return recurrent(node, "LSTM", x, w, r, bias, lengths, initial_h, initial_c, peepholes)


@op("GRU", since=7)
def gru(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
) -> tuple[Value, ...]:
    """Y and Y_h."""
    return recurrent(node, "GRU", x, w, r, bias, lengths, initial_h)


@op("RNN", since=7)
def rnn(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
) -> tuple[Value, ...]:
    """Y and Y_h."""
    return recurrent(node, "RNN", x, w, r, bias, lengths, initial_h)


def recurrent(
    node: Node,
    kind: str,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    initial_c: Value | None = None,
    peepholes: Value | None = None,
    quantized: QuantizedWeights | None = None,
) -> tuple[Value, ...]:
    """Return the outputs.

    w is [directions, gates * H, I], and r [directions, gates * H, H], in the order of ONNX's gates. `quantized` takes
    their place where it is given.
    """
    gates, batch_first = GATES[kind], node.attr("layout", 0)
    named = {"X": x, "W": w, "R": r, "initial_h": initial_h, "initial_c": initial_c}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        if value.rank != 3 or value.dtype not in _FLOATS:
            raise node.error(f"input {name} is {value.dtype} of rank {value.rank}.", "Make it floats of rank 3.")
    dtype = x.dtype
    if batch_first:
        given = {name: permuted(node, v, [1, 0, 2]) if name not in ("W", "R") else v for name, v in given.items()}
    x = rounded(node, given["X"], "float32")
    length, batch, _ = x.shape
    width = number(node, "the size of an input (the last dimension of W)", w.shape[2])
    units = number(node, "the number of units (the last dimension of R)", r.shape[2])
    directions = _directions(node)
    x = asserted(node, x, (length, batch, width))
    w = asserted(node, w, (directions, gates * units, width))
    r = asserted(node, r, (directions, gates * units, units))
    if not units or not width:
        raise node.error("it has no units, or no inputs.")
    if node.attr("hidden_size", units) != units:
        raise node.error(f"attribute hidden_size is {node.attr('hidden_size')}, for {units} units.")
    states = {}
    for name in ("h", *(["c"] if kind == "LSTM" else [])):
        state = given.get(f"initial_{name}")
        if state is None:
            state = node.emit(relax.op.zeros(node.shape_expr((directions, batch, units)), "float32"))
        states[name] = asserted(node, rounded(node, state, "float32"), (directions, batch, units))
    if bias is not None:
        bias = asserted(node, _of_rank(node, "B", bias, 2), (directions, 2 * gates * units))
    if peepholes is not None:
        peepholes = asserted(node, _of_rank(node, "P", peepholes, 2), (directions, 3 * units))
    if lengths is not None:
        lengths = asserted(node, _of_rank(node, "sequence_lens", lengths, 1), (batch,))
        if lengths.dtype != "int32":
            raise node.error(f"input sequence_lens is {lengths.dtype}.", "Make it int32.")
    before = kind == "GRU" and bool(node.attr("linear_before_reset", 0))
    found: list[tuple[Value, ...]] = []
    for at in range(directions):
        record = Recurrence(
            kind=kind,
            units=units,
            activations=_activations(node, kind, directions)[at],
            reverse=at == 1 or node.attr("direction", "forward") == "reverse",
            clip=node.attr("clip", 0.0),
            input_forget=kind == "LSTM" and bool(node.attr("input_forget", 0)),
            linear_before_reset=before,
            peepholes=peepholes is not None,
            lengths=lengths is not None,
            is_quantized=quantized is not None,
            holds_lowest=quantized is not None and quantized.holds_lowest,
        )
        tensors = _tensors(node, record, at, x, w, r, bias, quantized)
        tensors |= {name: _part(node, state, at) for name, state in states.items()}
        if peepholes is not None:
            tensors["peepholes"] = _peepholes(node, record, peepholes, at)
        if lengths is not None:
            tensors["lengths"] = lengths
        sizes = {"y": (length, batch, units)}
        outputs = [(sizes.get(name, (batch, units)), "float32") for name in record.outputs()]
        arguments = [node.tensor(tensors[name]) for name in record.inputs()]
        found.append(node.call_tir(plain_recurrence(record), arguments, outputs, "recurrence"))
    return tuple(_output(node, k, parts, dtype, batch_first) for k, parts in enumerate(zip(*found)))


def _directions(node: Node) -> int:
    legal = {"forward": 1, "reverse": 1, "bidirectional": 2}
    given = node.attr("direction", "forward")
    if given not in legal:
        raise node.error(f"attribute direction is '{given}'.", f"Use one of {', '.join(legal)}.")
    return legal[given]


def _of_rank(node: Node, name: str, value: Value, rank: int) -> Value:
    if value.rank != rank:
        raise node.error(f"input {name} has rank {value.rank}.", f"Make it {rank}.")
    return value


def _activations(node: Node, kind: str, directions: int) -> list[tuple[Activation, ...]]:
    """Of each direction. Numbers belong to those of the activations that have some, in their order."""
    defaults = _DEFAULTS[kind]
    names = node.attr("activations", None) or list(defaults) * directions
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    by_lower_case = {name.lower(): name for name in _NUMBERS}
    if len(names) != len(defaults) * directions or any(name.lower() not in by_lower_case for name in names):
        raise node.error(
            f"attribute activations is {names}.", f"Give {len(defaults) * directions} of {', '.join(_NUMBERS)}."
        )
    given = [list(node.attr(f"activation_{name}", None) or []) for name in ("alpha", "beta")]
    made = []
    for name in (by_lower_case[name.lower()] for name in names):
        numbers = [left.pop(0) if left else default for left, default in zip(given, _NUMBERS[name])]
        made.append(Activation(name, *numbers))
    count = len(defaults)
    return [tuple(made[at * count : (at + 1) * count]) for at in range(directions)]


def _part(node: Node, value: Value, at: int) -> Value:
    """Of [directions, ...] one direction."""
    shape = value.shape[1:]
    one = cut(node, value, [at, *[0] * len(shape)], [1] * value.rank, (1, *shape))
    return reshape_to(node, one, shape)


def _arranged(node: Node, value: Value, shape: tuple[int, ...], place: Place) -> Value:
    """The float32 tensor of `shape` whose element i is value[place(*i)[1]] where place(*i)[0] holds, and 0 elsewhere.

    Of a constant it is one. Conditions and indices are arithmetic, of NumPy's arrays or of expressions.
    """
    if value.constant is not None:
        index = np.indices(shape)
        there, at = place(*index)
        safe = tuple(np.where(there, i, 0) for i in at)
        return node.constant(np.where(there, value.constant.astype(np.float32)[safe], np.float32(0)))

    def element(index: tuple[Any, ...], x: Any) -> Any:
        there, at = place(*index)
        return tirx.if_then_else(there, x(*at).astype("float32"), tirx.const(0.0, "float32"))

    return compute(node, "arranged", element, [value], shape, dtype="float32")


def _tensors(
    node: Node,
    record: Recurrence,
    at: int,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    quantized: QuantizedWeights | None,
) -> dict[str, Value]:
    """x, r and what belongs to it, and recurrent of the record, for one direction."""
    units, gates, blocks = record.units, record.gates, record.blocks
    columns = blocks * gates * BLOCK

    def unit(column: Any) -> tuple[Any, Any]:
        """Gate and unit of a column of x."""
        return column // BLOCK % gates, column // (gates * BLOCK) * BLOCK + column % BLOCK

    def of_w(i: Any, column: Any) -> tuple[Any, Any]:
        gate, j = unit(column)
        return j < units, (i * 0 + at, gate * units + j, i)

    def of_r(block: Any, k: Any, gate: Any, inside: Any) -> tuple[Any, Any]:
        j = block * BLOCK + inside
        return j < units, (k * 0 + at, gate * units + j, k)

    def of_bias(first: int, hidden: bool) -> Callable[[Any], tuple[Any, Any]]:
        """Of half `first` of the biases; hidden: those of the gate h, too."""

        def place(column: Any) -> tuple[Any, Any]:
            gate, j = unit(column)
            there = (j < units) & (gate < (gates if hidden else 2))
            return there, (column * 0 + at, first * gates * units + gate * units + j)

        return place

    if quantized is not None:
        matmul, tensors = (
            quantized.multiply_inputs(node, x, columns, of_w),
            quantized.pack_recurrent(node, record, of_r),
        )
    else:
        matmul = emit_matmul(node, x, _arranged(node, w, (record_width(w), columns), of_w))
        tensors = {"r": _arranged(node, r, (blocks, units, gates, BLOCK), of_r)}
    if bias is not None:
        halves = [
            _arranged(node, bias, (columns,), of_bias(0, True)),
            _arranged(node, bias, (columns,), of_bias(1, not record.linear_before_reset)),
        ]
        for half in halves:
            matmul = node.emit(relax.op.add(node.tensor(matmul), node.tensor(half)))
    tensors["x"] = matmul
    if record.linear_before_reset:
        first = (gates + 2) * units
        recurrent = node.constant(np.zeros(blocks * BLOCK, np.float32))
        if bias is not None:
            recurrent = _arranged(node, bias, (blocks * BLOCK,), lambda j: (j < units, (j * 0 + at, first + j)))
        tensors["recurrent"] = recurrent
    return tensors


def record_width(w: Value) -> int:
    width = w.shape[2]
    assert isinstance(width, int)
    return width


def _peepholes(node: Node, record: Recurrence, given: Value, at: int) -> Value:
    units = record.units
    return _arranged(
        node, given, (3, record.blocks * BLOCK), lambda gate, j: (j < units, (j * 0 + at, gate * units + j))
    )


def _output(node: Node, number_of: int, parts: tuple[Value, ...], dtype: str, batch_first: int) -> Value:
    """Y, or the last state, of all directions."""
    axis = 1 if number_of == 0 else 0
    shape: tuple[Size, ...] = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    y = join(node, [reshape_to(node, part, shape) for part in parts], axis)
    if batch_first:
        y = permuted(node, y, [2, 0, 1, 3] if number_of == 0 else [1, 0, 2])
    return rounded(node, y, dtype)
