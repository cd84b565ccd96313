"""MatMul, Softmax, MatMul become Attention, case by case; graphs that must not match keep their nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from tests.fusion.graphs import (
    check_fused,
    check_untouched,
    count_operators,
    draw_feeds,
    fuse_model,
    parse_graph,
    run_model,
)

INPUTS = "(float[B, 2, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 6] v"
KT = "kt = Transpose <perm = [0, 1, 3, 2]> (k)"
LOWEST = "-3.4028235e38"
C = (
    "<float c = {0.3}, float[1] c1 = {0.3}, float cap = {2.0}, float low = {" + LOWEST + "}, float zero = {0.0}, "
    "float thousands = {-10000.0}, float billion = {-1e9}, int64[1] one = {1}, float negative = {-0.5}>"
)


def make_model(nodes: str, more: str = "", opset: int = 18, outputs: str = "float[B, 2, S, 6] y") -> onnx.ModelProto:
    return parse_graph(f"{INPUTS}{more}) => ({outputs}) {C} {{ {nodes} }}", opset)


def make_attention(
    scores: str, more: str = "", opset: int = 18, softmax: str = "p = Softmax <axis = -1> (s)"
) -> onnx.ModelProto:
    """Return the model with these nodes between kt and the softmax."""
    return make_model(f"{KT} {scores} {softmax} y = MatMul (p, v)", more, opset)


def find_attention(result: ir.Model) -> ir.Node:
    (attention_node,) = (n for n in result.graph if n.op_type == "Attention")
    return attention_node


@pytest.mark.parametrize(
    "scores, scale",
    [
        ("s = MatMul (q, kt)", 1.0),
        ("a = MatMul (q, kt) s = Mul (a, c)", 0.3),
        ("a = MatMul (q, kt) s = Mul (c1, a)", 0.3),
        ("a = MatMul (q, kt) l = CastLike (c, a) s = Mul (a, l)", 0.3),
        ("a = MatMul (q, kt) s = Div (a, c)", 1 / 0.3),
        ("r = Mul (q, c) s = MatMul (r, kt)", 0.3),
        ("r = Div (q, c) s = MatMul (r, kt)", 1 / 0.3),
        ("r = Mul (c, kt) s = MatMul (q, r)", 0.3),
        ("r = Mul (q, c) u = Mul (kt, c) s = MatMul (r, u)", 0.09),
        ("r = Mul (q, c) u = Div (kt, c1) a = MatMul (r, u) s = Mul (a, cap)", 2.0),
        ("d = Sqrt (cap) r = Mul (q, d) s = MatMul (r, kt)", 2**0.5),
        ("h = Shape <start = 3> (q) f = Cast <to = 1> (h) d = Sqrt (f) a = MatMul (q, kt) s = Div (a, d)", 8**-0.5),
    ],
)
def test_case_1_scale(scores: str, scale: float) -> None:
    node = find_attention(check_fused(make_attention(scores), {"Attention": 1, "Softmax": 0, "MatMul": 0}))
    assert node.attributes["scale"].as_float() == pytest.approx(scale)


@pytest.mark.parametrize("scores", ["a = MatMul (q, kt) s = Mul (a, negative)", "a = MatMul (q, kt) s = Div (c, a)"])
def test_case_1_refuses_factors_that_are_not_positive(scores: str) -> None:
    check_untouched(make_attention(scores))


@pytest.mark.parametrize(
    "layout, perm, transposes",
    [("B, 2, T, 8", "0, 1, 3, 2", 0), ("B, T, 2, 8", "0, 2, 3, 1", 1), ("2, B, 8, T", "1, 0, 2, 3", 1)],
)
def test_case_2_transposed_keys(layout: str, perm: str, transposes: int) -> None:
    text = f"(float[B, 2, S, 8] q, float[{layout}] k, float[B, 2, T, 6] v) => (float[B, 2, S, 6] y) {{"
    text += f"kt = Transpose <perm = [{perm}]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }}"
    check_fused(parse_graph(text), {"Attention": 1, "Transpose": transposes})


def test_case_2_keys_that_come_transposed() -> None:
    text = "(float[B, 2, S, 8] q, float[B, 2, 8, T] k, float[B, 2, T, 6] v) => (float[B, 2, S, 6] y) {"
    check_fused(
        parse_graph(text + "s = MatMul (q, k) p = Softmax <axis = 3> (s) y = MatMul (p, v) }"),
        {"Attention": 1, "Transpose": 1},
    )


def test_case_2_reshape_transpose_reshape() -> None:
    """PyTorch's exporter writes the transpose of two unknown axes like this."""
    nodes = """
        sh = Shape (k) d = Slice (sh, m1, end) t = Slice (sh, m2, m1) bh = Slice (sh, zeros, m2)
        flat = Concat <axis = 0> (m1, t, d) a = Reshape (k, flat) b = Transpose <perm = [0, 2, 1]> (a)
        full = Concat <axis = 0> (bh, d, t) kt = Reshape (b, full)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    """
    weights = {n: np.array([i]) for n, i in {"m1": -1, "m2": -2, "end": 2**63 - 1, "zeros": 0}.items()}
    check_fused(
        parse_graph(f"{INPUTS}) => (float[B, 2, S, 6] y) {{ {nodes} }}", 18, weights),
        {"Attention": 1, "Reshape": 0, "Transpose": 0},
    )


