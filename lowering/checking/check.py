"""`check`: which nodes of a model cannot be lowered, and why, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..errors import NodeError
from ..fusion import fuse, keep_declared_outputs
from ..fusion.sizes import InferSizesPass
from ..graph.declared_sizes import Dims, ranges
from ..graph.list_inputs import split_list_inputs
from ..graph.model import ModelLike, load_model
from ..importing.importer import Importer
from ..notebook import table


@dataclass(frozen=True)
class Finding:
    """One node that cannot be lowered: where (domain, operator, version, node name), what blocks it, what to do."""

    where: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """The findings of `check`, and its warnings: things that compile but may not mean what the user meant.

    nodes counts those of the model as it is given, with bodies, before any fusion. unexamined counts the nodes that
    depend on a blocked one through a value whose type nobody knows.
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
        behind = f", {self.unexamined} behind them could not be examined" if self.unexamined else ""
        return f"{self.nodes} nodes, {len(self.findings)} cannot be lowered{behind}"

    def __str__(self) -> str:
        lines = [f"{finding.where}: {finding.what} {finding.remedy}".rstrip() for finding in self.findings]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings), self._counts])

    def __repr__(self) -> str:
        return f"Report({self._counts})"

    def _repr_html_(self) -> str:
        rows = [(finding.where, finding.what, finding.remedy) for finding in self.findings]
        rows += [("warning", warning, "") for warning in self.warnings]
        return table(self._counts, ("node", "what blocks it", "what to do"), rows)


def check(model: ModelLike, dims: Dims | None = None) -> Report:
    """Walks the whole model, bodies of If included, and collects every node that cannot be lowered.

    A node behind a blocked one is still examined, with the type that ONNX shape inference gives its input. Raises
    ModelError if the model cannot be read at all. dims is as for `compile`: InputError is raised where the number of
    elements of an input that is a sequence or an optional value is not said.
    """
    split = split_list_inputs(load_model(model), dims or {})
    given = split.model
    ranges(split.dims, given)  # refuses names that no input has
    nodes = sum(1 for _ in given.graph.all_nodes())
    loaded = fuse(given)
    importer = _imported(loaded)
    if importer.errors:  # once more, with a type for whatever is behind the blocked nodes
        inferred = loaded.clone()
        InferSizesPass()(inferred)
        keep_declared_outputs(loaded, inferred)
        importer = _imported(inferred)
    errors = importer.errors or []
    findings = tuple(Finding(e.where, e.what, e.remedy) for e in errors)
    return Report(findings, tuple(importer.warnings), nodes, importer.unexamined)


def _imported(model: ir.Model) -> Importer:
    errors: list[NodeError] = []
    importer = Importer(model, errors)
    importer.run()
    return importer
