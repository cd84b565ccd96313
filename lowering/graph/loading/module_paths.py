"""The PyTorch modules of a node, as torch.onnx states them in a property of the node."""

from __future__ import annotations

import ast

import onnx_ir as ir

MODULE_PATHS = "pkg.torch.onnx.name_scopes"


def read_module_paths(node: ir.Node) -> list[str]:
    """Return the paths of a node's modules from the outermost, such as model.layers.0.mlp; none if none are stated."""
    try:
        paths = ast.literal_eval(node.metadata_props.get(MODULE_PATHS, "[]"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []
    is_list = isinstance(paths, list) and all(isinstance(path, str) and path.isprintable() for path in paths)
    return [path for path in paths if path] if is_list else []