def test_case_2_past_keys_stay_a_concat() -> None:
    text = """
        (float[B, 2, S, 8] q, float[B, 2, P, 8] pk, float[B, 2, P, 6] pv, float[B, 2, S, 8] k, float[B, 2, S, 6] v)
        => (float[B, 2, S, 6] y, float[B, 2, U, 8] present) {
            present = Concat <axis = 2> (pk, k) w = Concat <axis = -2> (pv, v)
            kt = Transpose <perm = [0, 1, 3, 2]> (present) s = MatMul (q, kt) p = Softmax <axis = -1> (s)
            y = MatMul (p, w) }
    """
    check_fused(parse_graph(text), {"Attention": 1, "Concat": 2})


@pytest.mark.parametrize("opset, axis", [(11, 3), (12, -1), (17, -1), (18, 3)])
def test_case_3_softmax_of_every_opset_along_the_last_axis(opset: int, axis: int) -> None:
    check_fused(
        make_attention("s = MatMul (q, kt)", opset=opset, softmax=f"p = Softmax <axis = {axis}> (s)"), {"Attention": 1}
    )


@pytest.mark.parametrize("opset, axis", [(11, 2), (11, 1), (18, 2)])
def test_case_3_refuses_another_axis(opset: int, axis: int) -> None:
    assert not count_operators(
        fuse_model(make_attention("s = MatMul (q, kt)", opset=opset, softmax=f"p = Softmax <axis = {axis}> (s)"))
    )["Attention"]


HALF = "(float16[B, 2, S, 8] q, float16[B, 2, T, 8] k, float16[B, 2, T, 6] v, float[S, T] m, float16[S, T] m16)"
HALF += " => (float16[B, 2, S, 6] y) {" + KT


@pytest.mark.parametrize(
    "scores, precision",
    [
        ("a = MatMul (q, kt) s = Cast <to = 1> (a)", 1),
        ("a = MatMul (q, kt) b = Add (a, m16) s = Cast <to = 1> (b)", 1),
        ("a = MatMul (q, kt) b = Cast <to = 1> (a) s = Add (b, m)", None),
        ("r = Cast <to = 1> (q) u = Cast <to = 1> (kt) s = MatMul (r, u)", None),
    ],
)
def test_case_3_softmax_in_a_wider_type(scores: str, precision: int | None) -> None:
    text = f"{HALF} {scores} b2 = Softmax <axis = -1> (s) p = Cast <to = 10> (b2) y = MatMul (p, v) }}"
    node = find_attention(check_fused(parse_graph(text), {"Attention": 1, "Softmax": 0}, rtol=4e-3, atol=4e-3))
    attribute = node.attributes.get("softmax_precision")
    assert (None if attribute is None else attribute.as_int()) == precision


