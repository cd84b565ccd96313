"""Functional form of operators that write to their inputs: the written tensor becomes an output of the node.

Serving operators update caches in place, and return only the attention. Here such a node gets the missing outputs, and
every later reader of the tensor reads them, so that a model states what it computes. If the tensor is an input of the
model, its last version becomes an output that takes over the input's memory: the array that the caller passes is
updated.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...errors import ModelError


@dataclass(frozen=True)
class Write:
    """A write of a node: output number `output` is the updated input number `source`.

    With `unless_zero` the node only writes if that attribute is present and not 0.
    """

    source: int
    output: int
    unless_zero: str = ""

    def find_input(self, node: ir.Node) -> ir.Value | None:
        """Return the input that the node writes to, if it does."""
        value = node.inputs[self.source] if self.source < len(node.inputs) else None
        attribute = node.attributes.get(self.unless_zero)
        is_written = not self.unless_zero or (attribute is not None and attribute.value != 0)
        return value if is_written else None


WRITES: dict[tuple[str, str], tuple[Write, ...]] = {("tensorrt_llm", "GptAttention"): (Write(1, 1),)}
"""Writes, by domain and operator."""

WRITES["com.microsoft", "PagedAttention"] = Write(3, 1), Write(4, 2)
for _domain in ("opmx.dynamic_batching", "pmx.dynamic_batching"):
    WRITES[_domain, "MultiHeadCacheAttention"] = Write(10, 1), Write(11, 2, "quant_bit")
    WRITES[_domain, "KeyValueCache"] = Write(8, 2), Write(9, 3, "quant_bit")


def name_written_inputs(model: ir.Model) -> dict[str, str]:
    """Add the outputs; return, by input that is written but not returned, the output with its new value.

    Raises:
        ModelError: A node writes to a constant.
    """
    if not any((node.domain, node.op_type) in WRITES for node in model.graph):
        return {}
    naming = _WrittenOutputs(model.graph)
    for node in list(model.graph):
        for write in WRITES.get((node.domain, node.op_type), ()):
            value = write.find_input(node)
            named = write.output < len(node.outputs) and node.outputs[write.output].name
            if value is not None and not named:
                naming.add_output(node, value, write.output)
    return naming.add_graph_outputs()


class _WrittenOutputs:
    """Outputs for the writes of nodes, in the order of the nodes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.position = {node: k for k, node in enumerate(graph)}
        self.used_names = {v.name for v in (*graph.inputs, *graph.initializers.values())}
        self.used_names |= {v.name for node in graph for v in node.outputs}
        self.newest: dict[ir.Value, ir.Value] = {}  # by the original value, its newest version

    def add_output(self, node: ir.Node, value: ir.Value, output: int) -> None:
        original = next((source for source, latest in self.newest.items() if latest is value), value)
        if original.is_initializer():
            raise ModelError(
                "model.constant_written",
                f"node '{node.name or node.op_type}' writes to the constant '{original.name}'. Make it an input of "
                "the model, whose contents the caller keeps from call to call.",
            )
        if output >= len(node.outputs):
            node.resize_outputs(output + 1)
        written = node.outputs[output]
        written.name = self.choose_name(f"{original.name}_written")
        written.type, written.shape = value.type, value.shape
        for reader, index in list(value.uses()):
            if reader is not node and self.position.get(reader, -1) > self.position[node]:
                reader.replace_input_with(index, written)
        self.newest[original] = written

    def add_graph_outputs(self) -> dict[str, str]:
        """Make the last versions of the model's inputs its outputs; return their names by input."""
        donated: dict[str, str] = {}
        for value, latest in self.newest.items():
            if value.is_graph_input() and value.name is not None:
                donated[value.name] = latest.name = self.choose_name(f"{value.name}_updated")
                self.graph.outputs.append(latest)
        return donated

    def choose_name(self, name: str) -> str:
        """Return the name, or a similar one that is not used yet."""
        candidate, k = name, 1
        while candidate in self.used_names:
            candidate, k = f"{name}_{k}", k + 1
        self.used_names.add(candidate)
        return candidate
