"""Checks that onnx's checker omits: well-formed models that cannot be read, or whose processing would never end.

All checks take time linear in the contents of the file, and read no external data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from ...arithmetic import LARGEST_SIZE
from ...errors import ModelError

# Functions are inlined. This limits the nodes that a node of the file expands to on average, to more than layers need
# that are functions of functions. A few functions that call each other often would expand to any number of nodes.
MAX_NODES, MAX_NODES_PER_NODE = 10_000, 100

# Maximum depth of bodies inside bodies, and functions that call functions. Protobuf reads no deeper bodies from a file.
MAX_DEPTH = 32

# Beyond these bounds onnx's shape inference reads out of bounds: it stores axes in 32 bits.
_INT32_RANGE = range(-(2**31), 2**31)
_BOUNDED = {"axis": _INT32_RANGE, "axes": _INT32_RANGE, "batch_dims": range(2**31)}

MAX_SEQUENCE_ELEMENTS = 512
"""Maximum elements of a sequence: each adds to the compile time."""

OWN_DOMAIN, OWN_OPSET = "onnx_lowering", 25
"""Domain of the operators that the compiler inserts into models. Attention 25 is that of ai.onnx with sinks."""

_DECLARED_OPSET = "onnx_lowering.declared_opset"

Body = ir.Graph | ir.Function


def import_own_domain(model: ir.Model) -> None:
    """Declare the domain of the compiler's operators in a model that has some."""
    if any(node.domain == OWN_DOMAIN for graph in iterate_graphs(model) for node in graph):
        model.opset_imports[OWN_DOMAIN] = OWN_OPSET


def record_opset(model: ir.Model) -> None:
    """Record the opset of ai.onnx that the model declares, before it is converted."""
    version = next((v for d, v in model.opset_imports.items() if d in ("", "ai.onnx")), 0)
    model.metadata_props.setdefault(_DECLARED_OPSET, str(version))


def declared_opset(model: ir.Model) -> int | None:
    """Return the opset recorded by `record_opset`; None if the model has its original one."""
    recorded = model.metadata_props.get(_DECLARED_OPSET, "")
    return int(recorded) if recorded.isdecimal() else None


def check_domains(model: ir.Model) -> None:
    """Raise ModelError for operators that no loaded model may have.

    Attention is accepted, since it checks its inputs.
    """
    for graph in iterate_graphs(model):
        internal = next((node for node in graph if node.domain == OWN_DOMAIN and node.op_type != "Attention"), None)
        if internal is not None:
            raise ModelError(
                "model.domain_reserved",
                f"node '{internal.name}' ({internal.op_type}) is of the domain {OWN_DOMAIN}, which is reserved for "
                "operators of the compiler. Compile the model from which this model was made.",
            )


def check_bodies(model: ir.Model) -> None:
    """Raise ModelError if bodies or functions are nested too deep, or expand to too many nodes."""
    written = 0
    # By function, the number of nodes when everything is inlined, and the depth.
    sizes: dict[ir.OperatorIdentifier, tuple[int, int]] = {}
    for name in _order_by_callees(model):
        nodes, calls, bodies = _count_nodes(model.functions[name], f"function '{_format_identifier(name)}'")
        written += nodes
        sizes[name] = _count_expanded(nodes, bodies, calls, sizes)
        if sizes[name][1] > MAX_DEPTH:
            raise ModelError(
                "model.nesting_too_deep",
                f"function '{_format_identifier(name)}' nests calls and bodies {sizes[name][1]} deep; at most "
                f"{MAX_DEPTH} levels are supported. Inline the inner functions.",
            )
    nodes, calls, bodies = _count_nodes(model.graph, "the graph")
    expanded, depth = _count_expanded(nodes, bodies, calls, sizes)
    limit = MAX_NODES + MAX_NODES_PER_NODE * (written + nodes)
    if depth > MAX_DEPTH:
        raise ModelError(
            "model.nesting_too_deep",
            f"the graph nests bodies and functions {depth} deep; at most {MAX_DEPTH} levels are supported.",
        )
    if calls and expanded > limit:
        largest = max(calls, key=lambda name: sizes.get(name, (0, 0))[0])
        raise ModelError(
            "model.node_count_too_large",
            f"with its functions inlined, the model has {expanded:,} nodes; a file of {written + nodes:,} nodes may "
            f"have at most {limit:,}. Most are in function '{_format_identifier(largest)}', which expands to "
            f"{sizes[largest][0]:,}. Reduce the calls between its functions.",
        )


