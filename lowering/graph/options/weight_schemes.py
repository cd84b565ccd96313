"""Which scheme compresses which constant matrix: patterns of names, as `compile(..., weights={...})` has them.

A constant has the name of its initializer, the name of the node that reads it, and those of the PyTorch modules that
the exporter states for the node. The first pattern that matches one of these names decides.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir

from ...choices import Scheme, Schemes
from ...errors import InputError
from ..loading.module_paths import read_module_paths
from ..rewriting.matching import label

_MOVES = {"Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze"}
"""Operators through which a constant keeps its name."""

_SUGGESTIONS = 3


@dataclass(frozen=True)
class NodeSchemes:
    """The schemes of the constants that the nodes of a model read.

    by_node has them by `label`; default is the scheme of nodes that a compiler pass adds.
    """

    by_node: Mapping[str, Scheme | None]
    default: Scheme | None

    def find(self, label: str) -> Scheme | None:
        """Return the scheme of the constants that a node reads, None if they stay as they are."""
        return self.by_node.get(label, self.default)


NO_SCHEMES = NodeSchemes({}, None)


def choose_schemes(model: ir.Model, schemes: Schemes) -> NodeSchemes:
    """Return the schemes of a model's nodes."""
    by_node = {label(node): _match(schemes, names) for node, names in _iterate_readers(model)}
    return NodeSchemes(by_node, _match(schemes, [""]))


def check_schemes(model: ir.Model, schemes: Schemes) -> None:
    """Raise InputError if a pattern matches no node that reads a constant."""
    names = {name for _, names in _iterate_readers(model) for name in names}
    for pattern in schemes.keys() - keep_matching(model, schemes).keys():
        close = difflib.get_close_matches(pattern, names, _SUGGESTIONS, 0.0)
        raise InputError(
            "weights.pattern_unmatched",
            f"weights: the pattern '{pattern}' matches no constant and no node that reads one. Similar names are "
            f"{', '.join(close) or 'none'}; * stands for any characters.",
        )


def keep_matching(model: ir.Model, schemes: Schemes) -> Schemes:
    """Return the schemes whose patterns match a node that reads a constant, and that of all."""
    names = {name for _, names in _iterate_readers(model) for name in names}
    return {p: scheme for p, scheme in schemes.items() if p == "*" or any(fnmatchcase(name, p) for name in names)}


def find_scheme(schemes: Schemes, node: ir.Node) -> Scheme | None:
    """Return the scheme of the constants that a node reads, None if they stay as they are."""
    return _match(schemes, _list_names(node))


def _match(schemes: Schemes, names: list[str]) -> Scheme | None:
    matches = (scheme for pattern, scheme in schemes.items() if any(fnmatchcase(name, pattern) for name in names))
    return next(matches, None)


def _iterate_readers(model: ir.Model) -> Iterator[tuple[ir.Node, list[str]]]:
    """Yield the nodes that read constants, in bodies of control flow too, with the names of these."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        names = _list_names(node)
        if names:
            yield node, names


def _list_names(node: ir.Node) -> list[str]:
    """Return the names by which patterns match the constants of a node, none if it reads none."""
    constants = [name for value in node.inputs if value is not None and (name := _find_constant(value))]
    if not constants:
        return []
    return [*constants, node.name or node.outputs[0].name or "", *read_module_paths(node)]


def _find_constant(value: ir.Value) -> str | None:
    """Return the name of the constant that a value is made of, None if it is not constant."""
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    is_constant = value.is_initializer() and not value.is_graph_input()
    return value.name if is_constant or (node is not None and node.op_type == "Constant") else None
