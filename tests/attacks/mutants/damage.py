"""Ways in which a model file gets damaged, or an exporter gets it wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import onnx

from ..fuzz.mutate_model import mutated

_LONGEST = 1 << 20
# Element types by number; 99 is none.
_TYPES = (0, 1, 2, 3, 6, 7, 9, 10, 11, 16, 17, 22, 99)
_SIZES = (-1, 0, 1, 2, 3, 5, 8, 64, 1 << 31, 1 << 62)
_VALUES: tuple[Any, ...] = (0, 1, -1, 7, 1 << 40, 0.5, "text", [0], [1, -1], [0, 1, 2, 3], [2.0])
_OPERATORS = (
    "Add",
    "MatMul",
    "Reshape",
    "Concat",
    "Softmax",
    "Gather",
    "Identity",
    "If",
    "Attention",
    "NoSuchOperator",
)

Damage = Callable[[bytes, random.Random], bytes]
DAMAGES: dict[str, Damage] = {}


def _of_bytes(damage: Callable[[bytearray, random.Random], None]) -> None:
    def apply(data: bytes, rng: random.Random) -> bytes:
        changed = bytearray(data)
        damage(changed, rng)
        return bytes(changed)

    DAMAGES[damage.__name__] = apply


def _of_model(damage: Callable[[onnx.GraphProto, random.Random], None]) -> None:
    def apply(data: bytes, rng: random.Random) -> bytes:
        model = onnx.load_model_from_string(data)
        damage(model.graph, rng)
        return model.SerializePartialToString()

    DAMAGES[damage.__name__] = apply


@_of_bytes
def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


@_of_bytes
def truncate_file(data: bytearray, rng: random.Random) -> None:
    del data[rng.choice((0, 1, len(data) - 1, rng.randrange(len(data)), rng.randrange(len(data)))) :]


@_of_bytes
def lose_bytes(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    if rng.random() < 0.5:
        del data[start : start + rng.choice((1, 4, 100))]
    else:
        data[start : start + 16] = bytes(min(16, len(data) - start))


@_of_model
def drop_nodes(graph: onnx.GraphProto, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 3))):
        del graph.node[rng.randrange(len(graph.node))]


@_of_model
def duplicate_nodes(graph: onnx.GraphProto, rng: random.Random) -> None:
    copy = onnx.NodeProto()
    copy.CopyFrom(rng.choice(graph.node))
    if rng.random() < 0.5:
        copy.output[:] = [f"{name}_again" for name in copy.output]
        copy.name += "_again"
    graph.node.insert(rng.randrange(len(graph.node)), copy)


@_of_model
def swap_nodes(graph: onnx.GraphProto, rng: random.Random) -> None:
    first, second = (rng.choice(graph.node) for _ in range(2))
    copy = onnx.NodeProto()
    copy.CopyFrom(first)
    first.CopyFrom(second)
    second.CopyFrom(copy)


@_of_model
def rename_values(graph: onnx.GraphProto, rng: random.Random) -> None:
    """Replace the name of a value by another one, or by none."""
    everything = [name for node in graph.node for name in (*node.input, *node.output)]
    name = rng.choice((rng.choice(everything), rng.choice(everything), "nowhere", ""))
    if rng.random() < 0.15:
        rng.choice([*graph.input, *graph.output, *graph.initializer]).name = name
        return
    node = rng.choice(graph.node)
    names = node.output if rng.random() < 0.3 or not node.input else node.input
    names[rng.randrange(len(names))] = name


@_of_model
def change_inputs(graph: onnx.GraphProto, rng: random.Random) -> None:
    """Give a node one input more or one less, or reverse its inputs."""
    node = rng.choice([node for node in graph.node if node.input])
    choice = rng.randrange(3)
    if choice == 0:
        node.input.append(rng.choice(rng.choice(graph.node).output))
    elif choice == 1:
        del node.input[rng.randrange(len(node.input))]
    else:
        node.input[:] = reversed(node.input)


@_of_model
def change_attributes(graph: onnx.GraphProto, rng: random.Random) -> None:
    """Set a value of another size or type, remove an attribute, or add one that the operator does not have."""
    node = rng.choice([node for node in graph.node if node.attribute])
    index = rng.randrange(len(node.attribute))
    name = node.attribute[index].name
    choice = rng.random()
    if choice < 0.8:
        node.attribute.pop(index)
    if choice > 0.2:
        name = "unknown" if choice > 0.9 else name
        node.attribute.append(onnx.helper.make_attribute(name, rng.choice(_VALUES)))


@_of_model
def change_types(graph: onnx.GraphProto, rng: random.Random) -> None:
    casts = [a for node in graph.node for a in node.attribute if a.name in ("to", "dtype")]
    holder = rng.choice([*graph.input, *graph.output, *graph.value_info, *graph.initializer, *casts])
    number = rng.choice(_TYPES)
    if isinstance(holder, onnx.TensorProto):
        holder.data_type = number
    elif isinstance(holder, onnx.AttributeProto):
        holder.i = number
    else:
        holder.type.tensor_type.elem_type = number


@_of_model
def change_sizes(graph: onnx.GraphProto, rng: random.Random) -> None:
    holder = rng.choice([*graph.input, *graph.input, *graph.output, *graph.value_info, *graph.initializer])
    dims = holder.dims if isinstance(holder, onnx.TensorProto) else holder.type.tensor_type.shape.dim
    choice = rng.random()
    if not dims or choice < 0.15:
        dims.append(2) if isinstance(holder, onnx.TensorProto) else dims.add()
    elif choice < 0.3:
        del dims[rng.randrange(len(dims))]
    elif isinstance(holder, onnx.TensorProto):
        dims[rng.randrange(len(dims))] = rng.choice(_SIZES)
    elif choice < 0.7:
        rng.choice(dims).dim_value = rng.choice(_SIZES)
    else:
        rng.choice(dims).dim_param = rng.choice(("batch", "n", "sequence_length", "", "a b"))


@_of_model
def change_operators(graph: onnx.GraphProto, rng: random.Random) -> None:
    node = rng.choice(graph.node)
    if rng.random() < 0.8:
        node.op_type = rng.choice((rng.choice(graph.node).op_type, rng.choice(_OPERATORS)))
    else:
        node.domain = rng.choice(("com.microsoft", "pkg.onnxscript.torch_lib", "nobody.knows"))


@_of_model
def change_constants(graph: onnx.GraphProto, rng: random.Random) -> None:
    """Change elements of a small tensor of integers (axes, shapes), or truncate its data."""
    inner = [a.t for node in graph.node for a in node.attribute if a.HasField("t")]
    tensors = [t for t in (*graph.initializer, *inner) if t.data_type == onnx.TensorProto.INT64]
    if not tensors:
        tensors = list(graph.initializer)
    tensor = rng.choice(tensors)
    array = onnx.numpy_helper.to_array(tensor).copy()
    if rng.random() < 0.2 or not array.size:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
        return
    array.flat[rng.randrange(array.size)] = rng.choice((-(1 << 31), -2, -1, 0, 1, 2, 9, 1 << 31))
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


@_of_model
def lay_outside(graph: onnx.GraphProto, rng: random.Random) -> None:
    """Declare a weight external, in a file that is missing, elsewhere or none; or, if of integers, in the model."""
    tensor = rng.choice(graph.initializer)
    locations = ["missing.bin", "/etc/passwd", "../model.onnx", "", ".", "a\0b"]
    if tensor.data_type == onnx.TensorProto.INT64:  # floats of 1e30 would overflow, and anything come of them
        locations.append("model.onnx")
    fields = {"location": rng.choice(locations)}
    if rng.random() < 0.7:
        fields["offset"] = rng.choice(("0", "8", "-8", "99999999999", "x"))
        fields["length"] = rng.choice((str(len(tensor.raw_data)), "0", "-1", "99999999999999999999"))
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in fields.items():
        tensor.external_data.add(key=key, value=value)


def change_versions(data: bytes, rng: random.Random) -> bytes:
    model = onnx.load_model_from_string(data)
    if rng.random() < 0.3:
        model.ir_version = rng.choice((0, 1, 3, 7, 13, 99))
    elif rng.random() < 0.2:
        del model.opset_import[:]
    else:
        rng.choice(model.opset_import).version = rng.choice((-1, 0, 1, 7, 11, 13, 17, 18, 20, 23, 24, 25, 26, 99))
    return model.SerializePartialToString()


def change_fields(data: bytes, rng: random.Random) -> bytes:
    """Change any fields at any depth."""
    return mutated(data, rng, _LONGEST) or data


DAMAGES[change_versions.__name__] = change_versions
DAMAGES[change_fields.__name__] = change_fields
