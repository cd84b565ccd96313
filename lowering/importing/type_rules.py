"""Rules for input types that every runtime rejects: types that must be equal, or of a kind the operator lacks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx

from .node import Node
from .values import SequenceValue, Value

_SEQUENCE = "sequence"
_KINDS = {
    "float": "a float", "int": "an integer", "bool": "bool", "string": "string", "complex": "complex",
    _SEQUENCE: "a sequence",
}  # fmt: skip
_TAKES_HOLES = {"Identity", "OptionalHasElement"}
"""Operators that take an optional value whether or not it has an element."""


def check_types(node: Node, inputs: Sequence[Value | None], domain: str, operator: str) -> None:
    """Raise NodeError for inputs of an ONNX operator whose types do not match each other or the operator."""
    schema = _schema(operator, node.version) if domain in ("", "ai.onnx") else None
    if schema is None:
        return
    parameters, allowed = schema
    bound: dict[str, tuple[str, str]] = {}
    for index, value in enumerate(inputs):
        parameter = _parameter(parameters, index)
        if parameter is None:
            continue
        name, type_name, is_one_type, is_required = parameter
        if value is None:
            if is_required and operator not in _TAKES_HOLES:
                raise node.error(
                    "node.element_missing",
                    f"input {name} is an optional value without an element, and must have one.",
                    "Test it with OptionalHasElement and If before the node; for an input of the model, compile with "
                    "an element.",
                )
            continue
        kinds = allowed.get(type_name, frozenset((_kind(type_name),)))
        is_sequence = isinstance(value, SequenceValue)
        if (_SEQUENCE if is_sequence else _kind(value.dtype)) not in kinds:
            expected = " or ".join(_KINDS[kind] for kind in sorted(kinds & _KINDS.keys()))
            remedy = "" if is_sequence or kinds == {_SEQUENCE} else "Cast it before the node."
            raise node.error(
                "node.dtype_unsupported",
                f"input {name} is {'a sequence' if is_sequence else value.dtype}, and must be {expected}.",
                remedy,
            )
        other, dtype = bound.setdefault(type_name, (name, value.dtype))
        if type_name in allowed and is_one_type and dtype != value.dtype:
            raise node.error(
                "node.dtype_mismatch",
                f"input {name} is {value.dtype} and {other} is {dtype}, and both must have the same type.",
                "Cast one of them before the node.",
            )


def _described(value: Value) -> tuple[str, str]:
    """Return the kind of a value, and its type in errors."""
    return (_SEQUENCE, _KINDS[_SEQUENCE]) if isinstance(value, SequenceValue) else (_kind(value.dtype), value.dtype)


_Parameter = tuple[str, str, bool, bool]
"""A parameter's name, its type name, whether all its inputs have one type, and whether it is required."""


def _parameter(parameters: list[_Parameter], index: int) -> _Parameter | None:
    """Return the parameter that takes an input; None if the operator has none for it."""
    if index < len(parameters) and not parameters[index][0].endswith("[]"):
        return parameters[index]
    if not parameters or not parameters[-1][0].endswith("[]"):
        return None
    name, *rest = parameters[-1]
    return f"{name[:-1]}{index - len(parameters) + 1}]", *rest  # type: ignore[return-value]


@functools.cache
def _schema(operator: str, version: int) -> tuple[list[_Parameter], dict[str, frozenset[str]]] | None:
    """Return the parameters of an operator, "[]" after the name of a variadic one, and the kinds of its named types."""
    try:
        schema = onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return None
    options = onnx.defs.OpSchema.FormalParameterOption
    parameters = [
        (
            parameter.name + "[]" * (parameter.option == options.Variadic),
            parameter.type_str,
            parameter.is_homogeneous,
            parameter.option == options.Single,
        )
        for parameter in schema.inputs
    ]
    kinds = {c.type_param_str: frozenset(map(_kind, c.allowed_type_strs)) for c in schema.type_constraints}
    return parameters, kinds


def _kind(type_name: str) -> str:
    """Return the kind of "tensor(float16)", "bfloat16", "uint4", "seq(tensor(float))", also of optional types."""
    type_name = type_name.removeprefix("optional(")
    if type_name.startswith("seq("):
        return _SEQUENCE
    name = type_name.replace("double", "float")
    return next((kind for kind in _KINDS if kind in name), "")
