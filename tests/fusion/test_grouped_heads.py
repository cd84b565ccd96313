"""Repeated keys and values are read without the repetition, in the one order in which Attention repeats them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.fusion.graphs import check_fused, check_untouched, parse_graph

SIZE = {"k": "8", "v": "6"}

# Operators that repeat {x} [B, 2, T, {d}] to {x}r [B, 6, T, {d}], heads in the order 0 0 0 1 1 1.
INTERLEAVED = {
    "Expand": "{x}1 = Unsqueeze ({x}, axis2) {x}2 = Expand ({x}1, wide_{x}) {x}r = Reshape ({x}2, all_{x})",
    "Tile": "{x}1 = Unsqueeze ({x}, axis2) {x}2 = Tile ({x}1, copies) {x}r = Reshape ({x}2, all_{x})",
    "Concat": "{x}1 = Unsqueeze ({x}, axis2) {x}2 = Concat <axis=2> ({x}1, {x}1, {x}1) {x}r = Reshape ({x}2, all_{x})",
    "Gather": "{x}r = Gather <axis = 1> ({x}, groups)",
}
# The same in the order 0 1 0 1 0 1.
TILED = {
    "Expand": "{x}1 = Unsqueeze ({x}, axis1) {x}2 = Expand ({x}1, wide_first_{x}) {x}r = Reshape ({x}2, all_{x})",
    "Tile": "{x}r = Tile ({x}, copies4)",
    "Concat": "{x}r = Concat <axis = 1> ({x}, {x}, {x})",
    "Gather": "{x}r = Gather <axis = 1> ({x}, rounds)",
}
WEIGHTS = {
    "axis1": [1],
    "axis2": [2],
    "copies": [1, 1, 3, 1, 1],
    "copies4": [1, 3, 1, 1],
    "groups": [0, 0, 0, 1, 1, 1],
    "rounds": [0, 1, 0, 1, 0, 1],
} | {
    f"{name}_{x}": [*shape, int(d)]
    for x, d in SIZE.items()
    for name, shape in {"wide": [1, 2, 3, 1], "wide_first": [1, 3, 2, 1], "all": [0, 6, -1]}.items()
}

ATTENTION = "y = Attention (q, kr, vr)"
UNFUSED = "kt = Transpose <perm = [0, 1, 3, 2]> (kr) s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, vr)"

# With a mask of one column, which is broadcast to the number of keys.
STRETCHED = UNFUSED.replace("p = Softmax <axis = -1> (s)", "z = Add (s, m) p = Softmax <axis = -1> (z)")


def make_model(nodes: str, attention: str = ATTENTION, opset: int = 23, kv: str = "B, 2, T") -> onnx.ModelProto:
    text = (
        f"(float[B, 6, S, 8] q, float[{kv}, 8] k, float[{kv}, 6] v) => (float[B, 6, S, 6] y) {{ {nodes} {attention} }}"
    )
    return parse_graph(text, opset, {name: np.array(v, np.int64) for name, v in WEIGHTS.items()})


def repeat_keys_and_values(nodes: str) -> str:
    return " ".join(nodes.format(x=x) for x in ("k", "v"))


@pytest.mark.parametrize("form", INTERLEAVED)
@pytest.mark.parametrize("attention, opset", [(ATTENTION, 23), (UNFUSED, 18)])
def test_cases_1_and_2_interleaved_repetition(form: str, attention: str, opset: int) -> None:
    result = check_fused(
        make_model(repeat_keys_and_values(INTERLEAVED[form]), attention, opset), {"Attention": 1, form: 0, "Reshape": 0}
    )
    (node,) = (n for n in result.graph if n.op_type == "Attention")
    assert [v.name for v in node.inputs if v is not None] == ["q", "k", "v"]


def test_repeated_keys_that_are_flattened_at_once() -> None:
    """Where sizes are static, exporters reshape repeated keys to three dimensions in one step, and transpose those."""
    nodes = """
        k1 = Unsqueeze (k, axis2) k2 = Expand (k1, wide_k) k3 = Reshape (k2, flat)
        k4 = Transpose <perm = [0, 2, 1]> (k3) kt = Reshape (k4, split)
        v1 = Unsqueeze (v, axis2) v2 = Expand (v1, wide_v) vr = Reshape (v2, all_v)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, vr)
    """
    text = "(float[2, 6, 3, 8] q, float[2, 2, 5, 8] k, float[2, 2, 5, 6] v) => (float[2, 6, 3, 6] y)"
    weights = {"axis2": [2], "wide_k": [1, 2, 3, 1, 8], "wide_v": [1, 2, 3, 1, 6], "flat": [12, 5, 8]}
    weights |= {"split": [2, 6, 8, 5], "all_v": [0, 6, -1, 6]}
    model = parse_graph(f"{text} {{ {nodes} }}", 18, {name: np.array(v, np.int64) for name, v in weights.items()})
    result = check_fused(model, {"Attention": 1, "Expand": 0, "Reshape": 0, "Transpose": 0})
    (node,) = (n for n in result.graph if n.op_type == "Attention")
    assert [v.name for v in node.inputs if v is not None] == ["q", "k", "v"]


@pytest.mark.parametrize("form", TILED)
def test_the_other_order_refuses(form: str) -> None:
    check_untouched(make_model(repeat_keys_and_values(TILED[form])))


@pytest.mark.parametrize("attention, opset", [(ATTENTION, 23), (STRETCHED, 18)])
def test_heads_on_axis_2_before_a_transpose(attention: str, opset: int) -> None:
    nodes = """
        {x}1 = Unsqueeze ({x}, axis3) {x}2 = Expand ({x}1, wide) {x}3 = Reshape ({x}2, all)
        {x}r = Transpose <perm = [0, 2, 1, 3]> ({x}3)
    """
    text = "(float[B, 6, S, 8] q, float[B, T, 2, 8] k, float[B, T, 2, 8] v, float[S, 1] m) => (float[B, 6, S, 8] y)"
    text += f"{{ {repeat_keys_and_values(nodes)} {attention} }}"
    weights = {"axis3": np.array([3]), "wide": np.array([1, 1, 2, 3, 8]), "all": np.array([0, -1, 6, 8])}
    check_fused(
        parse_graph(text, opset, weights), {"Attention": 1, "Expand": int(attention == STRETCHED), "Reshape": 0}
    )


@pytest.mark.parametrize(
    "repeat", ["Expand ({x}, heads)", "Tile ({x}, copies)", "Concat <axis = 1> ({x}, {x}, {x}, {x}, {x}, {x})"]
)
def test_case_3_one_head_in_any_way(repeat: str) -> None:
    text = "(float[B, 6, S, 8] q, float[B, 1, T, 8] k, float[B, 1, T, 6] v) => (float[B, 6, S, 6] y)"
    text += f" {{ {repeat_keys_and_values('{x}r = ' + repeat)} {ATTENTION} }}"
    weights = {"heads": np.array([1, 6, 1, 1]), "copies": np.array([1, 6, 1, 1])}
    check_fused(parse_graph(text, 23, weights), {"Attention": 1, repeat.split()[0]: 0})


def test_keys_and_values_repeated_in_different_orders_refuse() -> None:
    check_untouched(make_model(INTERLEAVED["Gather"].format(x="k") + TILED["Gather"].format(x="v")))


def test_only_keys_repeated_refuses() -> None:
    text = "(float[B, 6, S, 8] q, float[B, 2, T, 8] k, float[B, 6, T, 6] vr) => (float[B, 6, S, 6] y)"
    text += f" {{ {INTERLEAVED['Gather'].format(x='k')} {ATTENTION} }}"
    check_untouched(parse_graph(text, 23, {"groups": np.array(WEIGHTS["groups"])}))


def test_a_present_key_that_is_read_refuses() -> None:
    text = "(float[B, 6, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 6] v)"
    text += " => (float[B, 6, S, 6] y, float[B, 6, T, 8] present)"
    text += f" {{ {repeat_keys_and_values(INTERLEAVED['Gather'])} y, present = Attention (q, kr, vr) }}"
    check_untouched(parse_graph(text, 23, {"groups": np.array(WEIGHTS["groups"])}))


def test_an_expand_that_repeats_the_sequence_too_refuses() -> None:
    nodes = "{x}1 = Unsqueeze ({x}, axis2) {x}2 = Expand ({x}1, wide_{x}) {x}r = Reshape ({x}2, all_{x})"
    weights = {name: np.array(v, np.int64) for name, v in WEIGHTS.items()}
    weights |= {"wide_k": np.array([1, 2, 3, 5, 8]), "wide_v": np.array([1, 2, 3, 5, 6])}
    text = "(float[B, 6, S, 8] q, float[B, 2, 1, 8] k, float[B, 2, 1, 6] v) => (float[B, 6, S, 6] y)"
    text += f" {{ {repeat_keys_and_values(nodes)} {ATTENTION} }}"
    check_untouched(parse_graph(text, 23, weights))


def test_the_length_of_a_mask_does_not_keep_the_repetition() -> None:
    text = "(float[B, 6, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 6] v, float[S, 1] m) => (float[B, 6, S, 6] y) {"
    source = parse_graph(
        f"{text} {repeat_keys_and_values(INTERLEAVED['Gather'])} {STRETCHED} }}",
        18,
        {"groups": np.array(WEIGHTS["groups"])},
    )
    check_fused(source, {"Attention": 1, "Gather": 0, "Expand": 1})
