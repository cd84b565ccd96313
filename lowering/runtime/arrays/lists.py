"""Arguments that are lists of tensors, or None: flattened before a call and collected after it.

{"x": [a, b], "m": None}    becomes, for the compiled code,    {"x[0]": a, "x[1]": b}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...manifest import ListSpec, TensorSpec, arguments


def flatten_lists(
    arrays: Mapping[str, Any],
    tensors: Sequence[str],
    lists: Sequence[ListSpec],
    role: str,
    is_complete: bool = False,
) -> Mapping[str, Any]:
    """Return arrays by the names of tensors, from arrays and lists of arrays by the names of arguments.

    tensors are the names of all tensors. Entries that already have the name of a tensor remain. Raises InputError for a
    value that is not a list or has another length, for a value of an argument that must be None, and with is_complete
    for a missing list.
    """
    if not lists or not isinstance(arrays, Mapping):
        return arrays
    flat = dict(arrays)
    for spec in lists:
        names = tensors[spec.first : spec.first + (spec.count or 0)]
        if spec.name in flat:
            flat.update(zip(names, _read_elements(flat.pop(spec.name), spec, role)))
        elif is_complete and names and not flat.keys() & set(names):
            raise InputError(
                "input.list_missing", f"{role} '{spec.name}' is missing; the model takes a list of {spec.count} arrays."
            )
    return flat


def _read_elements(value: Any, spec: ListSpec, role: str) -> Sequence[Any]:
    """Return the elements of a list. Raises InputError as `flatten_lists` does."""
    if spec.count is None:
        if value is None:
            return ()
        raise InputError(
            "input.list_not_none",
            f"{role} '{spec.name}' must be None, as the model was compiled, not a {type(value).__name__}. Leave it "
            f"out, or compile the model again with dims={{'{spec.name}': 1}}, or the number of tensors of a sequence.",
        )
    if not isinstance(value, (list, tuple)):
        raise InputError(
            "input.list_required",
            f"{role} '{spec.name}' must be a list of {spec.count} arrays, not a {type(value).__name__}. "
            "Pass the arrays in a list.",
        )
    if len(value) != spec.count:
        raise InputError(
            "input.list_length_mismatch",
            f"{role} '{spec.name}' is a list of {len(value)} arrays, and the model was compiled for {spec.count}. "
            f"Pass {spec.count}, or compile the model again"
            + (f" with dims={{'{spec.name}': {len(value)}}}." if role == "input" else "."),
        )
    return value


def collect_lists(arrays: dict[str, Any], tensors: Sequence[TensorSpec], lists: Sequence[ListSpec]) -> dict[str, Any]:
    """Return arrays, lists of arrays and None by the names of outputs, from arrays by the names of tensors."""
    if not lists:
        return arrays
    result: dict[str, Any] = {}
    for argument in arguments(tensors, lists):
        values = [arrays[tensor.name] for tensor in argument.tensors]
        result[argument.name] = values[0] if argument.kind == "tensor" else values if argument.kind == "list" else None
    return result
