"""Models that the compiler must refuse: the contents of a file, and a part of the sentence that says where.

Those of external weights expect w.bin, a file of 32 bytes, next to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto, helper


def text(body: str, opset: int = 24) -> bytes:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {body}').SerializeToString()


def edited(body: str, edit: Callable[[onnx.ModelProto], Any]) -> bytes:
    model = onnx.load_model_from_string(text(body))
    edit(model)
    return model.SerializeToString()


def with_weight(edit: Callable[[onnx.TensorProto], Any]) -> bytes:
    """x + w, and w as float[4] with its data replaced."""

    def add(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
        edit(tensor)

    return edited("m (float[4] x) => (float[4] y) { [adds] y = Add (x, w) }", add)


def external(**entries: object) -> bytes:
    def edit(tensor: onnx.TensorProto) -> None:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))

    return with_weight(edit)


def functions(levels: int) -> bytes:
    """Return a model of functions, each of which calls the previous one twice."""
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("f", 1)]
    all_functions = [helper.make_function("f", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for k in range(1, levels + 1):
        calls = [helper.make_node(f"F{k - 1}", [i], [o], domain="f") for i, o in (("a", "t"), ("t", "b"))]
        all_functions.append(helper.make_function("f", f"F{k}", ["a"], ["b"], calls, opsets))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(f"F{levels}", ["x"], ["y"], domain="f")],
        "g",
        [value("x", TensorProto.FLOAT, [4])],
        [value("y", TensorProto.FLOAT, [4])],
    )
    return helper.make_model(graph, opset_imports=opsets, functions=all_functions, ir_version=10).SerializeToString()


def calls_itself() -> bytes:
    model = onnx.load_model_from_string(functions(1))
    model.functions[1].node[0].op_type = "F1"
    return model.SerializeToString()


def set_dim(size: int) -> Callable[[onnx.ModelProto], Any]:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size

    return edit


def with_constant(edit: Callable[[onnx.NodeProto], Any]) -> bytes:
    """x + a constant, with the Constant node edited."""
    body = "m (float[4] x) => (float[4] y) { [made] c = Constant <value = float {1.0}> () [adds] y = Add (x, c) }"
    return edited(body, lambda m: edit(m.graph.node[0]))


def with_values(inner: onnx.ValueInfoProto) -> bytes:
    """Two nodes, and what the model declares of the value between them."""
    return edited(
        "m (float[4] x) => (float[4] y) { t = Neg (x) y = Neg (t) }", lambda m: m.graph.value_info.append(inner)
    )


RELU = "m (float[4] x) => (float[4] y) { [relu] y = Relu (x) }"
LOOP = """m (int64 n, bool go, float[4] x) => (float[4] y) {
  [loops] y = Loop (n, go, x) <body = b (int64 i, bool c, float[4] a) => (bool d, float[4] e) {
    d = Identity (c) e = CastLike (a, i) }> }"""

# The contents of the file, and a part of the sentence.
MODELS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not an ONNX model: it is empty"),
    "text": (b"This is no model.", "ONNX model"),
    "cut off": (text(RELU)[:40], "ONNX model"),
    "no operator sets": (edited(RELU, lambda m: m.ClearField("opset_import")), "opset_import"),
    "unknown operator": (
        edited(
            RELU, lambda m: (m.opset_import.add(domain="far", version=1), setattr(m.graph.node[0], "domain", "far"))
        ),
        "far.Relu-1 'relu': no lowering is registered",
    ),
    "an input without a shape": (
        edited(
            "m (float[A] x, float[A] z) => (float[A] y) { y = Add (x, z) }",
            lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"),
        ),
        "model.input_shape_missing",
    ),
    "a sequence": (text("m (seq(float[4]) x) => (float[4] y) { y = ConcatFromSequence <axis = 0> (x) }"), "'x'"),
    "size 2^62": (edited(RELU, set_dim(2**62)), "'x' has size 4611686018427387904 along axis 0"),
    "a negative size": (edited(RELU, set_dim(-2)), "'x'"),
    "too many elements": (
        text("m (float[1048576, 1048576, 2] x) => (float[A, B, C] y) { y = Relu (x) }"),
        "'x' has 219",
    ),
    "another output type": (text("m (float[N] x) => (int64[N] y) { y = Relu (x) }"), "y'"),
    "surplus bytes": (with_weight(lambda t: setattr(t, "raw_data", b"\0" * 20)), "'w'"),
    "missing bytes": (
        with_weight(lambda t: setattr(t, "raw_data", b"\0" * 12)),
        "tensor name: w) raw_data size (12 bytes)",
    ),
    "missing elements": (with_weight(lambda t: t.float_data.extend([1.0] * 3)), "w"),
    "an initializer of no element type": (with_weight(lambda t: t.ClearField("data_type")), "data_type"),
    "an initializer of an unknown type": (with_weight(lambda t: setattr(t, "data_type", 77)), "w"),
    "surplus elements": (with_weight(lambda t: t.float_data.extend([1.0] * 7)), "initializer 'w' is FLOAT[4]"),
    "an input of no element type": (
        edited(RELU, lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 0)),
        "'x' has no element type",
    ),
    "an inner size of 2^63 - 1": (
        with_values(helper.make_tensor_value_info("t", TensorProto.FLOAT, [2**63 - 1])),
        "'t' has size 9223372036854775807 along axis 0",
    ),
    "a constant of nothing": (
        with_constant(lambda n: n.ClearField("attribute")),
        "Constant 'made' must have one attribute, its value, but has none",
    ),
    "a constant of two values": (
        with_constant(lambda n: n.attribute.add(name="value_int", i=3, type=onnx.AttributeProto.INT)),
        "Constant 'made' must have one attribute, its value, but has value, value_int",
    ),
    "surplus elements of an attribute": (
        with_constant(lambda n: n.attribute[0].t.float_data.extend([1.0] * 6)),
        "attribute 'value' of Constant 'made' is FLOAT[]",
    ),
    "missing elements of an attribute": (with_constant(lambda n: n.attribute[0].t.dims.append(7)), "Name: made"),
    "an attribute of no element type": (
        with_constant(lambda n: n.attribute[0].t.ClearField("data_type")),
        "Name: made",
    ),
    "an attribute of no value": (with_constant(lambda n: n.attribute[0].ClearField("t")), "Name: made"),
    "an attribute of no function": (
        with_constant(lambda n: setattr(n.attribute[0], "ref_attr_name", "q")),
        "model.attribute_reference_invalid",
    ),
    "no file of weights": (external(location="gone.bin", length=16), "gone.bin"),
    "an offset behind the end": (external(location="w.bin", offset=64, length=16), "bytes 64 to 80 of"),
    "another length": (external(location="w.bin", length=12), "takes 16 bytes; its data has 12"),
    "sizes that do not fit": (
        text("m (float[3] x, float[4] z) => (float[N] y) { [adds] y = Add (x, z) }"),
        "ai.onnx.Add-24 'adds': shapes (3,) and (4,) do not broadcast",
    ),
    "a concatenation of other ranks": (
        text("m (float[3, 4] x, float[4] z) => (float[A, B] y) { [joins] y = Concat <axis = 1> (x, z) }"),
        "ai.onnx.Concat-24 'joins'",
    ),
    "a matmul that does not fit": (
        text("m (float[3, 4] x, float[5, 6] z) => (float[3, 6] y) { [matmul] y = MatMul (x, z) }"),
        "ai.onnx.MatMul-24 'matmul'",
    ),
    "Reshape to negative sizes": (
        text("m (float[12] x) => (float[A, B] y) <int64[2] s = {-2, -6}> { [reshapes] y = Reshape (x, s) }"),
        "ai.onnx.Reshape-24 'reshapes'",
    ),
    "a Transpose of other axes": (
        text("m (float[3, 4] x) => (float[A, B] y) { [turns] y = Transpose <perm = [0, 5]> (x) }"),
        "ai.onnx.Transpose-24 'turns'",
    ),
    "a loop": (text(LOOP), "ai.onnx.Loop-24 'loops': carried value 0 is float32 of rank 1, and int64 of rank 1 after"),
    "a bomb of functions": (functions(14), "function 'f.F14', which expands to 16,384"),
    "a larger bomb": (functions(60), "function 'f.F33' nests calls and bodies 33 deep"),
    "a function that calls itself": (calls_itself(), "F1"),
}
