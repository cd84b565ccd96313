"""What the inputs of a decoder are for: told by their types, their shapes and what they feed; by usual names if not so.

Token ids pick rows of the table of embeddings, positions have the shape of the ids and pick no such rows, and the
attention mask has a column for each key.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import InputError
from ..fusion.matching import Size, attribute, dims, is_op

_NAMES = {
    "ids": ("input_ids", "decoder_input_ids"),
    "mask": ("attention_mask",),
    "positions": ("position_ids",),
}
_MANY = 8  # rows of a table of positions: tables of token types have fewer
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_TABLES = {"Gather": (0, 1), "GatherBlockQuantized": (0, 1), "EmbedLayerNormalization": (2, 0)}


@dataclass(frozen=True)
class Roles:
    """Names of inputs; "" where the model has no such input, or none is known to be it.

    ids is int [B, S], or float [B, S, H] for a model that takes embeddings; mask is [B, P + S]; positions are [B, S],
    or [n, B, S] where a token has several. per_token are further inputs [B, S] or [B, S, H], with a value for each
    token.
    """

    ids: str
    mask: str = ""
    positions: str = ""
    per_token: tuple[str, ...] = ()


def find_roles(model: ir.Model, given: Roles, kept: Collection[str]) -> Roles:
    """Return the roles: those given by name, and those found for the others.

    Args:
        model: One whose sizes are inferred.
        given: Names that override what would be found; "" where nothing is given.
        kept: Names of caches, states and other inputs that have another use.

    Raises:
        InputError: A given name is not an input.
    """
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    for name in (given.ids, given.mask, given.positions):
        if name and name not in inputs:
            raise InputError(f"there is no input '{name}'. The inputs are {', '.join(inputs)}.")
    free = {name: value for name, value in inputs.items() if name not in kept}
    ids = given.ids or _find_ids(model, free)
    if not ids or len(dims(inputs[ids])) < 2:
        return Roles(ids)
    batch, tokens = dims(inputs[ids])[:2]
    others = {name: value for name, value in free.items() if name != ids}
    positions = given.positions or _find_positions(others, (batch, tokens))
    mask = given.mask or _find_mask({n: v for n, v in others.items() if n != positions}, (batch, tokens))
    per_token = [name for name, value in others.items() if name not in (mask, positions) and _has_rows(value, tokens)]
    return Roles(ids, mask, positions, tuple(name for name in per_token if dims(others[name])[0] == batch))


def _find_ids(model: ir.Model, free: dict[str, ir.Value]) -> str:
    """Prefer, of the inputs that pick rows of a table, the one whose table has a row for each logit.

    Where no table has, embeddings [B, S, H] are the tokens of an input [B, S] that picks rows: it holds positions, if
    no other input can.
    """
    rows = {name: table_rows(value) for name, value in free.items() if _is_integer(value) and len(dims(value)) == 2}
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
        if dims(free[name])[:2] in shapes and len(_like_tokens(free, dims(free[name])[:2])) <= 1
    ]
    if with_positions:
        return _first_of_one_size(with_positions, free)
    if candidates:
        return max(candidates, key=lambda name: _length(candidates[name]))
    return _first_of_one_size(embeddings, free) or _conventional("ids", free)


def _first_of_one_size(embeddings: list[str], free: dict[str, ir.Value]) -> str:
    """Return the first of inputs that all have the same tokens, "" for others."""
    return embeddings[0] if len({dims(free[name])[:2] for name in embeddings}) == 1 else ""


def _find_positions(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> str:
    likely = _like_tokens(free, tokens)
    return likely[0] if len(likely) == 1 else _conventional("positions", free)


def _like_tokens(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> list[str]:
    """Return the integers that have the shape of the ids, but for those that pick rows of a table of a few kinds, and
    those that are only compared, as ids of images are with that of their place."""
    alike = {name: value for name, value in free.items() if _is_integer(value) and dims(value)[-2:] == tokens}
    alike = {name: value for name, value in alike.items() if not _is_compared(value)}
    return [name for name, value in alike.items() if _length(table_rows(value) or _MANY) >= _MANY]


def _find_mask(free: dict[str, ir.Value], tokens: tuple[Size, ...]) -> str:
    """Return the matrix with a column for each key; one that is as long as another input belongs to an encoder."""
    own = {name: value for name, value in free.items() if not _belongs_to_others(value, free)}
    likely = [
        name
        for name, value in own.items()
        if len(dims(value)) == 2 and dims(value)[0] == tokens[0] and not isinstance(dims(value)[1], int)
        and dims(value)[1] != tokens[1]
    ]  # fmt: skip
    return likely[0] if len(likely) == 1 else _conventional("mask", own)


def _belongs_to_others(value: ir.Value, free: dict[str, ir.Value]) -> bool:
    """Whether another input is as long: an encoder's states, which a mask hides parts of."""
    return any(dims(value)[1] in dims(other) for other in free.values() if other is not value and len(dims(value)) == 2)


def _conventional(role: str, free: dict[str, ir.Value]) -> str:
    """Return the input that has the usual name and rank, for what shapes do not tell."""
    name = next((name for name in _NAMES[role] if name in free), "")
    return name if name and len(dims(free[name])) == 2 else ""


def _has_tokens(value: ir.Value) -> bool:
    """Whether it is [B, S, H] of any number of tokens."""
    return len(dims(value)) == 3 and not isinstance(dims(value)[1], int) and isinstance(dims(value)[2], int)


def _has_rows(value: ir.Value, tokens: Size) -> bool:
    """Whether it is [B, S] or [B, S, H] of that number of tokens, which is any."""
    sizes = dims(value)
    return not isinstance(tokens, int) and sizes[1:2] == (tokens,) and (len(sizes) == 2 or _has_tokens(value))


def table_rows(value: ir.Value) -> Size | None:
    """Return the number of rows of the table that an input indexes, None if it indexes none."""
    pending, seen = [value], {value}
    while pending:
        for node, place in pending.pop().uses():
            table = _TABLES.get(node.op_type)
            if table is not None and place == table[1] and attribute(node, "axis", 0) == 0:
                rows = node.inputs[table[0]]
                return None if rows is None or not dims(rows) else dims(rows)[0]
            if is_op(node, *_MOVES) and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return None


def _is_compared(value: ir.Value) -> bool:
    """Whether nodes ask which elements equal another value, and nothing else but its size."""
    operators = {use.node.op_type for use in value.uses()}
    return "Equal" in operators and operators <= {"Equal", "Shape", "Size"}


def _length(size: Size) -> int:
    return size if isinstance(size, int) else 0


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
