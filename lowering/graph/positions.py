"""What a decoder computes of positions alone: angles, embeddings of positions, masks. Never of tokens or caches.

Such values can be computed before the model runs, for every position that there will be. Here they are found, and
evaluated by onnx's own reference evaluator for one sequence of any number of new tokens behind any number of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ..errors import ModelError
from ..fusion.matching import Size, attribute, dims, is_op, numbers, operand
from ..fusion.opset import opset
from .cache_forms import LENGTH_AXIS

# New tokens behind others, of which rows of one position are compared; and the most positions that these are.
_FEW, _MORE, _BEHIND = (0, 5), (0, 7), (3, 4)
_COMPARED = 7


class Positions:
    """The values of a graph that depend on its mask and position ids, by what these are, and on sizes alone.

    ids [1, S] are the token ids, or embeddings [1, S, H]; mask [1, P + S] and position_ids [1, S], or [n, 1, S] of n
    times the same, are there or not; pasts are the caches [1, H, P, D]; every other input is data, as these are.
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
        told = {value for value in (mask, position_ids) if value is not None}
        self._data: set[ir.Value] = {value for value in model.graph.inputs if value not in told}
        self._varying = set(told)
        for node in model.graph:
            is_size, read = is_op(node, "Shape", "Size"), _read(node)
            if not is_size and any(value in self._data for value in read):
                self._data.update(node.outputs)
            elif any(value in self._varying or (is_size and value in self._data) for value in read):
                self._varying.update(node.outputs)
        # of node outputs and inputs: initializers are what they are
        self._computed = {v for node in model.graph for v in node.outputs if v not in self._data} | told

    def __contains__(self, value: ir.Value | None) -> bool:
        """Whether it is computed of positions and sizes."""
        return value in self._computed

    def varies(self, value: ir.Value | None) -> bool:
        """Whether it is computed of positions and sizes, and not of constants alone."""
        return value in self._varying

    def is_data(self, value: ir.Value | None) -> bool:
        """Whether it depends on tokens."""
        return value in self._data

    def of_data(self, node: ir.Node) -> bool:
        """Whether the node's results depend on tokens."""
        return any(output in self._data for output in node.outputs)

    def at(self, values: Sequence[ir.Value], past: int, new: int, padding: int = 0) -> list[np.ndarray]:
        """The values for `new` tokens behind `past` others, all of which count but for the first so many.

        Raises ModelError where they cannot be told.
        """
        feeds = self._feeds(past, new, padding)
        needed: dict[ir.Node, None] = {}
        for value in values:
            self._need(value.producer(), needed, feeds, lambda size: self._size(size, past, new))
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in self._model.graph if node in needed],
            "positions",
            [onnx.helper.make_tensor_value_info(n, _element(a), a.shape) for n, a in feeds.items()],
            [onnx.helper.make_value_info(v.name or "", onnx.TypeProto()) for v in values],
        )
        imports = [onnx.helper.make_opsetid("", opset(self._model))]
        try:
            evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports))
            with np.errstate(all="ignore"):  # the lowest float32 is -inf in float16, and hides keys as well
                found = evaluator.run(None, feeds)
        except Exception as error:
            names = ", ".join(f"'{value.name}'" for value in values)
            raise ModelError(
                f"serve: {names}, which the model computes of positions, cannot be computed for positions "
                f"{past} to {past + new - 1}: {error}. Is `context` longer than the model's own limit?"
            ) from error
        return [np.asarray(array) for array in found]

    def _feeds(self, past: int, new: int, padding: int) -> dict[str, np.ndarray]:
        tokens_shape = numbers([1, new, *dims(self._ids)[2:]]) or ()
        feeds = {str(self._ids.name): np.zeros(tokens_shape, _numpy(self._ids))}
        if self._mask is not None:
            feeds[str(self._mask.name)] = (np.arange(past + new) >= padding).astype(_numpy(self._mask))[None]
        if self._position_ids is not None:
            tokens = np.maximum(np.arange(past, past + new) - padding, 0)
            places = numbers([*dims(self._position_ids)[:-2], 1, new]) or ()
            feeds[str(self._position_ids.name)] = np.broadcast_to(tokens.astype(_numpy(self._position_ids)), places)
        for value in self._pasts:
            shape = [past if axis == LENGTH_AXIS else size for axis, size in enumerate(dims(value))]
            feeds[str(value.name)] = np.broadcast_to(np.zeros((), _numpy(value)), numbers(shape) or ())
        return feeds

    def _size(self, size: Size, past: int, new: int) -> int | None:
        """A size of some value, where it is a number, S, P or their sum."""
        if isinstance(size, int):
            return size
        tokens = str(dims(self._ids)[1])
        sizes = {tokens: new}
        for before in [str(dims(value)[LENGTH_AXIS]) for value in self._pasts[:1]]:
            sizes |= {before: past, f"{before} + {tokens}": past + new, f"{tokens} + {before}": past + new}
        if self._mask is not None:
            sizes.setdefault(str(dims(self._mask)[1]), past + new)
        return sizes.get(str(size))

    def _need(
        self,
        last: ir.Node | None,
        needed: dict[ir.Node, None],
        feeds: dict[str, np.ndarray],
        known: Callable[[Size], int | None],
    ) -> None:
        """Adds what the results of a node are computed by."""
        pending = [last]
        while pending:
            node = pending.pop()
            if node is None or node in needed or str(node.outputs[0].name) in feeds:
                continue
            if is_op(node, "Shape") and str(operand(node, 0).name) not in feeds:
                sizes = [known(size) for size in dims(operand(node, 0))]
                if operand(node, 0) in self._data and None not in sizes:
                    part = slice(attribute(node, "start", 0), attribute(node, "end", None))
                    feeds[str(node.outputs[0].name)] = np.array(sizes[part], np.int64)
                    continue
            needed[node] = None
            for value in _read(node):
                if value.is_initializer():
                    feeds[str(value.name)] = _array(value)
                elif value in self._data and not value.is_graph_input():
                    raise ModelError(
                        f"serve: node '{node.name}' ({node.op_type}) asks for the shape of '{value.name}', which the "
                        "size of no input tells."
                    )
                elif value in self._data and str(value.name) not in feeds:
                    raise ModelError(f"serve: the model has an input '{value.name}' beside tokens and caches.")
                pending.append(value.producer())


