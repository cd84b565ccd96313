"""The names that users know of constants and nodes which rewriting has made of others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from ..loading.module_paths import MODULE_PATHS, read_module_paths

_SOURCES = "onnx_lowering.sources"  # names of constants, a line each
_FUSED_FROM = "fused_from"
_SEPARATOR = ", "


def set_sources(value: ir.Value, constants: Iterable[ir.Value]) -> None:
    """Let a constant that is made of others have their names."""
    value.metadata_props[_SOURCES] = "\n".join(name for constant in constants for name in list_sources(constant))


def list_sources(constant: ir.Value) -> list[str]:
    """Return the names in the user's model of a constant, or of those that it is made of."""
    node = constant.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        return list_sources(node.inputs[0])
    return constant.metadata_props.get(_SOURCES, constant.name or "").splitlines()


def is_made_of_several(constant: ir.Value) -> bool:
    return len(constant.metadata_props.get(_SOURCES, "").splitlines()) > 1


def inherit_names(nodes: Iterable[ir.Node], replaced: Collection[ir.Node]) -> None:
    """Let nodes have the names and the PyTorch modules of those that they replace."""
    names = _SEPARATOR.join(node.name or node.outputs[0].name or "" for node in replaced)
    paths = list(dict.fromkeys(path for node in replaced for path in read_module_paths(node)))
    for node in nodes:
        node.metadata_props[_FUSED_FROM] = names
        if paths:
            node.metadata_props[MODULE_PATHS] = repr(paths)


def list_replaced(node: ir.Node) -> list[str]:
    """Return the names of the nodes that a node replaces."""
    return [name for name in node.metadata_props.get(_FUSED_FROM, "").split(_SEPARATOR) if name]
