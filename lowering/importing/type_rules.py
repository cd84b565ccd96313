"""Types of inputs that no runtime takes: of two types where the operator has one, or of another kind than it has."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx

from .node import Node
from .values import Value

_KINDS = {"float": "a float", "int": "an integer", "bool": "bool", "string": "string", "complex": "complex"}


def check_types(node: Node, inputs: Sequence[Value | None], domain: str, operator: str) -> None:
    """Raise NodeError for inputs of an operator that ONNX defines, if their types do not fit each other or it."""
    schema = _schema(operator, node.version) if domain in ("", "ai.onnx") else None
    if schema is None:
        return
    parameters, allowed = schema
    bound: dict[str, tuple[int, str]] = {}
    for index, value in enumerate(inputs):
        if value is None or not parameters:
            continue
        name, type_name, is_one_type = parameters[min(index, len(parameters) - 1)]
        kinds = allowed.get(type_name, frozenset((_kind(type_name),)))
        if kinds and _kind(value.dtype) not in kinds:
            wanted = " or ".join(_KINDS[kind] for kind in sorted(kinds & _KINDS.keys()))
            raise node.error(f"its input '{name}' is {value.dtype}, and must be {wanted}.", "Cast it before.")
        other, dtype = bound.setdefault(type_name, (index, value.dtype))
        if type_name in allowed and is_one_type and dtype != value.dtype:
            raise node.error(
                f"its input {index} is {value.dtype} and its input {other} {dtype}, and both must have one type.",
                "Cast one of them before.",
            )


_Parameter = tuple[str, str, bool]


@functools.cache
def _schema(operator: str, version: int) -> tuple[list[_Parameter], dict[str, frozenset[str]]] | None:
    """The name, the type and whether it is one of each parameter, and the kinds that named types may be of."""
    try:
        schema = onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return None
    parameters = [(each.name, each.type_str, each.is_homogeneous) for each in schema.inputs]
    kinds = {c.type_param_str: frozenset(map(_kind, c.allowed_type_strs)) for c in schema.type_constraints}
    return parameters, kinds


def _kind(type_name: str) -> str:
    """The kind of "tensor(float16)", "bfloat16", "uint4"; "" for sequences and optionals."""
    if "(" in type_name and not type_name.startswith("tensor("):
        return ""
    name = type_name.replace("double", "float")
    return next((kind for kind in _KINDS if kind in name), "")
