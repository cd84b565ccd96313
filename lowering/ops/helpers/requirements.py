"""Requirements of operators on the types and ranks of inputs, and on attributes, which are known at compile time.

Each function raises NodeError with the given code unless the requirement is met. Omitted inputs are legal, except where
an input is required.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from ...importing.node import Node
from ...importing.values import Value
from .compute import is_float

_Input = TypeVar("_Input")


def require_rank(node: Node, name: str, value: Value | None, form: str, code: str = "node.rank_unsupported") -> None:
    """Require an input of the rank of a form: "[batch, length]", or several forms joined by " or ".

    "..." as last dimension stands for any number of dimensions.
    """
    if value is not None and not _has_form(value.rank, form):
        raise node.error(code, f"input {name} has rank {value.rank}.", f"Make it {form}.")


def require_dtype(
    node: Node, name: str, value: Value | None, dtypes: str | Collection[str], code: str = "node.dtype_unsupported"
) -> None:
    """Require an input of one of these element types."""
    if value is not None and value.dtype not in _list_names(dtypes):
        raise node.error(code, f"input {name} is {value.dtype}.", f"Use {_join_names(dtypes)}.")


def require_tensor(
    node: Node,
    name: str,
    value: Value | None,
    dtypes: str | Collection[str],
    form: str,
    code: str = "node.tensor_type_unsupported",
) -> None:
    """Require an input of one of these element types, of the rank of a form as in `require_rank`."""
    if value is not None and not (value.dtype in _list_names(dtypes) and _has_form(value.rank, form)):
        what = f"input {name} is {value.dtype} of rank {value.rank}."
        raise node.error(code, what, f"Make it {_join_names(dtypes)} {form}.")


def require_float(node: Node, name: str, value: Value, code: str = "node.float_required") -> None:
    """Require an input of a float type."""
    if not is_float(value.dtype):
        raise node.error(code, f"input {name} is {value.dtype}.", "Cast it to a float type.")


def require_same_dtype(
    node: Node, name: str, value: Value | None, other_name: str, other: Value, code: str = "node.dtype_mismatch"
) -> None:
    """Require an input of the element type of another one."""
    if value is not None and value.dtype != other.dtype:
        what = f"input {name} is {value.dtype}, and {other_name} is {other.dtype}."
        raise node.error(code, what, "Give them the same type.")


def require_input(node: Node, name: str, value: _Input | None, remedy: str, code: str = "node.input_missing") -> _Input:
    """Return an input that must not be omitted."""
    if value is None:
        raise node.error(code, f"input {name} is missing.", remedy)
    return value


def reject_input(node: Node, name: str, value: Value | None, remedy: str, code: str = "node.input_unsupported") -> None:
    """Require that an input is omitted."""
    if value is not None:
        raise node.error(code, f"input {name} is given.", remedy)


def read_length(node: Node, name: str, value: Value) -> int:
    """Return the static length of a vector."""
    require_rank(node, name, value, "[length]", code="node.vector_required")
    if not isinstance(value.shape[0], int):
        raise node.error(
            "node.static_length_required", f"input {name} has a symbolic length.", "Give it a static length."
        )
    return value.shape[0]


def require_head_groups(node: Node, heads: int, kv_heads: int, code: str = "node.heads_not_divisible") -> None:
    """Require numbers of query and key/value heads that divide into groups."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise node.error(
            code,
            f"{heads} query heads do not divide into {kv_heads} key/value heads.",
            "Choose the number of query heads as a positive multiple of the number of key/value heads.",
        )


def read_choice(
    node: Node, name: str, default: Any, choices: Collection[Any], code: str = "node.attribute_unsupported"
) -> Any:
    """Return an attribute that must be one of some choices."""
    return require_choice(node, name, node.attr(name, default), choices, code=code)


def require_choice(
    node: Node, name: str, value: Any, choices: Collection[Any], code: str = "node.attribute_unsupported"
) -> Any:
    """Return the value of an attribute, which must be one of some choices."""
    if value not in choices:
        raise node.error(code, f"attribute {name} is {value!r}.", f"Use {_join_names(choices)}.")
    return value


def require_range(
    node: Node, name: str, value: Any, low: float, high: float | None = None, code: str = "node.value_out_of_range"
) -> Any:
    """Return the value of an attribute, which must be between bounds; without the upper one, NaN is rejected too."""
    if not (value >= low and (high is None or value <= high)):
        remedy = f"Use {low} or more." if high is None else f"Use {low} to {high}."
        raise node.error(code, f"attribute {name} is {value}.", remedy)
    return value


def reject_attribute(
    node: Node, name: str, neutral: Any, remedy: str, code: str = "node.attribute_unsupported"
) -> None:
    """Require that an attribute has its neutral value."""
    value = node.attr(name, neutral)
    if value != neutral:
        raise node.error(code, f"attribute {name} is {value!r}.", remedy)


def _has_form(rank: int, form: str) -> bool:
    """Return whether a form, or one of several, has that rank."""
    for alternative in form.split("] or ["):
        dimensions = [name for name in alternative.strip("[]").split(", ") if name]
        if rank == len(dimensions) or (dimensions[-1:] == ["..."] and rank >= len(dimensions) - 1):
            return True
    return False


def _list_names(names: str | Collection[Any]) -> Collection[Any]:
    return (names,) if isinstance(names, str) else names


def _join_names(names: str | Collection[Any]) -> str:
    *first, last = map(str, _list_names(names))
    return f"{', '.join(first)} or {last}" if first else last
