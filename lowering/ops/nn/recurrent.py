"""ONNX LSTM, GRU and RNN (https://onnx.ai/onnx/operators/onnx__LSTM.html), computed in float32.

Each is a matmul of all inputs, followed by a recurrence for each direction (lowering/tensorir/recurrence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from tvm import relax, tirx

from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Size, Value
from ...tensorir.recurrence import BLOCK, GATES, Activation, Recurrence, make_plain_recurrence
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.kernels import compute
from ..math.matmul import emit_matmul, permute_axes, round_to
from ..tensor.concat import emit_concat
from ..tensor.reshape import reshape_to
from ..tensor.slice import emit_slice

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
# Default alpha and beta of the activations that have them.
_NUMBERS: dict[str, tuple[float, ...]] = {
    "Affine": (1.0, 0.0), "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,), "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5), "Elu": (1.0,), "Sigmoid": (), "Tanh": (), "Relu": (), "Softsign": (), "Softplus": (),
}  # fmt: skip
_FLOATS = ("float32", "float16", "bfloat16")

IndexMap = Callable[..., tuple[Any, Any]]
"""Index arithmetic: whether an element exists, and its index in the source tensor."""


class QuantizedWeights(Protocol):
    """W [directions, gates H, I] and R [directions, gates H, H] as int8."""

    @property
    def holds_lowest(self) -> bool:
        """Return whether -128 is among R's values."""

    def multiply_inputs(self, node: Node, x: Value, columns: int, index_map: IndexMap) -> Value:
        """Return x [L, B, I] times W, float32 [L, B, columns].

        index_map returns the index of W's element [i, column].
        """

    def pack_recurrent(self, node: Node, record: Recurrence, index_map: IndexMap) -> dict[str, Value]:
        """Return r, r_scale, r_zero and r_sum.

        index_map returns the index of R's element [block, k, gate, inside].
        """


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
    """Emit Y [L, directions, B, H], Y_h and Y_c [directions, B, H]; with layout 1 batches come first."""
    return emit_recurrent(node, "LSTM", x, w, r, bias, lengths, initial_h, initial_c, peepholes)


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
    """Emit Y and Y_h."""
    return emit_recurrent(node, "GRU", x, w, r, bias, lengths, initial_h)


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
    """Emit Y and Y_h."""
    return emit_recurrent(node, "RNN", x, w, r, bias, lengths, initial_h)


