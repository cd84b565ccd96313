"""Roles of a decoder's inputs: found by their types, their shapes and their readers, else by usual names.

Token ids index rows of the table of embeddings. Positions have the shape of the ids and do not index such rows. The
attention mask has a column for each key.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ...errors import InputError
from ..rewriting.matching import Size, attribute, dims, is_op

_NAMES = {
    "ids": ("input_ids", "decoder_input_ids"),
    "mask": ("attention_mask",),
    "positions": ("position_ids",),
}
_MIN_POSITION_ROWS = 8  # minimum rows of a table of positions: tables of token types have fewer
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_TABLES = {"Gather": (0, 1), "GatherBlockQuantized": (0, 1), "EmbedLayerNormalization": (2, 0)}


@dataclass(frozen=True)
class InputRoles:
    """Names of inputs; "" if the model has no such input, or none is recognized.

    * ids: int [B, S], or float [B, S, H] for a model that takes embeddings.
    * mask: [B, P + S].
    * positions: [B, S], or [n, B, S] if a token has several.
    * per_token: further inputs [B, S] or [B, S, H], with a value for each token.
    """

    ids: str
    mask: str = ""
    positions: str = ""
    per_token: tuple[str, ...] = ()


def find_roles(model: ir.Model, named: InputRoles, used: Collection[str]) -> InputRoles:
    """Return the roles: those set by name, and those found for the others.

    Args:
        model: A model whose sizes are inferred.
        named: Names that override the search; "" for none.
        used: Names of caches, states and other inputs that have another use.

    Raises:
        InputError: A name in `named` is not an input.
    """
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    for name in (named.ids, named.mask, named.positions):
        if name and name not in inputs:
            raise InputError("input.name_unknown", f"there is no input '{name}'. The inputs are {', '.join(inputs)}.")
    free = {name: value for name, value in inputs.items() if name not in used}
    ids = named.ids or _find_ids(model, free)
    if not ids or len(dims(inputs[ids])) < 2:
        return InputRoles(ids)
    batch, tokens = dims(inputs[ids])[:2]
    other_inputs = {name: value for name, value in free.items() if name != ids}
    positions = named.positions or _find_positions(other_inputs, (batch, tokens))
    mask = named.mask or _find_mask({n: v for n, v in other_inputs.items() if n != positions}, (batch, tokens))
    per_token = [
        name for name, value in other_inputs.items() if name not in (mask, positions) and _has_rows(value, tokens)
    ]
    return InputRoles(ids, mask, positions, tuple(name for name in per_token if dims(other_inputs[name])[0] == batch))


def _find_ids(model: ir.Model, free: dict[str, ir.Value]) -> str:
    """Return the input that indexes rows of a table, preferably of a table with a row for each logit.

    If no table has that, embeddings [B, S, H] are the tokens of an input [B, S] that indexes rows: the latter contains
    positions, if no other input can.
    """
    rows = {
        name: read_table_rows(value) for name, value in free.items() if _is_integer(value) and len(dims(value)) == 2
    }
    candidates = {name: size for name, size in rows.items() if size is not None}
    logits = dims(model.graph.outputs[0])[-1:]
    for name, size in candidates.items():
        if (size,) == logits:
            return name
    embeddings = [name for name, value in free.items() if _is_float(value) and _has_tokens(value)]
    shapes = [dims(free[name]) for name in candidates]
    with_positions = [
        name
        for name in embeddings
        if dims(free[name])[:2] in shapes and len(_find_integers_like_tokens(free, dims(free[name])[:2])) <= 1
    ]
    if with_positions:
        return _choose_first_of_equal(with_positions, free)
    if candidates:
        return max(candidates, key=lambda name: _static_length(candidates[name]))
    return _choose_first_of_equal(embeddings, free) or _find_by_name("ids", free)


def _choose_first_of_equal(embeddings: list[str], free: dict[str, ir.Value]) -> str:
    """Return the first of inputs that all have the same tokens, "" for others."""
    return embeddings[0] if len({dims(free[name])[:2] for name in embeddings}) == 1 else ""


def _find_positions(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> str:
    likely = _find_integers_like_tokens(free, tokens)
    return likely[0] if len(likely) == 1 else _find_by_name("positions", free)


def _find_integers_like_tokens(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> list[str]:
    """Return the integers that have the shape of the ids.

    Excluded are those that index rows of a table of a few kinds, and those that are only compared, as ids of images are
    with that of their position.
    """
    candidates = {name: value for name, value in free.items() if _is_integer(value) and dims(value)[-2:] == tokens}
    candidates = {name: value for name, value in candidates.items() if not _is_compared(value)}
    return [
        name
        for name, value in candidates.items()
        if _static_length(read_table_rows(value) or _MIN_POSITION_ROWS) >= _MIN_POSITION_ROWS
    ]


def _find_mask(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> str:
    """Return the matrix with a column for each key; one as long as another input belongs to an encoder."""
    candidates = {name: value for name, value in free.items() if not _is_as_long_as_another(value, free)}
    likely = [
        name
        for name, value in candidates.items()
        if len(dims(value)) == 2 and dims(value)[0] == tokens[0] and not isinstance(dims(value)[1], int)
        and dims(value)[1] != tokens[1]
    ]  # fmt: skip
    return likely[0] if len(likely) == 1 else _find_by_name("mask", candidates)


def _is_as_long_as_another(value: ir.Value, free: dict[str, ir.Value]) -> bool:
    """Return whether another input is as long: an encoder's states, which a mask hides in part."""
    return any(dims(value)[1] in dims(other) for other in free.values() if other is not value and len(dims(value)) == 2)


def _find_by_name(role: str, free: dict[str, ir.Value]) -> str:
    """Return the input that has the usual name and rank, if shapes do not determine it."""
    name = next((name for name in _NAMES[role] if name in free), "")
    return name if name and len(dims(free[name])) == 2 else ""


def _has_tokens(value: ir.Value) -> bool:
    """Return whether it is [B, S, H] with a symbolic number of tokens."""
    return len(dims(value)) == 3 and not isinstance(dims(value)[1], int) and isinstance(dims(value)[2], int)


def _has_rows(value: ir.Value, tokens: Size) -> bool:
    """Return whether it is [B, S] or [B, S, H] with that symbolic number of tokens."""
    sizes = dims(value)
    return not isinstance(tokens, int) and sizes[1:2] == (tokens,) and (len(sizes) == 2 or _has_tokens(value))


def read_table_rows(value: ir.Value) -> Size | None:
    """Return the number of rows of the table that an input indexes, None if it indexes none."""
    pending, seen = [value], {value}
    while pending:
        for node, position in pending.pop().uses():
            table = _TABLES.get(node.op_type)
            if table is not None and position == table[1] and attribute(node, "axis", 0) == 0:
                rows = node.inputs[table[0]]
                return None if rows is None or not dims(rows) else dims(rows)[0]
            if is_op(node, *_MOVES) and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return None


def _is_compared(value: ir.Value) -> bool:
    """Return whether only Equal, and Shape or Size, read the value."""
    operators = {use.node.op_type for use in value.uses()}
    return "Equal" in operators and operators <= {"Equal", "Shape", "Size"}


def _static_length(size: Size) -> int:
    return size if isinstance(size, int) else 0


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
