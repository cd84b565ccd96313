"""What onnx's checker leaves out: models that are legal by form, and yet cannot be read or would never end.

Everything here takes time that is linear in what is written in the file, and reads no external data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from ..arithmetic import LARGEST_SIZE
from ..errors import ModelError

# Functions are inlined. A node of the file may stand for so many nodes on average, more than layers need that are
# functions of functions; a few functions that call each other often would make any number of them.
MOST_NODES, MOST_NODES_EACH = 10_000, 100

# Bodies inside bodies, and functions that call functions. Protobuf reads no deeper bodies than that from a file.
DEEPEST = 32

# With numbers of axes beyond these onnx's inference of shapes reads foreign memory: it holds them in 32 bits.
_NUMBERS = range(-(2**31), 2**31)
_BOUNDED = {"axis": _NUMBERS, "axes": _NUMBERS, "batch_dims": range(2**31)}

MOST_ELEMENTS = 512
"""Of a sequence: each takes its part of the compiler's time."""

OWN_DOMAIN, OWN_OPSET = "onnx_lowering", 25
"""Of the operators that the compiler itself puts into models. Attention of version 25 is that of ai.onnx with sinks."""

_DECLARED_OPSET = "onnx_lowering.declared_opset"

Body = ir.Graph | ir.Function


def import_own_domain(model: ir.Model) -> None:
    """Declare the domain of the compiler's operators in a model that has some."""
    if any(node.domain == OWN_DOMAIN for graph in graphs(model) for node in graph):
        model.opset_imports[OWN_DOMAIN] = OWN_OPSET


def remember_opset(model: ir.Model) -> None:
    """Note the opset of ai.onnx that the model declares, before it is brought to another."""
    version = next((v for d, v in model.opset_imports.items() if d in ("", "ai.onnx")), 0)
    model.metadata_props.setdefault(_DECLARED_OPSET, str(version))


def declared_opset(model: ir.Model) -> int | None:
    """Return what `remember_opset` has noted; None where the model has the opset that it came with."""
    noted = model.metadata_props.get(_DECLARED_OPSET, "")
    return int(noted) if noted.isdecimal() else None


def check_domains(model: ir.Model) -> None:
    """Raises ModelError for operators that no model may have when it comes: Attention checks its inputs, and may."""
    for graph in graphs(model):
        own = next((node for node in graph if node.domain == OWN_DOMAIN and node.op_type != "Attention"), None)
        if own is not None:
            raise ModelError(
                f"node '{own.name}' ({own.op_type}) is of the domain {OWN_DOMAIN}, in which the "
                "compiler keeps its own operators. Compile the model that it was made from."
            )


def check_bodies(model: ir.Model) -> None:
    """Raises ModelError where bodies or functions lie too deep, or would be too many nodes when they are inlined."""
    written = 0
    # What each function stands for: its nodes when everything is inlined, and how deep that goes.
    sizes: dict[ir.OperatorIdentifier, tuple[int, int]] = {}
    for name in _callees_first(model):
        nodes, calls, bodies = _contents(model.functions[name], f"function '{_text(name)}'")
        written += nodes
        sizes[name] = _expanded(nodes, bodies, calls, sizes)
        if sizes[name][1] > DEEPEST:
            raise ModelError(
                f"function '{_text(name)}' calls functions and has bodies {sizes[name][1]} deep; at most {DEEPEST} are "
                "compiled. Inline the inner ones."
            )
    nodes, calls, bodies = _contents(model.graph, "the graph")
    expanded, depth = _expanded(nodes, bodies, calls, sizes)
    limit = MOST_NODES + MOST_NODES_EACH * (written + nodes)
    if depth > DEEPEST:
        raise ModelError(f"the graph has bodies and functions {depth} deep; at most {DEEPEST} are compiled.")
    if calls and expanded > limit:
        largest = max(calls, key=lambda name: sizes.get(name, (0, 0))[0])
        raise ModelError(
            f"with its functions inlined, the model has {expanded:,} nodes; a file of {written + nodes:,} nodes may "
            f"have {limit:,}. Most are in function '{_text(largest)}', which stands for {sizes[largest][0]:,}: its "
            "functions call each other too often."
        )