def test_case_3_refuses_a_narrower_type() -> None:
    check_untouched(
        make_attention("a = MatMul (q, kt) s = Cast <to = 10> (a)", softmax="h = Softmax (s) p = Cast <to = 1> (h)")
    )


def test_case_4_soft_cap() -> None:
    scores = "a = MatMul (q, kt) b = Mul (a, c) d = Div (b, cap) t = Tanh (d) s = Mul (t, cap)"
    node = find_attention(check_fused(make_attention(scores), {"Attention": 1, "Tanh": 0}))
    assert node.attributes["softcap"].as_float() == 2.0 and node.attributes["scale"].as_float() == pytest.approx(0.3)


def test_case_4_a_cap_that_is_another_number_inside() -> None:
    node = find_attention(
        check_fused(make_attention("a = MatMul (q, kt) t = Tanh (a) s = Mul (cap, t)"), {"Attention": 1})
    )
    assert (node.attributes["softcap"].as_float(), node.attributes["scale"].as_float()) == (2.0, 2.0)


def test_case_4_mask_after_the_cap() -> None:
    scores = "a = MatMul (q, kt) d = Div (a, cap) t = Tanh (d) b = Mul (t, cap) s = Add (b, m)"
    check_fused(make_attention(scores, ", float[S, T] m"), {"Attention": 1})


@pytest.mark.parametrize(
    "scores", ["b = Add (a, m) t = Tanh (b) s = Mul (t, cap)", "t = Tanh (a) u = Mul (t, negative) s = Add (u, m)"]
)
def test_case_4_refuses_a_mask_inside_the_cap_and_a_negative_cap(scores: str) -> None:
    check_untouched(make_attention(f"a = MatMul (q, kt) {scores}", ", float[S, T] m"))


@pytest.mark.parametrize(
    "shape",
    ["T", "S, T", "1, T", "1, S, T", "2, S, T", "B, 1, S, T", "B, 1, 1, T", "B, 2, S, T", "S, 1", "1", "B, 2, S, 1"],
)
def test_case_5_additive_mask_of_every_shape(shape: str) -> None:
    check_fused(make_attention("a = MatMul (q, kt) s = Add (a, m)", f", float[{shape}] m"), {"Attention": 1, "Add": 0})


@pytest.mark.parametrize(
    "scores",
    [
        "a = MatMul (q, kt) s = Add (m, a)",
        "a = MatMul (q, kt) b = Add (a, m) s = Add (n, b)",
        "a = MatMul (q, kt) b = Add (a, m) s = Mul (b, c)",
        "a = MatMul (q, kt) b = Mul (a, c) d = Add (b, m) s = Div (d, cap)",
        "a = MatMul (q, kt) b = Sub (a, m) s = Add (b, n)",
    ],
)
def test_case_5_masks_on_either_side_and_scaled_later(scores: str) -> None:
    check_fused(make_attention(scores, ", float[S, T] m, float[B, 1, 1, T] n"), {"Attention": 1, "Softmax": 0})


@pytest.mark.parametrize("shape", ["3, 2, S, T", "B, 4, S, T", "7, B, 2, S, T"])
def test_case_5_refuses_a_mask_that_makes_the_scores_larger(shape: str) -> None:
    text = f"(float[1, 1, S, 8] q, float[1, 1, T, 8] k, float[1, 1, T, 6] v, float[{shape}] m) => (float y) {{ {KT} "
    text = text.replace("float y", "float[" + ", ".join([*shape.split(", ")[:-1], "6"]) + "] y")
    check_untouched(
        parse_graph(text + "a = MatMul (q, kt) s = Add (a, m) p = Softmax <axis = -1> (s) y = MatMul (p, v) }")
    )


