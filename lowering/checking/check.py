"""The function `check`: unsupported nodes of a model and their reasons, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..errors import NodeError
from ..fusion import fuse, keep_declared_outputs
from ..graph.loading.declared_sizes import Dims, ranges
from ..graph.loading.list_inputs import split_list_inputs
from ..graph.loading.model import ModelLike, load_model
from ..graph.rewriting.sizes import InferSizesPass
from ..importing.importer import Importer
from ..notebook import format_table
from ..ops import lookup


@dataclass(frozen=True)
class Finding:
    """A node that cannot be lowered.

    `where` holds domain, operator, version and node name; `what` the problem; `remedy` the action to take; `code` is
    the stable code of docs/reference/error_codes.md.
    """

    code: str
    where: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """The findings of `check`, and its warnings.

    Warnings are about models that compile but may not compute what the user intended. `nodes` counts the nodes of the
    original model, subgraphs included, before any fusion. `unexamined` counts the nodes that depend on an unsupported
    node through a value of unknown type.
    """

    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    nodes: int
    unexamined: int

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def _counts(self) -> str:
        unexamined = f", {self.unexamined} behind them could not be examined" if self.unexamined else ""
        return f"{self.nodes} nodes, {len(self.findings)} cannot be lowered{unexamined}"

    def __str__(self) -> str:
        lines = [f"{finding.where}: {finding.what} {finding.remedy}".rstrip() for finding in self.findings]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings), self._counts])

    def __repr__(self) -> str:
        return f"Report({self._counts})"

    def _repr_html_(self) -> str:
        rows = [(finding.where, finding.what, finding.remedy) for finding in self.findings]
        rows += [("warning", warning, "") for warning in self.warnings]
        return format_table(self._counts, ("node", "what blocks it", "what to do"), rows)


def check(model: ModelLike, *, dims: Dims | None = None) -> Report:
    """Return a report of every node that cannot be lowered, subgraphs of If included.

    A node after an unsupported one is still examined, with the type that ONNX shape inference gives its input.

    Args:
        model: The ONNX model, as for `compile`.
        dims: Sizes of symbolic dimensions, as for `compile`.

    Returns:
        The unsupported nodes, with reason and remedy, and warnings.

    Raises:
        ModelError: The model cannot be read at all.
        InputError: The number of elements of an input that is a sequence or an optional value is not specified.
    """
    split = split_list_inputs(load_model(model), dims or {})
    model_without_lists = split.model
    ranges(split.dims, model_without_lists)  # rejects names that no input has
    nodes = sum(1 for _ in model_without_lists.graph.all_nodes())
    fused = fuse(model_without_lists)
    importer = _run_importer(fused)
    if importer.errors:  # again, with inferred types for the values after unsupported nodes
        inferred = fused.clone()
        InferSizesPass()(inferred)
        keep_declared_outputs(fused, inferred)
        importer = _run_importer(inferred)
    errors = importer.errors or []
    findings = tuple(Finding(e.code, e.where, e.what, e.remedy) for e in errors)
    return Report(findings, tuple(importer.warnings), nodes, importer.unexamined)


def _run_importer(model: ir.Model) -> Importer:
    errors: list[NodeError] = []
    importer = Importer(model, lookup, errors)
    importer.run()
    return importer