def _count_nodes(body: Body, where: str) -> tuple[int, list[ir.OperatorIdentifier], int]:
    """Return the number of nodes, including inner bodies, their operators, and the depth of the bodies."""
    nodes, operators, deepest = 0, [], 0
    todo: list[tuple[Body, int]] = [(body, 0)]
    while todo:
        inner, depth = todo.pop()
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            raise ModelError(
                "model.nesting_too_deep",
                f"{where} nests bodies {depth} deep (If, Loop, Scan); at most {MAX_DEPTH} levels are supported.",
            )
        for node in inner:
            nodes += 1
            operators.append(node.op_identifier())
            todo += [(graph, depth + 1) for graph in iterate_bodies(node)]
    return nodes, operators, deepest


def iterate_bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the branches and bodies of a node."""
    for attribute in node.attributes.values():
        if attribute.is_ref() or attribute.value is None:  # check_attributes rejects it
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def has_bodies(node: ir.Node) -> bool:
    """Return whether a node has branches or a body."""
    return next(iterate_bodies(node), None) is not None


def _count_expanded(
    nodes: int, bodies: int, operators: list[ir.OperatorIdentifier], sizes: dict[ir.OperatorIdentifier, tuple[int, int]]
) -> tuple[int, int]:
    called = [sizes[name] for name in operators if name in sizes]
    return nodes + sum(n - 1 for n, _ in called), bodies + max((depth + 1 for _, depth in called), default=0)


def _order_by_callees(model: ir.Model) -> list[ir.OperatorIdentifier]:
    """Return the functions, each after those that it calls.

    Raises:
        ModelError: A function calls itself.
    """
    order: list[ir.OperatorIdentifier] = []
    done: set[ir.OperatorIdentifier] = set()
    for start in model.functions:
        path: dict[ir.OperatorIdentifier, Iterator[ir.OperatorIdentifier]] = {}
        following: ir.OperatorIdentifier | None = start
        while following is not None:
            if following in path:
                raise ModelError(
                    "model.function_recursive",
                    f"function '{_format_identifier(following)}' calls itself, which ONNX does not allow.",
                )
            if following not in done:
                _, operators, _ = _count_nodes(
                    model.functions[following], f"function '{_format_identifier(following)}'"
                )
                path[following] = iter([name for name in dict.fromkeys(operators) if name in model.functions])
            following = None
            while path and following is None:
                innermost = next(reversed(path))
                following = next((name for name in path[innermost] if name not in done), None)
                if following is None:
                    del path[innermost]
                    done.add(innermost)
                    order.append(innermost)
    return order


def _format_identifier(name: ir.OperatorIdentifier) -> str:
    return ".".join(component for component in name if component)


# -- values and attributes --------------------------------------------------------------------------------------------


def check_tensors(model: ir.Model) -> None:
    """Raise ModelError for inconsistent initializers, impossible sizes, and unknown element types.

    The data of an initializer must match its type and shape. Inputs and outputs must have an element type.
    """
    for graph in iterate_graphs(model):
        _check_names(graph)
        for value in [*graph.inputs, *graph.outputs]:
            _check_value(value)
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                raise ModelError(
                    "model.dtype_missing", f"'{value.name}' has no element type; inputs and outputs must declare one."
                )
        for node in graph:
            for value in node.outputs:
                _check_value(value)
        for value in graph.initializers.values():
            if value.const_value is None:
                raise ModelError("model.initializer_data_missing", f"initializer '{value.name}' has no data.")
            _check_tensor(f"initializer '{value.name}'", value.const_value)


def _check_names(graph: ir.Graph) -> None:
    values = [*graph.inputs, *graph.initializers.values()]
    names = [graph.name]
    for node in graph:
        names += [node.name, node.op_type, node.domain]
        values += node.outputs
    for name in (*names, *(value.name for value in values)):
        if isinstance(name, bytes):
            raise ModelError("model.text_not_utf8", f"the name {name!r} is not text: its bytes are not UTF-8.")


def check_attributes(model: ir.Model) -> None:
    """Raise ModelError for attributes whose value is not of their type, and for malformed nodes.

    The model's functions are inlined before: only attributes in functions refer to others.
    """
    for node in model.graph.all_nodes():
        where = (
            f"{_format_identifier(node.op_identifier())} '{node.name or ', '.join(v.name or '' for v in node.outputs)}'"
        )
        if not node.outputs:
            raise ModelError("model.node_output_missing", f"{where} has no output.")
        for attribute in node.attributes.values():
            _check_attribute(f"attribute '{attribute.name}' of {where}", attribute)
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attributes) != 1:
            names = ", ".join(node.attributes) or "none"
            raise ModelError(
                "model.constant_attribute_count", f"{where} must have one attribute, its value, but has {names}."
            )


def _check_attribute(where: str, attribute: ir.Attr) -> None:
    kinds = ir.AttributeType
    if attribute.is_ref():
        raise ModelError(
            "model.attribute_reference_invalid",
            f"{where} refers to attribute '{attribute.ref_attr_name}' of a function, but the node is not in a "
            "function.",
        )
    if attribute.type == kinds.UNDEFINED or attribute.value is None:
        raise ModelError("model.attribute_value_missing", f"{where} has no value.")
    if attribute.name in _BOUNDED:
        legal = _BOUNDED[attribute.name]
        for number in {kinds.INT: (attribute.value,), kinds.INTS: attribute.value}.get(attribute.type, ()):
            if number not in legal:
                raise ModelError(
                    "model.attribute_out_of_range",
                    f"{where} is {number}; it must be from {legal.start} to {legal.stop - 1}.",
                )
    if attribute.type == kinds.TENSOR:
        _check_tensor(where, attribute.as_tensor())
    elif attribute.type == kinds.TENSORS:
        for tensor in attribute.as_tensors():
            _check_tensor(where, tensor)
    texts = {kinds.STRING: (attribute.value,), kinds.STRINGS: attribute.value}.get(attribute.type, ())
    if any(isinstance(text, bytes) for text in texts):
        raise ModelError("model.text_not_utf8", f"{where} is not text: its bytes are not UTF-8.")


def iterate_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Yield the model's graph, and the bodies in it."""
    todo = [model.graph]
    while todo:
        graph = todo.pop()
        yield graph
        todo += [body for node in graph for body in iterate_bodies(node)]