def _contents(body: Body, where: str) -> tuple[int, list[ir.OperatorIdentifier], int]:
    """Nodes, those in inner bodies included, the operators that they are, and the depth of the bodies."""
    nodes, operators, deepest = 0, [], 0
    todo: list[tuple[Body, int]] = [(body, 0)]
    while todo:
        inner, depth = todo.pop()
        deepest = max(deepest, depth)
        if depth > DEEPEST:
            raise ModelError(f"{where} has bodies {depth} deep (If, Loop, Scan); at most {DEEPEST} are compiled.")
        for node in inner:
            nodes += 1
            operators.append(node.op_identifier())
            todo += [(graph, depth + 1) for graph in _bodies(node)]
    return nodes, operators, deepest


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.is_ref() or attribute.value is None:  # which check_attributes refuses
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _expanded(
    nodes: int, bodies: int, operators: list[ir.OperatorIdentifier], sizes: dict[ir.OperatorIdentifier, tuple[int, int]]
) -> tuple[int, int]:
    called = [sizes[name] for name in operators if name in sizes]
    return nodes + sum(n - 1 for n, _ in called), bodies + max((depth + 1 for _, depth in called), default=0)


def _callees_first(model: ir.Model) -> list[ir.OperatorIdentifier]:
    """The functions, each behind those that it calls. Raises ModelError for one that calls itself."""
    order: list[ir.OperatorIdentifier] = []
    done: set[ir.OperatorIdentifier] = set()
    for start in model.functions:
        path: dict[ir.OperatorIdentifier, Iterator[ir.OperatorIdentifier]] = {}
        following: ir.OperatorIdentifier | None = start
        while following is not None:
            if following in path:
                raise ModelError(f"function '{_text(following)}' calls itself, which ONNX does not allow.")
            if following not in done:
                _, operators, _ = _contents(model.functions[following], f"function '{_text(following)}'")
                path[following] = iter([name for name in dict.fromkeys(operators) if name in model.functions])
            following = None
            while path and following is None:
                last = next(reversed(path))
                following = next((name for name in path[last] if name not in done), None)
                if following is None:
                    del path[last]
                    done.add(last)
                    order.append(last)
    return order


def _text(name: ir.OperatorIdentifier) -> str:
    return ".".join(part for part in name if part)


# -- values and attributes --------------------------------------------------------------------------------------------


def check_tensors(model: ir.Model) -> None:
    """Raises ModelError for an initializer whose data is not what its type and shape say, for impossible sizes, and for
    inputs and outputs whose element type is unknown."""
    for graph in graphs(model):
        _check_names(graph)
        for value in [*graph.inputs, *graph.outputs]:
            _check_value(value)
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                raise ModelError(f"'{value.name}' has no element type; inputs and outputs must declare one.")
        for node in graph:
            for value in node.outputs:
                _check_value(value)
        for value in graph.initializers.values():
            if value.const_value is None:
                raise ModelError(f"initializer '{value.name}' has no data.")
            _check_tensor(f"initializer '{value.name}'", value.const_value)


def _check_names(graph: ir.Graph) -> None:
    values = [*graph.inputs, *graph.initializers.values()]
    names = [graph.name]
    for node in graph:
        names += [node.name, node.op_type, node.domain]
        values += node.outputs
    for name in (*names, *(value.name for value in values)):
        if isinstance(name, bytes):
            raise ModelError(f"the name {name!r} is no text: its bytes are no UTF-8.")


def check_attributes(model: ir.Model) -> None:
    """Raises ModelError for an attribute whose value is none of its type, and for nodes that hold what no node can.

    Of a model whose functions are inlined: only functions have attributes that stand for others.
    """
    for node in model.graph.all_nodes():
        where = f"{_text(node.op_identifier())} '{node.name or ', '.join(v.name or '' for v in node.outputs)}'"
        if not node.outputs:
            raise ModelError(f"{where} has no output.")
        for attribute in node.attributes.values():
            _check_attribute(f"attribute '{attribute.name}' of {where}", attribute)
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attributes) != 1:
            names = ", ".join(node.attributes) or "none"
            raise ModelError(f"{where} must have one attribute, its value, but has {names}.")