def emit_recurrent(
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
    """Emit the outputs.

    w is [directions, gates * H, I], and r [directions, gates * H, H], in the order of ONNX's gates. `quantized`
    replaces them where present.
    """
    gates, batch_first = GATES[kind], node.attr("layout", 0)
    optional_inputs = {"X": x, "W": w, "R": r, "initial_h": initial_h, "initial_c": initial_c}
    inputs = {name: value for name, value in optional_inputs.items() if value is not None}
    for name, value in inputs.items():
        if value.rank != 3 or value.dtype not in _FLOATS:
            raise node.error(
                "rnn.input_unsupported",
                f"input {name} is {value.dtype} of rank {value.rank}.",
                "Give it a float type and rank 3.",
            )
    dtype = x.dtype
    if batch_first:
        inputs = {name: permute_axes(node, v, [1, 0, 2]) if name not in ("W", "R") else v for name, v in inputs.items()}
    x = round_to(node, inputs["X"], "float32")
    length, batch, _ = x.shape
    width = number(node, "the size of an input (the last dimension of W)", w.shape[2])
    units = number(node, "the number of units (the last dimension of R)", r.shape[2])
    directions = _count_directions(node)
    x = assert_shape(node, x, (length, batch, width))
    w = assert_shape(node, w, (directions, gates * units, width))
    r = assert_shape(node, r, (directions, gates * units, units))
    if not units or not width:
        raise node.error("rnn.input_empty", "the number of units, or the input size, is 0.")
    if node.attr("hidden_size", units) != units:
        raise node.error(
            "rnn.hidden_size_mismatch", f"attribute hidden_size is {node.attr('hidden_size')}, for {units} units."
        )
    states = {}
    for name in ("h", *(["c"] if kind == "LSTM" else [])):
        state = inputs.get(f"initial_{name}")
        if state is None:
            state = node.emit(relax.op.zeros(node.shape_expr((directions, batch, units)), "float32"))
        states[name] = assert_shape(node, round_to(node, state, "float32"), (directions, batch, units))
    if bias is not None:
        bias = assert_shape(node, _require_rank(node, "B", bias, 2), (directions, 2 * gates * units))
    if peepholes is not None:
        peepholes = assert_shape(node, _require_rank(node, "P", peepholes, 2), (directions, 3 * units))
    if lengths is not None:
        lengths = assert_shape(node, _require_rank(node, "sequence_lens", lengths, 1), (batch,))
        if lengths.dtype != "int32":
            raise node.error(
                "rnn.sequence_lens_unsupported", f"input sequence_lens is {lengths.dtype}.", "Make it int32."
            )
    is_before_reset = kind == "GRU" and bool(node.attr("linear_before_reset", 0))
    results: list[tuple[Value, ...]] = []
    for direction in range(directions):
        record = Recurrence(
            kind=kind,
            units=units,
            activations=_read_activations(node, kind, directions)[direction],
            reverse=direction == 1 or node.attr("direction", "forward") == "reverse",
            clip=node.attr("clip", 0.0),
            input_forget=kind == "LSTM" and bool(node.attr("input_forget", 0)),
            linear_before_reset=is_before_reset,
            peepholes=peepholes is not None,
            lengths=lengths is not None,
            is_quantized=quantized is not None,
            holds_lowest=quantized is not None and quantized.holds_lowest,
        )
        tensors = _arrange_tensors(node, record, direction, x, w, r, bias, quantized)
        tensors |= {name: _slice_direction(node, state, direction) for name, state in states.items()}
        if peepholes is not None:
            tensors["peepholes"] = _arrange_peepholes(node, record, peepholes, direction)
        if lengths is not None:
            tensors["lengths"] = lengths
        sizes = {"y": (length, batch, units)}
        outputs = [(sizes.get(name, (batch, units)), "float32") for name in record.outputs()]
        arguments = [node.tensor(tensors[name]) for name in record.inputs()]
        results.append(node.call_tir(make_plain_recurrence(record), arguments, outputs, "recurrence"))
    return tuple(
        _emit_output(node, k, outputs_by_direction, dtype, batch_first)
        for k, outputs_by_direction in enumerate(zip(*results))
    )


def _count_directions(node: Node) -> int:
    legal = {"forward": 1, "reverse": 1, "bidirectional": 2}
    direction = node.attr("direction", "forward")
    if direction not in legal:
        raise node.error(
            "rnn.direction_unsupported", f"attribute direction is '{direction}'.", f"Use one of {', '.join(legal)}."
        )
    return legal[direction]


def _require_rank(node: Node, name: str, value: Value, rank: int) -> Value:
    if value.rank != rank:
        raise node.error("node.rank_unsupported", f"input {name} has rank {value.rank}.", f"Use rank {rank}.")
    return value


def _read_activations(node: Node, kind: str, directions: int) -> list[tuple[Activation, ...]]:
    """Return the activations of each direction.

    The alpha and beta numbers apply, in order, to the activations that have such parameters.
    """
    defaults = _DEFAULTS[kind]
    names = node.attr("activations", None) or list(defaults) * directions
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    by_lower_case = {name.lower(): name for name in _NUMBERS}
    if len(names) != len(defaults) * directions or any(name.lower() not in by_lower_case for name in names):
        raise node.error(
            "rnn.activations_unsupported",
            f"attribute activations is {names}.",
            f"Give {len(defaults) * directions} of {', '.join(_NUMBERS)}.",
        )
    attribute_numbers = [list(node.attr(f"activation_{name}", None) or []) for name in ("alpha", "beta")]
    activations = []
    for name in (by_lower_case[name.lower()] for name in names):
        numbers = [
            remaining.pop(0) if remaining else default for remaining, default in zip(attribute_numbers, _NUMBERS[name])
        ]
        activations.append(Activation(name, *numbers))
    count = len(defaults)
    return [tuple(activations[direction * count : (direction + 1) * count]) for direction in range(directions)]


def _slice_direction(node: Node, value: Value, direction: int) -> Value:
    """Return one direction of [directions, ...]."""
    shape = value.shape[1:]
    slice_of_one = emit_slice(node, value, [direction, *[0] * len(shape)], [1] * value.rank, (1, *shape))
    return reshape_to(node, slice_of_one, shape)


def _arrange(node: Node, value: Value, shape: tuple[int, ...], index_map: IndexMap) -> Value:
    """Return the float32 tensor whose element i is value[index_map(*i)[1]] where index_map(*i)[0] is true.

    Other elements are 0. A constant stays constant. Conditions and indices are arithmetic on NumPy arrays or on
    expressions.
    """
    if value.constant is not None:
        index = np.indices(shape)
        exists, source_index = index_map(*index)
        safe = tuple(np.where(exists, i, 0) for i in source_index)
        return node.constant(np.where(exists, value.constant.astype(np.float32)[safe], np.float32(0)))

    def element(index: tuple[Any, ...], x: Any) -> Any:
        exists, source_index = index_map(*index)
        return tirx.if_then_else(exists, x(*source_index).astype("float32"), tirx.const(0.0, "float32"))

    return compute(node, "arranged", element, [value], shape, dtype="float32")


def _arrange_tensors(
    node: Node,
    record: Recurrence,
    direction: int,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    quantized: QuantizedWeights | None,
) -> dict[str, Value]:
    """Return x, r with its additional tensors, and recurrent of the record, for one direction."""
    units, gates, blocks = record.units, record.gates, record.blocks
    columns = blocks * gates * BLOCK

    def locate_unit(column: Any) -> tuple[Any, Any]:
        """Return gate and unit of a column of x."""
        return column // BLOCK % gates, column // (gates * BLOCK) * BLOCK + column % BLOCK

    def map_w(i: Any, column: Any) -> tuple[Any, Any]:
        gate, j = locate_unit(column)
        return j < units, (i * 0 + direction, gate * units + j, i)

    def map_r(block: Any, k: Any, gate: Any, inside: Any) -> tuple[Any, Any]:
        j = block * BLOCK + inside
        return j < units, (k * 0 + direction, gate * units + j, k)

    def map_bias(first: int, hidden: bool) -> Callable[[Any], tuple[Any, Any]]:
        """Return the index map of half `first` of the biases.

        hidden: whether it includes the biases of gate h.
        """

        def index_map(column: Any) -> tuple[Any, Any]:
            gate, j = locate_unit(column)
            exists = (j < units) & (gate < (gates if hidden else 2))
            return exists, (column * 0 + direction, first * gates * units + gate * units + j)

        return index_map

    if quantized is not None:
        matmul, tensors = (
            quantized.multiply_inputs(node, x, columns, map_w),
            quantized.pack_recurrent(node, record, map_r),
        )
    else:
        matmul = emit_matmul(node, x, _arrange(node, w, (read_input_width(w), columns), map_w))
        tensors = {"r": _arrange(node, r, (blocks, units, gates, BLOCK), map_r)}
    if bias is not None:
        halves = [
            _arrange(node, bias, (columns,), map_bias(0, True)),
            _arrange(node, bias, (columns,), map_bias(1, not record.linear_before_reset)),
        ]
        for half in halves:
            matmul = node.emit(relax.op.add(node.tensor(matmul), node.tensor(half)))
    tensors["x"] = matmul
    if record.linear_before_reset:
        first = (gates + 2) * units
        recurrent_bias = node.constant(np.zeros(blocks * BLOCK, np.float32))
        if bias is not None:
            recurrent_bias = _arrange(
                node, bias, (blocks * BLOCK,), lambda j: (j < units, (j * 0 + direction, first + j))
            )
        tensors["recurrent"] = recurrent_bias
    return tensors


def read_input_width(w: Value) -> int:
    width = w.shape[2]
    assert isinstance(width, int)
    return width


def _arrange_peepholes(node: Node, record: Recurrence, peepholes: Value, direction: int) -> Value:
    units = record.units
    return _arrange(
        node, peepholes, (3, record.blocks * BLOCK), lambda gate, j: (j < units, (j * 0 + direction, gate * units + j))
    )


def _emit_output(node: Node, output_index: int, by_direction: tuple[Value, ...], dtype: str, batch_first: int) -> Value:
    """Emit Y, or the last state, of all directions."""
    axis = 1 if output_index == 0 else 0
    shape: tuple[Size, ...] = (*by_direction[0].shape[:axis], 1, *by_direction[0].shape[axis:])
    y = emit_concat(node, [reshape_to(node, output, shape) for output in by_direction], axis)
    if batch_first:
        y = permute_axes(node, y, [2, 0, 1, 3] if output_index == 0 else [1, 0, 2])
    return round_to(node, y, dtype)
