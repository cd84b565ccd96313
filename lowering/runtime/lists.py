"""Arguments that are lists of tensors, or None: taken apart before a call, and put together after it.

{"x": [a, b], "m": None}    is, for the compiled code,    {"x[0]": a, "x[1]": b}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..manifest import ListSpec, TensorSpec, arguments


def take_apart(
    arrays: Mapping[str, Any],
    tensors: Sequence[str],
    lists: Sequence[ListSpec],
    role: str,
    is_whole: bool = False,
) -> Mapping[str, Any]:
    """Return arrays by the names of tensors, for arrays and lists of arrays by the names of inputs or outputs.

    tensors are the names of all. What has the name of a tensor already stays. Raises InputError for what is no list,
    or has another length, for a value where there can be none, and, with is_whole, for a list that is missing.
    """
    if not lists or not isinstance(arrays, Mapping):
        return arrays
    flat = dict(arrays)
    for spec in lists:
        names = tensors[spec.first : spec.first + (spec.count or 0)]
        if spec.name in flat:
            flat.update(zip(names, _elements(flat.pop(spec.name), spec, role)))
        elif is_whole and names and not flat.keys() & set(names):
            raise InputError(f"{role} '{spec.name}' is missing; the model takes a list of {spec.count} arrays.")
    return flat


def _elements(value: Any, spec: ListSpec, role: str) -> Sequence[Any]:
    """What a list holds. Raises InputError as `take_apart`."""
    if spec.count is None:
        if value is None:
            return ()
        raise InputError(
            f"{role} '{spec.name}' must be None, as the model was compiled, not a {type(value).__name__}. Leave it "
            f"out, or compile the model again with dims={{'{spec.name}': 1}}, or the number of tensors of a sequence."
        )
    if not isinstance(value, (list, tuple)):
        raise InputError(
            f"{role} '{spec.name}' must be a list of {spec.count} arrays, not a {type(value).__name__}. "
            "Pass the arrays in a list."
        )
    if len(value) != spec.count:
        raise InputError(
            f"{role} '{spec.name}' is a list of {len(value)} arrays, and the model was compiled for {spec.count}. "
            f"Pass {spec.count}, or compile the model again"
            + (f" with dims={{'{spec.name}': {len(value)}}}." if role == "input" else ".")
        )
    return value


def put_together(arrays: dict[str, Any], tensors: Sequence[TensorSpec], lists: Sequence[ListSpec]) -> dict[str, Any]:
    """Return arrays, lists of arrays and None by the names of outputs, for arrays by the names of tensors."""
    if not lists:
        return arrays
    whole: dict[str, Any] = {}
    for argument in arguments(tensors, lists):
        values = [arrays[tensor.name] for tensor in argument.tensors]
        whole[argument.name] = values[0] if argument.kind == "tensor" else values if argument.kind == "list" else None
    return whole