def rows_by_position(
    positions: Positions, values: Sequence[ir.Value], context: int
) -> dict[ir.Value, tuple[np.ndarray, int]]:
    """Of the values those that have a row for each token: rows for all positions up to the context, and the axis that
    is over them. The others are what all tokens share, and sizes.

    Raises ModelError for a value that depends on more than the position.
    """
    if not values:
        return {}
    few, more, behind = (positions.at(values, *at) for at in (_FEW, _MORE, _BEHIND))
    axes = {
        value: axis
        for value, arrays in zip(values, zip(few, more, behind))
        if (axis := _row_axis(value, *arrays)) is not None
    }
    rows = dict(zip(axes, positions.at(list(axes), 0, max(context, _COMPARED)))) if axes else {}
    for value, *parts in zip(values, few, behind):
        for part, (first, count) in zip(parts, (_FEW, _BEHIND)) if value in axes else ():
            if not np.allclose(part, np.take(rows[value], range(first, first + count), axes[value]), 1e-6, 1e-6):
                raise ModelError(
                    f"serve: '{value.name}' of one position depends on how long its sequence is, as dynamic and long "
                    "rotary scalings do."
                )
    return {value: (rows[value], axis) for value, axis in axes.items()}


def _row_axis(value: ir.Value, few: np.ndarray, more: np.ndarray, behind: np.ndarray) -> int | None:
    """The axis that is over tokens, None if there is none."""
    axes = [axis for axis, (x, y) in enumerate(zip(few.shape, more.shape)) if x != y]
    if few.ndim == more.ndim == behind.ndim and not axes:
        # Integers that differ are sizes: those of the packed rows from now on.
        if few.dtype.kind != "i" and not (np.array_equal(few, more) and np.array_equal(few, behind)):
            raise ModelError(f"serve: '{value.name}' depends on how many tokens a call has, or came before.")
        return None
    if len(axes) != 1 or behind.shape[axes[0]] != _BEHIND[1]:
        raise ModelError(f"serve: '{value.name}' is neither a row for each position nor the same for all.")
    return axes[0]


def _read(node: ir.Node) -> list[ir.Value]:
    """What the node reads, and what its bodies read of the graph around them."""
    found = [value for value in node.inputs if value is not None]
    for given in node.attributes.values():
        bodies = [given.value] if given.type == ir.AttributeType.GRAPH else []
        bodies = list(given.value) if given.type == ir.AttributeType.GRAPHS else bodies
        for body in bodies:
            for inner in body.all_nodes():
                found += [v for v in inner.inputs if v is not None and v.graph is not body]
    return found


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _numpy(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return np.dtype(value.dtype.numpy())


def _element(array: np.ndarray) -> int:
    return onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