@pytest.mark.parametrize("where", ["Where (w, a, fill)", "Where (n, fill, a)"])
def test_case_6_minus_infinity_is_a_bool_mask(where: str) -> None:
    """A row without keys is 0 after fusion. It was NaN before."""
    weights = {"fill": np.array(-np.inf, np.float32)}
    text = f"{INPUTS}, bool[B, 1, S, T] w) => (float[B, 2, S, 6] y) {{ {KT} n = Not (w) a = MatMul (q, kt) s = {where} "
    source = parse_graph(text + "p = Softmax <axis = -1> (s) y = MatMul (p, v) }", 18, weights)
    result = fuse_model(source)
    mask = find_attention(result).inputs[3]
    assert mask is not None and mask.dtype == ir.DataType.BOOL
    inputs = draw_feeds(source)
    inputs["w"][0, 0, 1] = False
    (expected,), (actual,) = run_model(source, inputs), run_model(ir.to_proto(result), inputs, reference=True)
    assert np.isnan(expected[0, :, 1]).all()
    np.testing.assert_allclose(actual, np.nan_to_num(expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("where", ["Where (w, a, low)", "Where (w, low, a)", "Where (w, a, billion)"])
def test_case_6_finite_fill_stays_exact(where: str) -> None:
    """A row without keys is the mean of the values, before and after."""
    source = make_attention(f"a = MatMul (q, kt) s = {where}", ", bool[B, 1, S, T] w")
    result = check_fused(source, {"Attention": 1, "Where": 1})
    inputs = draw_feeds(source)
    inputs["w"][0, 0, 1] = where == "Where (w, low, a)"
    (expected,), (actual,) = run_model(source, inputs), run_model(ir.to_proto(result), inputs, reference=True)
    np.testing.assert_allclose(expected[0, :, 1], inputs["v"][0].mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def test_case_6_bool_and_additive_masks_together() -> None:
    weights = {"fill": np.array(-np.inf, np.float32)}
    text = f"{INPUTS}, bool[1, 1, 1, T] w, bool[S, 1] u, float[B, 2, S, T] m) => (float[B, 2, S, 6] y) {{ {KT} "
    text += "a = MatMul (q, kt) b = Add (a, m) d = Where (w, b, fill) s = Where (u, d, fill) "
    source = parse_graph(
        text + "p0 = Softmax <axis = -1> (s) g = IsNaN (p0) z = Where (g, zero, p0) y = MatMul (z, v) }",
        18,
        weights | {"zero": np.array(0, np.float32)},
    )
    check_fused(source, {"Attention": 1, "And": 1})


def test_case_6_refuses_a_fill_that_overrules_no_scores() -> None:
    check_untouched(make_attention("a = MatMul (q, kt) s = Where (w, a, thousands)", ", bool[S, T] w"))


def test_case_7_clamped_mask() -> None:
    source = make_attention("a = MatMul (q, kt) b = Add (a, m) s = Max (b, low)", ", float[S, T] m")
    result = check_fused(source, {"Attention": 1, "Max": 1})
    inputs = draw_feeds(source) | {"m": np.full((3, 5), -np.inf, np.float32)}
    (expected,), (actual,) = run_model(source, inputs), run_model(ir.to_proto(result), inputs, reference=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_case_7_refuses_a_higher_bound() -> None:
    check_untouched(make_attention("a = MatMul (q, kt) b = Add (a, m) s = Max (b, thousands)", ", float[S, T] m"))


def test_case_8_nan_guard_and_dropout() -> None:
    softmax = "p0 = Softmax <axis = -1> (s) g = IsNaN (p0) p1 = Where (g, zero, p0) p2 = Identity (p1) p = Dropout (p2)"
    check_fused(
        make_attention("s = MatMul (q, kt)", softmax=softmax), {"Attention": 1, "IsNaN": 0, "Dropout": 0, "Where": 0}
    )


@pytest.mark.parametrize(
    "softmax",
    [
        "p0 = Softmax <axis = -1> (s) g = IsNaN (p0) p = Where (g, c, p0)",  # a number other than 0
        "p0 = Softmax <axis = -1> (s) g = IsNaN (s) p = Where (g, zero, p0)",  # NaN of another tensor
        "p0 = Softmax <axis = -1> (s) p = Mul (p0, c)",
        "p0 = Softmax <axis = -1> (s) g = Less (p0, c) p = Where (g, zero, p0)",
    ],
)
def test_case_8_refuses_other_changes_of_the_probabilities(softmax: str) -> None:
    check_untouched(make_attention("s = MatMul (q, kt)", softmax=softmax))


@pytest.mark.parametrize("outputs, last", [("s", ""), ("p", ""), ("", "z = Neg (p)"), ("", "z = Neg (s)")])
def test_scores_and_probabilities_that_are_read_elsewhere_refuse(outputs: str, last: str) -> None:
    nodes = f"{KT} s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) {last}"
    extra = f"float[B, 2, S, T] {outputs or 'z'}"
    check_untouched(make_model(nodes, outputs=f"float[B, 2, S, 6] y, {extra}"))


@pytest.mark.parametrize(
    "q, k, v",
    [
        ("1, 2, S, 8", "B, 2, T, 8", "B, 2, T, 6"),
        ("B, 2, S, 8", "1, 2, T, 8", "B, 2, T, 6"),
        ("B, 2, S, 8", "B, 2, T, 8", "1, 2, T, 6"),
        ("B, 1, S, 8", "B, 2, T, 8", "B, 2, T, 6"),
        ("B, 2, S, 8", "B, 1, T, 8", "B, 2, T, 6"),
        ("B, 2, S, D", "B, 2, T, D", "B, 2, T, 6"),
        ("2, B, 2, S, 8", "2, B, 2, T, 8", "2, B, 2, T, 6"),
        ("S, 8", "T, 8", "T, 6"),
    ],
)
def test_sizes_that_broadcast_otherwise_refuse(q: str, k: str, v: str) -> None:
    rank = q.count(",") + 1
    perm = [*range(rank - 2), rank - 1, rank - 2]
    y = ", ".join([f"y{i}" for i in range(rank)])
    text = f"(float[{q}] q, float[{k}] k, float[{v}] v) => (float[{y}] y) {{ kt = Transpose <perm = {perm}> (k) "
    check_untouched(parse_graph(text + "s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }"))


def test_one_key_head_for_all_is_grouped() -> None:
    text = "(float[B, 4, S, 8] q, float[B, 1, T, 8] k, float[B, 1, T, 6] v) => (float[B, 4, S, 6] y) {" + KT
    check_fused(
        parse_graph(text + " s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }"), {"Attention": 1}
    )


def test_a_fused_node_names_its_origin() -> None:
    text = f"{INPUTS}) => (float[B, 2, S, 6] y) {{ {KT} s = MatMul (q, kt) p = Softmax <axis = -1> (s) "
    node = find_attention(fuse_model(parse_graph(text + "[layers_0_out] y = MatMul (p, v) }")))
    assert node.name == "layers_0_out/Attention"
    assert node.metadata_props["fused_from"].split(", ")[0] == "layers_0_out"


def test_the_compiled_model_is_the_unfused_one() -> None:
    source = make_attention("a = MatMul (q, kt) b = Mul (a, c) s = Add (b, m)", ", float[B, 1, S, T] m")
    inputs = draw_feeds(source)
    np.testing.assert_allclose(
        lowering.compile(source).run(inputs)["y"], run_model(source, inputs)[0], rtol=1e-5, atol=2e-6
    )
