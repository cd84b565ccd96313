"""A pass that looks at one node after the other."""

from __future__ import annotations

import abc
from typing import ClassVar

import onnx_ir as ir

from .matching import is_op
from .opset import opset


class NodePass(ir.passes.InPlacePass):
    """Tries `rewrite` at every node of these operators, of any if none is named, in models from opset `since` on."""

    since: ClassVar[int]
    operators: ClassVar[tuple[str, ...]] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        if opset(model) >= self.since:
            for node in list(model.graph.all_nodes()):
                wanted = not self.operators or is_op(node, *self.operators)
                if wanted and node.graph is not None:  # else an earlier match took it away
                    modified |= self.rewrite(node)
        return ir.passes.PassResult(model, modified)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrites what ends at the node, if it matches; answers whether it did."""
