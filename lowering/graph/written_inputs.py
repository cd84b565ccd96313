"""Operators that write into their inputs: what they leave there becomes an output of theirs.

Serving operators update caches where they are, and give out the attention alone. Here such a node gets the outputs that
it has none of, and every later reader of the tensor reads them, so that a model says what it computes. Where the tensor
is an input of the model, its last version becomes an output that takes over the input's memory: the array that the
caller passes is updated.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..errors import ModelError


@dataclass(frozen=True)
class Write:
    """Output number `output` of a node is what becomes of its input number `source`; with `unless_zero` only where that
    attribute is there and not 0."""

    source: int
    output: int
    unless_zero: str = ""

    def input_of(self, node: ir.Node) -> ir.Value | None:
        """What the node writes to, if it does."""
        value = node.inputs[self.source] if self.source < len(node.inputs) else None
        attribute = node.attributes.get(self.unless_zero)
        happens = not self.unless_zero or (attribute is not None and attribute.value != 0)
        return value if happens else None


WRITES: dict[tuple[str, str], tuple[Write, ...]] = {("tensorrt_llm", "GptAttention"): (Write(1, 1),)}
"""By domain and operator."""

WRITES["com.microsoft", "PagedAttention"] = Write(3, 1), Write(4, 2)
for _domain in ("opmx.dynamic_batching", "pmx.dynamic_batching"):
    WRITES[_domain, "MultiHeadCacheAttention"] = Write(10, 1), Write(11, 2, "quant_bit")
    WRITES[_domain, "KeyValueCache"] = Write(8, 2), Write(9, 3, "quant_bit")


def name_written_inputs(model: ir.Model) -> dict[str, str]:
    """Adds the outputs; by input of the model that is written without being given out, the output that holds it.

    Raises ModelError for a constant that a node writes to.
    """
    if not any((node.domain, node.op_type) in WRITES for node in model.graph):
        return {}
    naming = _Naming(model.graph)
    for node in list(model.graph):
        for write in WRITES.get((node.domain, node.op_type), ()):
            value = write.input_of(node)
            named = write.output < len(node.outputs) and node.outputs[write.output].name
            if value is not None and not named:
                naming.give(node, value, write.output)
    return naming.finish()


class _Naming:
    """Outputs for what nodes write, in the order in which nodes stand."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.position = {node: k for k, node in enumerate(graph)}
        self.taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
        self.taken |= {v.name for node in graph for v in node.outputs}
        self.last: dict[ir.Value, ir.Value] = {}  # by what was written first, its newest version

    def give(self, node: ir.Node, value: ir.Value, output: int) -> None:
        original = next((first for first, now in self.last.items() if now is value), value)
        if original.is_initializer():
            raise ModelError(
                f"node '{node.name or node.op_type}' writes to the constant '{original.name}'. Make it an input of the "
                "model: what it holds is the caller's, from call to call."
            )
        if output >= len(node.outputs):
            node.resize_outputs(output + 1)
        made = node.outputs[output]
        made.name = self.free(f"{original.name}_written")
        made.type, made.shape = value.type, value.shape
        for reader, index in list(value.uses()):
            if reader is not node and self.position.get(reader, -1) > self.position[node]:
                reader.replace_input_with(index, made)
        self.last[original] = made

    def finish(self) -> dict[str, str]:
        """Makes the last versions of the model's inputs outputs of it; their names by those of the inputs."""
        donated: dict[str, str] = {}
        for value, now in self.last.items():
            if value.is_graph_input() and value.name is not None:
                donated[value.name] = now.name = self.free(f"{value.name}_updated")
                self.graph.outputs.append(now)
        return donated

    def free(self, name: str) -> str:
        """The name, or one like it that nothing has yet."""
        found, k = name, 1
        while found in self.taken:
            found, k = f"{name}_{k}", k + 1
        self.taken.add(found)
        return found