def _check_value(value: ir.Value) -> None:
    if isinstance(value.shape, ir.Shape):
        _check_sizes(f"'{value.name}'", [d for d in value.shape if isinstance(d, int)])


def _check_sizes(where: str, dims: list[int]) -> None:
    for axis, size in enumerate(dims):
        if not 0 <= size <= LARGEST_SIZE:
            raise ModelError(
                "model.size_out_of_range",
                f"{where} has size {size} along axis {axis}; sizes are 0 to {LARGEST_SIZE} (2^40).",
            )
    if math.prod(dims) > LARGEST_SIZE:
        raise ModelError(
            "model.tensor_too_large",
            f"{where} has {math.prod(dims)} elements, {dims}; tensors have at most {LARGEST_SIZE} (2^40).",
        )


def _check_tensor(where: str, tensor: ir.TensorProtocol) -> None:
    try:
        has_dtype = tensor.dtype != ir.DataType.UNDEFINED
    except ValueError:
        has_dtype = False
    if not has_dtype:
        raise ModelError(
            "model.tensor_dtype_unknown", f"{where} has no element type, or one that ONNX does not define."
        )
    dims = list(tensor.shape.numpy())
    _check_sizes(where, dims)
    kind = f"{tensor.dtype}{dims}"
    if isinstance(tensor, ir.ExternalTensor):
        path = Path(tensor.path)
        if not path.is_file():
            raise ModelError("model.data_file_missing", f"{where} is in the file {path}, which does not exist.")
        begin, length, file_size = tensor.offset or 0, tensor.length, path.stat().st_size
        if length is not None and length != tensor.nbytes:
            raise ModelError(
                "model.data_size_mismatch",
                f"{where} is {kind}, which takes {tensor.nbytes} bytes; its data has {length}.",
            )
        if begin < 0 or begin + tensor.nbytes > file_size:
            raise ModelError(
                "model.data_file_truncated",
                f"{where} is in bytes {begin} to {begin + tensor.nbytes} of {path}, which has {file_size} bytes. "
                "Restore the file: it is truncated, or belongs to another model.",
            )
        return
    raw = tensor.raw if isinstance(tensor, ir.TensorProtoTensor) else None
    if raw is not None and raw.HasField("raw_data"):
        if len(raw.raw_data) != tensor.nbytes:
            raise ModelError(
                "model.data_size_mismatch",
                f"{where} is {kind}, which takes {tensor.nbytes} bytes; its data has {len(raw.raw_data)}.",
            )
        return
    try:
        element_count = tensor.numpy().size
    except Exception as error:
        raise ModelError(
            "model.data_size_mismatch", f"{where} is {kind}, and its data has another number of elements."
        ) from error
    if element_count != tensor.size:
        raise ModelError(
            "model.data_size_mismatch",
            f"{where} is {kind}, which has {tensor.size} elements; its data has {element_count}.",
        )
