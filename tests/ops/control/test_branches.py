"""If with branches of different types, where later nodes accept both, compared with onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.errors import NodeError
from tests.support.error_codes import raises

SQUEEZE = """shape = Shape <start = 0, end = 1> (x) one = Constant <value_ints = [1]> () is_one = Equal (shape, one)
    axis = Constant <value_ints = [0]> ()"""
FLAT = "flat = Constant <value_ints = [-1]> ()"


def make_if(name: str, condition: str, then: str, otherwise: str) -> str:
    """Return an If whose branches compute t and e; any declared type is a float tensor."""
    branches = (
        f"{key}_branch = {key}{name} () => ({kind} {out}{name}) {{ {body} {out}{name} = Identity ({out}) }}"
        for key, out, (kind, body) in (("then", "t", _split_type(then)), ("else", "e", _split_type(otherwise)))
    )
    return f"{name} = If ({condition}) <{', '.join(branches)}>"


def _split_type(body: str) -> tuple[str, str]:
    kind, separator, rest = body.partition(": ")
    return (kind, rest) if separator else ("float[P, Q]", body)


INNER = make_if("s", "is_one", "float[Q]: t = Squeeze (x, axis)", "e = Abs (x)")
SQUEEZED = make_if("r", "is_one", "float[Q]: t = Squeeze (x, axis)", "e = Neg (x)")

CASES = {
    "squeeze and flatten": f"{SQUEEZE} {FLAT} {SQUEEZED} y = Reshape (r, flat)",
    "the other way around": f"""{SQUEEZE} {FLAT} other = Not (is_one)
        {make_if("r", "other", "t = Neg (x)", "float[Q]: e = Squeeze (x, axis)")} y = Reshape (r, flat)""",
    "of data": f"""{FLAT} {make_if("r", "c", "t = Exp (x)", "float[A, B, C]: e = Unsqueeze (x, flat)")}
        y = Reshape (r, flat)""",
    "what accepts any rank": f"""{SQUEEZE} {SQUEEZED} a = Tanh (r) b = Add (a, x) m = ReduceSum <keepdims = 0> (a)
        y = Mul (b, m)""",
    "used twice, and by what is not moved": f"""{SQUEEZE} {FLAT} {SQUEEZED} n = Exp (x) f = Reshape (r, flat)
        g = Reshape (n, flat) h = Add (f, g) k = Cast <to = 11> (r) l = ReduceMax <keepdims = 0> (k)
        o = Cast <to = 1> (l) y = Sub (h, o)""",
    "two that meet": f"""{SQUEEZE} {FLAT} {SQUEEZED}
        {make_if("s", "c", "float[Q]: t = Reshape (x, flat)", "e = Exp (x)")}
        a = ReduceMax <keepdims = 0> (s) b = Mul (r, a) d = Reshape (s, flat) p = ReduceSum <keepdims = 0> (d)
        f = Reshape (b, flat) y = Add (f, p)""",
    "one inside of another": f"""{SQUEEZE} {FLAT}
        {make_if("r", "c", "float[Q]: t = Reshape (x, flat)", INNER + " e = Neg (s)")} y = Reshape (r, flat)""",
    "one inside of a branch that is always taken": f"""{SQUEEZE} {FLAT} yes = Constant <value_int = 1> ()
        always = Cast <to = 9> (yes) {make_if("r", "always", f"{INNER} t = Neg (s)", "e = Neg (x)")}
        y = Reshape (r, flat)""",
    "shapes of shapes": f"""{SQUEEZE} {FLAT} {SQUEEZED} s = Shape (r) z = ConstantOfShape (s) w = Add (r, z)
        y = Reshape (w, flat)""",
    "sequences of other lengths": """two = Constant <value_int = 2> ()
        r = If (c) <then_branch = th () => (seq(float[P, 2]) t) { t = SplitToSequence <axis = 1> (x, two) },
                    else_branch = el () => (seq(float[P, 6]) e) { e = SequenceConstruct (x) }>
        y = ConcatFromSequence <axis = 1> (r)""",
    "in a loop": f"""{SQUEEZE} {FLAT} three = Constant <value_int = 3> ()
        y = Loop (three, , x) <body = b (int64 i, bool g, float[A, 6] a) => (bool go, float[A, 6] z) {{
            go = Identity (g) {make_if("r", "c", "float[Q]: t = Reshape (a, flat)", "e = Neg (a)")}
            s = ReduceMean <keepdims = 0> (r) z = Add (a, s) }}>""",
    "the condition of a loop": """n = Constant <value_int = 9> () m = Cast <to = 7> (c) k = Add (n, m)
        y = Loop (k, , x) <body = b (int64 i, bool g, float[A, 6] a) => (bool go, float[A, 6] z) {
            most = ReduceMax <keepdims = 0> (a) limit = Constant <value_float = 20.0> () small = Less (most, limit)
            unit = Constant <value_ints = [1]> ()
            go = If (c) <then_branch = th () => (bool t) { t = Identity (small) },
                         else_branch = el () => (bool[1] e) { e = Reshape (small, unit) }>
            d = Abs (a) z = Add (d, a) }>""",
}


def make_model(body: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> m (float[A, 6] x, bool c) => (float[U] y) {{ {body} }}'
    )
    proto.graph.output[0].ClearField("type")
    return proto


@pytest.mark.parametrize("case", CASES)
def test_later_nodes_accept_either_branch(case: str) -> None:
    proto = make_model(CASES[case])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString(), options)
    rng = np.random.default_rng(0)
    for rows, condition in ((1, True), (3, True), (1, False), (4, False)):
        feeds = {"x": rng.standard_normal((rows, 6)).astype(np.float32), "c": np.array(condition)}
        taken = {v.name for v in session.get_inputs()}
        actual, (expected,) = module.run(feeds)["y"], session.run(None, {k: v for k, v in feeds.items() if k in taken})
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


UNSQUEEZED = make_if("r", "c", "float[A, 1, 6]: t = Unsqueeze (x, one)", "e = Exp (x)")
UNIT = "one = Constant <value_ints = [1]> ()"

ONE_WAY = {
    "what follows needs a matrix": f"{UNIT} {UNSQUEEZED} y = Gemm <transB = 1> (r, r)",
    "an axis that one does not have": f"""{UNIT} {
        make_if("r", "c", "float[Q]: t = ReduceMax <keepdims = 0> (x, one)", "e = Exp (x)")
    } y = Softmax <axis = 1> (r)""",
    "the output is a matrix": f"{UNIT} {UNSQUEEZED} y = Neg (r)",
}


@pytest.mark.parametrize("case", ONE_WAY)
def test_later_nodes_accept_one_branch_only(case: str) -> None:
    """The model is compiled for the other branch, and runs check the condition."""
    proto = make_model(ONE_WAY[case])
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["U", "V"]))
    module, x = lowering.compile(proto), np.random.default_rng(1).standard_normal((3, 6)).astype(np.float32)
    power = np.exp(x.astype(np.float64))
    want = {
        "y = Gemm": power @ power.T,
        "y = Soft": np.exp(power) / np.exp(power).sum(1, keepdims=True),
        "y = Neg ": -power,
    }
    (expected,) = (array for text, array in want.items() if text in ONE_WAY[case])
    np.testing.assert_allclose(module.run({"x": x, "c": np.array(False)})["y"], expected, rtol=1e-4, atol=1e-5)
    with raises("if.branch_not_compiled"):
        module.run({"x": x, "c": np.array(True)})


def test_different_types_of_an_output_are_rejected() -> None:
    proto = make_model(f"{UNIT} {UNSQUEEZED} y = Neg (r)")
    text = r"If-18 giving 'r': the branches give different types of 'y', which is an output: float32 of rank 3 and"
    with pytest.raises(NodeError, match=text):
        lowering.compile(proto)
    assert lowering.check(proto).findings[0].what.startswith("the branches give different types of 'y'")


def test_a_declaration_that_is_correct_for_one_branch() -> None:
    """Reshape is not dropped because of the declaration, and not next to fused nodes either."""
    erf = """h = Constant <value_float = 0.5> () o = Constant <value_float = 1.0> ()
        q = Constant <value_float = 1.4142135> () a = Div (x, q) b = Erf (a) d = Add (b, o) g = Mul (x, d)
        gelu = Mul (g, h) n = ReduceSum <keepdims = 0> (gelu)"""
    flat = make_if("r", "c", "float[6]: t = ReduceMax <keepdims = 0> (x, axis)", "float[1, 6]: e = ReduceMin (x, axis)")
    proto = make_model(f"{SQUEEZE} {FLAT} {erf} {flat} f = Reshape (r, flat) y = Mul (f, n)")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, [6]))
    module, x = lowering.compile(proto), np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for condition in (True, False):
        feeds = {"x": x, "c": np.array(condition)}
        actual, (expected,) = module.run(feeds)["y"], session.run(None, feeds)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