def _check_attribute(where: str, attribute: ir.Attr) -> None:
    kinds = ir.AttributeType
    if attribute.is_ref():
        raise ModelError(
            f"{where} stands for attribute '{attribute.ref_attr_name}' of a function, but the node is in no function."
        )
    if attribute.type == kinds.UNDEFINED or attribute.value is None:
        raise ModelError(f"{where} has no value.")
    if attribute.name in _BOUNDED:
        legal = _BOUNDED[attribute.name]
        for number in {kinds.INT: (attribute.value,), kinds.INTS: attribute.value}.get(attribute.type, ()):
            if number not in legal:
                raise ModelError(f"{where} is {number}; it can be from {legal.start} to {legal.stop - 1}.")
    if attribute.type == kinds.TENSOR:
        _check_tensor(where, attribute.as_tensor())
    elif attribute.type == kinds.TENSORS:
        for tensor in attribute.as_tensors():
            _check_tensor(where, tensor)
    texts = {kinds.STRING: (attribute.value,), kinds.STRINGS: attribute.value}.get(attribute.type, ())
    if any(isinstance(text, bytes) for text in texts):
        raise ModelError(f"{where} is no text: its bytes are no UTF-8.")


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The model's graph, and the bodies in it."""
    todo = [model.graph]
    while todo:
        graph = todo.pop()
        yield graph
        todo += [body for node in graph for body in _bodies(node)]


def _check_value(value: ir.Value) -> None:
    if isinstance(value.shape, ir.Shape):
        _check_sizes(f"'{value.name}'", [d for d in value.shape if isinstance(d, int)])


def _check_sizes(where: str, dims: list[int]) -> None:
    for axis, size in enumerate(dims):
        if not 0 <= size <= LARGEST_SIZE:
            raise ModelError(f"{where} has size {size} along axis {axis}; sizes are 0 to {LARGEST_SIZE} (2^40).")
    if math.prod(dims) > LARGEST_SIZE:
        raise ModelError(f"{where} has {math.prod(dims)} elements, {dims}; tensors have at most {LARGEST_SIZE} (2^40).")


def _check_tensor(where: str, tensor: ir.TensorProtocol) -> None:
    try:
        known = tensor.dtype != ir.DataType.UNDEFINED
    except ValueError:
        known = False
    if not known:
        raise ModelError(f"{where} has no element type, or one that ONNX does not have.")
    dims = list(tensor.shape.numpy())
    _check_sizes(where, dims)
    kind = f"{tensor.dtype}{dims}"
    if isinstance(tensor, ir.ExternalTensor):
        path = Path(tensor.path)
        if not path.is_file():
            raise ModelError(f"{where} is in the file {path}, which does not exist.")
        begin, length, there = tensor.offset or 0, tensor.length, path.stat().st_size
        if length is not None and length != tensor.nbytes:
            raise ModelError(f"{where} is {kind}, which takes {tensor.nbytes} bytes; its data has {length}.")
        if begin < 0 or begin + tensor.nbytes > there:
            raise ModelError(
                f"{where} is in bytes {begin} to {begin + tensor.nbytes} of {path}, which has {there}. "
                "The file is cut off, or another model's."
            )
        return
    raw = tensor.raw if isinstance(tensor, ir.TensorProtoTensor) else None
    if raw is not None and raw.HasField("raw_data"):
        if len(raw.raw_data) != tensor.nbytes:
            raise ModelError(f"{where} is {kind}, which takes {tensor.nbytes} bytes; its data has {len(raw.raw_data)}.")
        return
    try:
        found = tensor.numpy().size
    except Exception as error:
        raise ModelError(f"{where} is {kind}, and its data has another number of elements.") from error
    if found != tensor.size:
        raise ModelError(f"{where} is {kind}, which has {tensor.size} elements; its data has {found}.")
