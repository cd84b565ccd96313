"""Which scheme compresses which constant matrix: patterns of names, as `compile(..., weights={...})` has them.

A constant has the names of the initializers that it is made of, of the node that reads it, of the nodes that this node
replaces, and of their PyTorch modules, as the exporter states them. The first pattern that matches one of them decides.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from ...choices import Scheme, Schemes
from ...errors import InputError
from ..loading.module_paths import read_module_paths
from ..rewriting.sources import is_made_of_several, list_replaced, list_sources

_SUGGESTIONS = 3


@dataclass(frozen=True)
class NodeSchemes:
    """The schemes of the constants that the nodes of a model read; default is that of other nodes."""

    by_node: Mapping[ir.Node, Scheme | None] = field(default_factory=dict)
    default: Scheme | None = None


def choose_schemes(model: ir.Model, schemes: Schemes) -> NodeSchemes:
    """Return the schemes of a model's nodes."""
    if not schemes:
        return NodeSchemes()
    by_node = {node: _match(schemes, names) for node, names in _iterate_readers(model)}
    return NodeSchemes(by_node, _match(schemes, [""]))


def check_schemes(model: ir.Model, schemes: Schemes) -> None:
    """Raise InputError if a pattern matches no node that reads a constant matrix."""
    for pattern in schemes.keys() - keep_matching(model, schemes).keys():
        names = {name for _, names in _iterate_readers(model) for name in names}
        close = difflib.get_close_matches(pattern, names, _SUGGESTIONS, 0.0)
        raise InputError(
            "weights.pattern_unmatched",
            f"weights: the pattern '{pattern}' matches no constant matrix and no node that reads one. Similar names: "
            f"{', '.join(close) or 'none'}. A pattern matches a whole name, in which * stands for any characters.",
        )


def keep_matching(model: ir.Model, schemes: Schemes) -> Schemes:
    """Return the schemes whose patterns match a node that reads a constant matrix, and that of all."""
    if not schemes.keys() - {"*"}:
        return schemes
    names = {name for _, names in _iterate_readers(model) for name in names}
    return {p: scheme for p, scheme in schemes.items() if p == "*" or any(_matches(name, p) for name in names)}


def _match(schemes: Schemes, names: list[str]) -> Scheme | None:
    matches = (scheme for pattern, scheme in schemes.items() if any(_matches(name, pattern) for name in names))
    return next(matches, None)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _iterate_readers(model: ir.Model) -> Iterator[tuple[ir.Node, list[str]]]:
    """Yield the nodes that read constant matrices, also in bodies of control flow, with the names of these."""
    sources: dict[ir.Value, list[str]] = {}  # of constants that nodes compute
    several: set[ir.Value] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        inputs = [value for value in node.inputs if value is not None]
        constants = [value for value in inputs if value in sources or _is_initializer(value)]
        matrices = [value for value in constants if value.shape is None or len(value.shape) > 1]
        names = [name for value in matrices for name in sources.get(value) or list_sources(value)]
        has_body = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if node.op_type == "Constant" or (inputs and len(constants) == len(inputs) and not has_body):
            for output in node.outputs:
                sources[output] = names or list_sources(output)
                several |= {output} if is_made_of_several(output) or several & set(constants) else set()
        if names:
            # A node that multiplies by the matrices of many replaces nodes of other matrices, too.
            replaced = [] if several & set(constants) else [*list_replaced(node), *read_module_paths(node)]
            yield node, [*names, node.name or node.outputs[0].name or "", *replaced]


def _is_initializer(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()
