"""Values that a decoder computes from positions alone: angles, position embeddings, masks, but not tokens or caches.

Such values can be computed before the model runs, for every possible position. This module finds them, and evaluates
them by onnx's own reference evaluator for one sequence of any number of new tokens after any number of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ...errors import ModelError
from ..loading.legality import iterate_bodies
from ..rewriting.matching import Size, attribute, dims, is_op, operand, read_static_sizes
from ..rewriting.opset import opset
from .cache_forms import LENGTH_AXIS

# Numbers of earlier and of new tokens for which rows of one position are compared; and the maximum of these positions.
_SHORT_CALL, _LONGER_CALL, _LATER_CALL = (0, 5), (0, 7), (3, 4)
_MIN_POSITIONS = 7


class Positions:
    """The values of a graph that depend only on sizes, and on the meaning of its mask and position ids.

    ids [1, S] are the token ids, or embeddings [1, S, H]. mask [1, P + S] and position_ids are optional; the latter are
    [1, S], or [n, 1, S] of n times the same. pasts are the caches [1, H, P, D]. Every other input is data, as these
    are.
    """

    def __init__(
        self,
        model: ir.Model,
        ids: ir.Value,
        mask: ir.Value | None,
        position_ids: ir.Value | None,
        pasts: Sequence[ir.Value],
    ) -> None:
        self._model, self._ids, self._mask, self._position_ids, self._pasts = model, ids, mask, position_ids, pasts
        position_inputs = {value for value in (mask, position_ids) if value is not None}
        self._data: set[ir.Value] = {value for value in model.graph.inputs if value not in position_inputs}
        self._varying = set(position_inputs)
        for node in model.graph:
            is_size, read_values = is_op(node, "Shape", "Size"), _list_read_values(node)
            if not is_size and any(value in self._data for value in read_values):
                self._data.update(node.outputs)
            elif any(value in self._varying or (is_size and value in self._data) for value in read_values):
                self._varying.update(node.outputs)
        # node outputs and inputs, but not initializers, which are constant
        self._computed = {v for node in model.graph for v in node.outputs if v not in self._data} | position_inputs

    def __contains__(self, value: ir.Value | None) -> bool:
        """Return whether the value is computed from positions and sizes."""
        return value in self._computed

    def varies(self, value: ir.Value | None) -> bool:
        """Return whether the value is computed from positions and sizes, and not from constants alone."""
        return value in self._varying

    def is_data(self, value: ir.Value | None) -> bool:
        """Return whether the value depends on tokens."""
        return value in self._data

    def is_data_node(self, node: ir.Node) -> bool:
        """Return whether the node's results depend on tokens."""
        return any(output in self._data for output in node.outputs)

    def at(self, values: Sequence[ir.Value], past: int, new: int, padding: int = 0) -> list[np.ndarray]:
        """Return the values for `new` tokens after `past` others; the first `padding` tokens are padding.

        Raises:
            ModelError: The values cannot be computed.
        """
        feeds = self._make_feeds(past, new, padding)
        needed: dict[ir.Node, None] = {}
        for value in values:
            self._collect_nodes(value.producer(), needed, feeds, lambda size: self._evaluate_size(size, past, new))
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in self._model.graph if node in needed],
            "positions",
            [onnx.helper.make_tensor_value_info(n, _element_type(a), a.shape) for n, a in feeds.items()],
            [onnx.helper.make_value_info(v.name or "", onnx.TypeProto()) for v in values],
        )
        imports = [onnx.helper.make_opsetid("", opset(self._model))]
        try:
            evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports))
            with np.errstate(all="ignore"):  # the lowest float32 is -inf in float16, and hides keys as well
                arrays = evaluator.run(None, feeds)
        except Exception as error:
            names = ", ".join(f"'{value.name}'" for value in values)
            raise ModelError(
                "serve.positions_out_of_range",
                f"serve: {names}, which the model computes from positions, cannot be computed for positions {past} "
                f"to {past + new - 1}: {error}. Choose a `context` within the model's own limit.",
            ) from error
        return [np.asarray(array) for array in arrays]

    def _make_feeds(self, past: int, new: int, padding: int) -> dict[str, np.ndarray]:
        tokens_shape = read_static_sizes([1, new, *dims(self._ids)[2:]]) or ()
        feeds = {str(self._ids.name): np.zeros(tokens_shape, _numpy_dtype(self._ids))}
        if self._mask is not None:
            feeds[str(self._mask.name)] = (np.arange(past + new) >= padding).astype(_numpy_dtype(self._mask))[None]
        if self._position_ids is not None:
            tokens = np.maximum(np.arange(past, past + new) - padding, 0)
            position_shape = read_static_sizes([*dims(self._position_ids)[:-2], 1, new]) or ()
            feeds[str(self._position_ids.name)] = np.broadcast_to(
                tokens.astype(_numpy_dtype(self._position_ids)), position_shape
            )
        for value in self._pasts:
            shape = [past if axis == LENGTH_AXIS else size for axis, size in enumerate(dims(value))]
            feeds[str(value.name)] = np.broadcast_to(np.zeros((), _numpy_dtype(value)), read_static_sizes(shape) or ())
        return feeds

    def _evaluate_size(self, size: Size, past: int, new: int) -> int | None:
        """Return a size of a value, if it is a number, S, P or their sum."""
        if isinstance(size, int):
            return size
        tokens = str(dims(self._ids)[1])
        sizes = {tokens: new}
        for before in [str(dims(value)[LENGTH_AXIS]) for value in self._pasts[:1]]:
            sizes |= {before: past, f"{before} + {tokens}": past + new, f"{tokens} + {before}": past + new}
        if self._mask is not None:
            sizes.setdefault(str(dims(self._mask)[1]), past + new)
        return sizes.get(str(size))

    def _collect_nodes(
        self,
        last: ir.Node | None,
        needed: dict[ir.Node, None],
        feeds: dict[str, np.ndarray],
        evaluate_size: Callable[[Size], int | None],
    ) -> None:
        """Add the nodes and feeds that the results of a node are computed from."""
        pending = [last]
        while pending:
            node = pending.pop()
            if node is None or node in needed or str(node.outputs[0].name) in feeds:
                continue
            if is_op(node, "Shape") and str(operand(node, 0).name) not in feeds:
                sizes = [evaluate_size(size) for size in dims(operand(node, 0))]
                if operand(node, 0) in self._data and None not in sizes:
                    bounds = slice(attribute(node, "start", 0), attribute(node, "end", None))
                    feeds[str(node.outputs[0].name)] = np.array(sizes[bounds], np.int64)
                    continue
            needed[node] = None
            for value in _list_read_values(node):
                if value.is_initializer():
                    feeds[str(value.name)] = _read_elements(value)
                elif value in self._data and not value.is_graph_input():
                    raise ModelError(
                        "serve.shape_unknown",
                        f"serve: node '{node.name}' ({node.op_type}) reads the shape of '{value.name}', which the "
                        "sizes of the inputs do not determine.",
                    )
                elif value in self._data and str(value.name) not in feeds:
                    raise ModelError(
                        "serve.input_unsupported",
                        f"serve: the model has an input '{value.name}' other than tokens and caches.",
                    )
                pending.append(value.producer())


