"""A pass that looks at one node after the other."""

from __future__ import annotations

import abc
import logging
from typing import ClassVar

import onnx_ir as ir

from .matching import is_op
from .opset import opset

DOMAIN = "com.microsoft"
"""Of operators that ai.onnx does not have, or not as exporters write them."""

_LOG = logging.getLogger(__name__)


class NodePass(ir.passes.InPlacePass):
    """Tries `rewrite` at every node of these operators, of any if none is named, in models from opset `since` on.

    domain is that of the nodes that it makes; the model then imports it.
    """

    since: ClassVar[int]
    operators: ClassVar[tuple[str, ...]] = ()
    domain: ClassVar[str] = ""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        count = 0
        if opset(model) >= self.since:
            for node in list(model.graph.all_nodes()):
                wanted = not self.operators or is_op(node, *self.operators)
                if wanted and node.graph is not None:  # else an earlier match took it away
                    count += self.rewrite(node)
        if count and self.domain:
            model.opset_imports.setdefault(self.domain, 1)
        if count:
            _LOG.info("%s: %d times", type(self).__name__.removesuffix("Pass"), count)
        return ir.passes.PassResult(model, modified=count > 0)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrites what ends at the node, if it matches; answers whether it did."""
