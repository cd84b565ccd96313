"""A pass that visits one node after the other."""

from __future__ import annotations

import abc
import logging
from typing import ClassVar

import onnx_ir as ir

from ..graph.rewriting.matching import is_op
from ..graph.rewriting.opset import opset

MICROSOFT_DOMAIN = "com.microsoft"
"""Domain of operators that ai.onnx lacks, or has in another form than exporters write."""

_LOG = logging.getLogger(__name__)


class NodePass(ir.passes.InPlacePass):
    """A pass that tries `rewrite` at every node, in models from opset `since` on.

    If `operators` is not empty, only nodes of these ai.onnx operators are visited. `domain` is the domain of the new
    nodes; the model imports it after a match.
    """

    since: ClassVar[int]
    operators: ClassVar[tuple[str, ...]] = ()
    domain: ClassVar[str] = ""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        count = 0
        if opset(model) >= self.since:
            for node in list(model.graph.all_nodes()):
                is_candidate = not self.operators or is_op(node, *self.operators)
                if is_candidate and node.graph is not None:  # else an earlier match removed it
                    count += self.rewrite(node)
        if count and self.domain:
            model.opset_imports.setdefault(self.domain, 1)
        if count:
            _LOG.info("%s: %d times", type(self).__name__.removesuffix("Pass"), count)
        return ir.passes.PassResult(model, modified=count > 0)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrite the pattern that ends at the node, and return whether it matched."""
