"""ONNX LSTM, GRU and RNN (https://onnx.ai/onnx/operators/onnx__LSTM.html), computed in float32.

Each is a matmul of all inputs, followed by a recurrence for each direction (lowering/tensorir/recurrence.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ...tensorir.recurrence import GATES, Activation, Recurrence, make_plain_recurrence
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.requirements import read_choice, require_dtype, require_rank, require_tensor
from ..math.matmul import permute_axes, round_to
from ..tensor.concat import emit_concat
from ..tensor.reshape import reshape_to
from ..tensor.slice import emit_slice
from .recurrent_weights import QuantizedWeights, arrange_peepholes, arrange_tensors

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
# Default alpha and beta of the activations that have them.
_NUMBERS: dict[str, tuple[float, ...]] = {
    "Affine": (1.0, 0.0), "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,), "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5), "Elu": (1.0,), "Sigmoid": (), "Tanh": (), "Relu": (), "Softsign": (), "Softplus": (),
}  # fmt: skip
_FLOATS = ("float32", "float16", "bfloat16")


@op("LSTM", since=7)
@op("GRU", since=7)
@op("RNN", since=7)
def lower_recurrent(
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
    """Emit Y [L, directions, B, H], and Y_h and of an LSTM Y_c [directions, B, H]; with layout 1 batches come first.

    Only an LSTM has initial_c and peepholes.
    """
    return emit_recurrent(node, node.op_type, x, w, r, bias, lengths, initial_h, initial_c, peepholes)


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
    _check_floats(node, inputs)
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
    _check_units(node, units, width)
    states = _read_states(node, kind, inputs, (directions, batch, units))
    for name, value in (("B", bias), ("P", peepholes)):
        require_rank(node, name, value, "[directions, elements]")
    if bias is not None:
        bias = assert_shape(node, bias, (directions, 2 * gates * units))
    if peepholes is not None:
        peepholes = assert_shape(node, peepholes, (directions, 3 * units))
    if lengths is not None:
        lengths = _read_lengths(node, lengths, batch)
    has_peepholes, has_lengths = peepholes is not None, lengths is not None
    records = _build_records(
        node, kind, units, directions, peepholes=has_peepholes, lengths=has_lengths, quantized=quantized
    )
    results: list[tuple[Value, ...]] = []
    for direction, record in enumerate(records):
        tensors = arrange_tensors(node, record, direction, x, w, r, bias, quantized)
        tensors |= {name: _slice_direction(node, state, direction) for name, state in states.items()}
        if peepholes is not None:
            tensors["peepholes"] = arrange_peepholes(node, record, peepholes, direction)
        if lengths is not None:
            tensors["lengths"] = lengths
        results.append(_emit_recurrence(node, record, tensors, (length, batch, units)))
    return tuple(
        _emit_output(node, k, outputs_by_direction, dtype, batch_first)
        for k, outputs_by_direction in enumerate(zip(*results))
    )


def _check_floats(node: Node, inputs: Mapping[str, Value]) -> None:
    """Raise NodeError if an input is not of a float type and rank 3."""
    for name, value in inputs.items():
        require_tensor(node, name, value, _FLOATS, "[length, batch, elements]", code="rnn.input_unsupported")


def _check_units(node: Node, units: int, width: int) -> None:
    """Raise NodeError if there are no units or no inputs, or for another number of units than the attribute's."""
    if not units or not width:
        raise node.error("rnn.input_empty", "the number of units, or the input size, is 0.")
    if node.attr("hidden_size", units) != units:
        raise node.error(
            "rnn.hidden_size_mismatch", f"attribute hidden_size is {node.attr('hidden_size')}, for {units} units."
        )


def _read_states(node: Node, kind: str, inputs: Mapping[str, Value], shape: Shape) -> dict[str, Value]:
    """Return the initial states, float32 [directions, B, H]: h, and c of an LSTM; zeros where an input is missing."""
    states = {}
    for name in ("h", *(["c"] if kind == "LSTM" else [])):
        state = inputs.get(f"initial_{name}")
        if state is None:
            state = node.emit(relax.op.zeros(node.shape_expr(shape), "float32"))
        states[name] = assert_shape(node, round_to(node, state, "float32"), shape)
    return states


def _read_lengths(node: Node, lengths: Value, batch: Size) -> Value:
    """Return sequence_lens, int32 [B]."""
    require_rank(node, "sequence_lens", lengths, "[batch]")
    lengths = assert_shape(node, lengths, (batch,))
    require_dtype(node, "sequence_lens", lengths, "int32", code="rnn.sequence_lens_unsupported")
    return lengths


def _count_directions(node: Node) -> int:
    legal = {"forward": 1, "reverse": 1, "bidirectional": 2}
    direction = read_choice(node, "direction", "forward", legal, code="rnn.direction_unsupported")
    return legal[direction]


def _build_records(
    node: Node,
    kind: str,
    units: int,
    directions: int,
    *,
    peepholes: bool,
    lengths: bool,
    quantized: QuantizedWeights | None,
) -> list[Recurrence]:
    """Return the recurrence of each direction.

    peepholes and lengths tell whether these inputs are present.
    """
    return [
        Recurrence(
            kind=kind,
            units=units,
            activations=activations,
            reverse=direction == 1 or node.attr("direction", "forward") == "reverse",
            clip=node.attr("clip", 0.0),
            input_forget=kind == "LSTM" and bool(node.attr("input_forget", 0)),
            linear_before_reset=kind == "GRU" and bool(node.attr("linear_before_reset", 0)),
            peepholes=peepholes,
            lengths=lengths,
            is_quantized=quantized is not None,
            holds_lowest=quantized is not None and quantized.holds_lowest,
        )
        for direction, activations in enumerate(_read_activations(node, kind, directions))
    ]


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


def _emit_recurrence(node: Node, record: Recurrence, tensors: Mapping[str, Value], shape: Shape) -> tuple[Value, ...]:
    """Emit the outputs of one direction: y of this shape [L, B, H], and the last states [B, H]."""
    sizes = {"y": shape}
    outputs = [(sizes.get(name, shape[1:]), "float32") for name in record.outputs()]
    arguments = [node.tensor(tensors[name]) for name in record.inputs()]
    return node.call_tir(make_plain_recurrence(record), arguments, outputs, "recurrence")


def _emit_output(node: Node, output_index: int, by_direction: tuple[Value, ...], dtype: str, batch_first: int) -> Value:
    """Emit Y, or the last state, of all directions."""
    axis = 1 if output_index == 0 else 0
    shape: tuple[Size, ...] = (*by_direction[0].shape[:axis], 1, *by_direction[0].shape[axis:])
    y = emit_concat(node, [reshape_to(node, output, shape) for output in by_direction], axis)
    if batch_first:
        y = permute_axes(node, y, [2, 0, 1, 3] if output_index == 0 else [1, 0, 2])
    return round_to(node, y, dtype)