def evaluate_rows(
    positions: Positions, values: Sequence[ir.Value], context: int
) -> dict[ir.Value, tuple[np.ndarray, int]]:
    """Return the values that have a row for each token: rows for all positions up to the context, and their axis.

    The other values are shared by all tokens, and sizes.

    Raises:
        ModelError: A value depends on more than the position.
    """
    if not values:
        return {}
    short_arrays, longer_arrays, later_arrays = (
        positions.at(values, *call) for call in (_SHORT_CALL, _LONGER_CALL, _LATER_CALL)
    )
    axes = {
        value: axis
        for value, arrays in zip(values, zip(short_arrays, longer_arrays, later_arrays))
        if (axis := _find_row_axis(value, *arrays)) is not None
    }
    rows = dict(zip(axes, positions.at(list(axes), 0, max(context, _MIN_POSITIONS)))) if axes else {}
    for value, *compared in zip(values, short_arrays, later_arrays):
        for array, (first, count) in zip(compared, (_SHORT_CALL, _LATER_CALL)) if value in axes else ():
            if not np.allclose(array, np.take(rows[value], range(first, first + count), axes[value]), 1e-6, 1e-6):
                raise ModelError(
                    "serve.position_depends_on_length",
                    f"serve: '{value.name}' of one position depends on the length of its sequence, as dynamic and "
                    "long rotary scaling do.",
                )
    return {value: (rows[value], axis) for value, axis in axes.items()}


def _find_row_axis(value: ir.Value, short: np.ndarray, longer: np.ndarray, later: np.ndarray) -> int | None:
    """Return the axis over tokens, None if there is none."""
    axes = [axis for axis, (x, y) in enumerate(zip(short.shape, longer.shape)) if x != y]
    if short.ndim == longer.ndim == later.ndim and not axes:
        # Integers that differ are sizes, from now on those of the packed rows.
        if short.dtype.kind != "i" and not (np.array_equal(short, longer) and np.array_equal(short, later)):
            raise ModelError(
                "serve.value_depends_on_length",
                f"serve: '{value.name}' depends on how many tokens a call has, or how many came before.",
            )
        return None
    if len(axes) != 1 or later.shape[axes[0]] != _LATER_CALL[1]:
        raise ModelError(
            "serve.value_shape_unsupported",
            f"serve: '{value.name}' is neither a row for each position nor the same for all positions.",
        )
    return axes[0]


def _list_read_values(node: ir.Node) -> list[ir.Value]:
    """Return the values that the node reads, and that its bodies read of the graph around them."""
    values = [value for value in node.inputs if value is not None]
    for body in iterate_bodies(node):
        for inner in body.all_nodes():
            values += [v for v in inner.inputs if v is not None and v.graph is not body]
    return values


def _read_elements(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _numpy_dtype(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return np.dtype(value.dtype.numpy())


def _element_type(array: np.ndarray) -> int:
    return onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
