"""Weights and biases of LSTM, GRU and RNN in the order of their kernel: blocks of units, with all gates of a unit.

    ONNX: W [directions, gates H, I], R [directions, gates H, H], B [directions, 2 gates H]
    kernel: x [L, B, blocks gates BLOCK], r [blocks, H, gates, BLOCK], biases added to x

Units beyond the last one are 0. Constants stay constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.recurrence import BLOCK, Recurrence
from ..helpers.kernels import compute
from ..math.matmul import emit_matmul

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


@dataclass(frozen=True)
class _DirectionMaps:
    """The index maps from the tensors of the record to the weights and biases of one direction.

    A column of x is an element of a block of units, for one gate. Units beyond the last one do not exist.
    """

    record: Recurrence
    direction: int

    def map_w(self, i: Any, column: Any) -> tuple[Any, Any]:
        gate, j = self._locate_unit(column)
        return j < self.record.units, (i * 0 + self.direction, gate * self.record.units + j, i)

    def map_r(self, block: Any, k: Any, gate: Any, inside: Any) -> tuple[Any, Any]:
        j = block * BLOCK + inside
        return j < self.record.units, (k * 0 + self.direction, gate * self.record.units + j, k)

    def map_bias(self, first: int, hidden: bool) -> Callable[[Any], tuple[Any, Any]]:
        """Return the index map of half `first` of the biases.

        hidden: whether it includes the biases of gate h.
        """
        units, gates = self.record.units, self.record.gates

        def index_map(column: Any) -> tuple[Any, Any]:
            gate, j = self._locate_unit(column)
            exists = (j < units) & (gate < (gates if hidden else 2))
            return exists, (column * 0 + self.direction, first * gates * units + gate * units + j)

        return index_map

    def map_recurrent_bias(self, j: Any) -> tuple[Any, Any]:
        units = self.record.units
        return j < units, (j * 0 + self.direction, (self.record.gates + 2) * units + j)

    def _locate_unit(self, column: Any) -> tuple[Any, Any]:
        """Return gate and unit of a column of x."""
        gates = self.record.gates
        return column // BLOCK % gates, column // (gates * BLOCK) * BLOCK + column % BLOCK


def arrange_tensors(
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
    columns, maps = blocks * gates * BLOCK, _DirectionMaps(record, direction)
    if quantized is not None:
        matmul, tensors = (
            quantized.multiply_inputs(node, x, columns, maps.map_w),
            quantized.pack_recurrent(node, record, maps.map_r),
        )
    else:
        matmul = emit_matmul(node, x, _arrange(node, w, (read_input_width(w), columns), maps.map_w))
        tensors = {"r": _arrange(node, r, (blocks, units, gates, BLOCK), maps.map_r)}
    if bias is not None:
        halves = [
            _arrange(node, bias, (columns,), maps.map_bias(0, True)),
            _arrange(node, bias, (columns,), maps.map_bias(1, not record.linear_before_reset)),
        ]
        for half in halves:
            matmul = node.emit(relax.op.add(node.tensor(matmul), node.tensor(half)))
    tensors["x"] = matmul
    if record.linear_before_reset:
        recurrent_bias = node.constant(np.zeros(blocks * BLOCK, np.float32))
        if bias is not None:
            recurrent_bias = _arrange(node, bias, (blocks * BLOCK,), maps.map_recurrent_bias)
        tensors["recurrent"] = recurrent_bias
    return tensors


def arrange_peepholes(node: Node, record: Recurrence, peepholes: Value, direction: int) -> Value:
    """Return the peepholes of one direction, [3, units of all blocks]."""
    units = record.units
    return _arrange(
        node, peepholes, (3, record.blocks * BLOCK), lambda gate, j: (j < units, (j * 0 + direction, gate * units + j))
    )


def read_input_width(w: Value) -> int:
    width = w.shape[2]
    assert isinstance(width, int)
    return width


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
