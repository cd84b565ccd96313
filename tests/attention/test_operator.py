"""ai.onnx Attention through the importer: the meaning of a node, and the reasons to refuse one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import lowering
from lowering.errors import NodeError
from lowering.importing.imported_model import ImportedModel
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.attention.onnx_oracle import attention
from tests.support.error_codes import raises

INPUTS = ("q", "k", "v", "mask", "past_key", "past_value", "nonpad")
TYPES = ("float32", "float16", "bfloat16", "float64")
OUTPUTS = ("y", "present_key", "present_value", "qk")


def model(
    opset: int,
    attributes: dict[str, Any],
    inputs: dict[str, tuple[str, tuple[int | str, ...]]],
    outputs: dict[str, tuple[str, tuple[int | str, ...]]],
) -> onnx.ModelProto:
    """Return a model of one Attention node. inputs and outputs give type and shape by name; others are left out."""
    holes = [
        [name if name in specs else "" for name in names] for names, specs in ((INPUTS, inputs), (OUTPUTS, outputs))
    ]
    node = helper.make_node("Attention", *(_trimmed(names) for names in holes), name="att", **attributes)
    values = [
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(t)), s)
            for n, (t, s) in specs.items()
        ]
        for specs in (inputs, outputs)
    ]
    graph = helper.make_graph([node], "g", *values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _trimmed(names: list[str]) -> list[str]:
    while names and not names[-1]:
        names = names[:-1]
    return names


def nodes() -> st.SearchStrategy[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Draw legal nodes with inputs: every attribute, hole, type, rank, mask and length rule of the three versions."""
    return st.integers(0, 2**48).map(random_node)


def random_node(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    draw, data = random.Random(seed), np.random.default_rng(seed)

    def yes() -> bool:
        return draw.random() < 0.5

    opset = draw.choice([23, 24, 25, 25, 28])
    flat, cached = yes(), yes()
    batch, q_len, new = draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 6)
    past = draw.randint(0, 4) if cached else 0
    kv_heads, group = draw.randint(1, 2), draw.randint(1, 3)
    head_dim, v_head_dim = draw.choice([8, 5]), draw.choice([8, 3])
    q_type = draw.choice(TYPES)
    v_type = draw.choice([q_type, draw.choice(TYPES)])
    has_lengths = opset >= 24 and not cached and yes()

    attributes: dict[str, Any] = {"is_causal": draw.randint(0, 1)}
    if yes():
        attributes["scale"] = draw.choice([0.0, 0.25, 1.5])
    if yes():
        attributes["softcap"] = draw.choice([0.0, 0.5, 1000.0])
    if yes():
        attributes["softmax_precision"] = draw.choice([1, 10, 11, 16])
    for name in ("left_window_size", "right_window_size"):
        if opset >= 25 and yes():
            attributes[name] = draw.choice([-1, 0, 1, 2, 2**63 - 1])
    if flat:
        attributes |= {"q_num_heads": kv_heads * group, "kv_num_heads": kv_heads}

    def rows(heads: int, length: int, dim: int, dtype: str, flat: bool = flat) -> np.ndarray:
        shape = (batch, length, heads * dim) if flat else (batch, heads, length, dim)
        return data.standard_normal(shape).astype(dtype)

    inputs = {
        "q": rows(kv_heads * group, q_len, head_dim, q_type),
        "k": rows(kv_heads, new, head_dim, q_type),
        "v": rows(kv_heads, new, v_head_dim, v_type),
    }
    if yes():
        inputs["mask"] = random_mask(draw, data, opset, (batch, kv_heads * group, q_len, past + new), q_type)
    if cached:
        inputs["past_key"] = rows(kv_heads, past, head_dim, q_type, flat=False)
        inputs["past_value"] = rows(kv_heads, past, v_head_dim, v_type, flat=False)
    if has_lengths:
        inputs["nonpad"] = data.integers(0, new + 3, batch)
    outputs = ["y"]
    if not has_lengths:
        presents = [name for name in ("present_key", "present_value") if yes()]
        outputs += presents if opset < 25 or len(presents) == 2 else []
    if yes():
        outputs.append("qk")
        attributes["qk_matmul_output_mode"] = draw.randint(0, 3)
    return built(opset, attributes, inputs, outputs, symbolic=yes()), inputs


def random_mask(
    draw: random.Random, data: np.random.Generator, opset: int, full: tuple[int, ...], dtype: str
) -> np.ndarray:
    rank = draw.randint(1, 4)
    keys = draw.choice([full[3], 1] if opset == 23 else [full[3], 1, max(1, full[3] - 2)])
    shape = (*(draw.choice([size, 1]) for size in full[4 - rank : 3]), keys)
    kind = draw.choice(["bool", "bool", dtype, dtype, "float32", "uint8", "int64"])
    if kind == "bool":
        return data.random(shape) < 0.6
    if kind in ("uint8", "int64"):
        return data.integers(0, 3, shape).astype(kind)
    return np.where(data.random(shape) < 0.3, -np.inf, data.standard_normal(shape)).astype(kind)


def built(
    opset: int, attributes: dict[str, Any], inputs: dict[str, np.ndarray], outputs: list[str], symbolic: bool
) -> onnx.ModelProto:
    """Return the model for these inputs; symbolic replaces batch sizes and lengths by a name per input."""

    def dims(name: str, shape: tuple[int, ...]) -> tuple[int | str, ...]:
        rank = len(shape)
        axes = {"mask": {*range(rank)}, "nonpad": {0}}.get(name, {0, rank - 2}) if symbolic else set()
        return tuple(
            f"{name}_{k}" if k in axes and (size != 1 or name == "mask") else size for k, size in enumerate(shape)
        )

    input_specs = {name: (array.dtype.name, dims(name, array.shape)) for name, array in inputs.items()}
    expected = dict(zip(OUTPUTS, attention(opset, attributes, *(inputs.get(name) for name in INPUTS))))
    output_specs = {name: (expected[name].dtype.name, expected[name].shape) for name in OUTPUTS if name in outputs}
    return model(opset, attributes, input_specs, output_specs)


def equals_the_standard(case: tuple[onnx.ModelProto, dict[str, np.ndarray]]) -> None:
    proto, inputs = case
    node = proto.graph.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    expected = attention(proto.opset_import[0].version, attributes, *(inputs.get(name) for name in INPUTS))
    results = lowering.compile(proto).run(inputs)
    for name, want in zip(OUTPUTS, expected):
        if name in results:
            got, rtol = results[name], {"float16": 2e-3, "bfloat16": 1.6e-2}.get(want.dtype.name, 2e-5)
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=rtol, atol=rtol / 10, err_msg=name)


def test_random_nodes_equal_the_standard() -> None:
    sweep(15)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_nodes_equal_the_standard_at_length() -> None:
    sweep(300)


def sweep(examples: int) -> None:
    profile = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    profile(given(nodes())(equals_the_standard))()


# Refused nodes differ from this valid node: 2 batches, 4 query heads, 2 key/value heads.
VALID: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "q": ("float32", (2, 4, 3, 8)),
    "k": ("float32", (2, 2, 5, 8)),
    "v": ("float32", (2, 2, 5, 8)),
}
FLAT = {"q": ("float32", (2, 3, 32)), "k": ("float32", (2, 5, 16)), "v": ("float32", (2, 5, 16))}
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
PAST = {"past_key": ("float32", (2, 2, 1, 8)), "past_value": ("float32", (2, 2, 1, 8))}
NONPAD = {"nonpad": ("int64", (2,))}


def mask_of(*shape: int, dtype: str = "float32") -> dict[str, tuple[str, tuple[int, ...]]]:
    return {"mask": (dtype, shape)}


REFUSED: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    # text of the error, opset, attributes, inputs that differ
    ("inputs Q, K and V have ranks 4, 3 and 4", 24, {}, {"k": ("float32", (2, 5, 16))}),
    ("inputs Q, K and V have ranks 2, 2 and 2", 24, {}, dict.fromkeys("qkv", ("float32", (3, 8)))),
    ("attribute q_num_heads is missing", 24, {"kv_num_heads": 2}, FLAT),
    ("attribute kv_num_heads is missing", 24, {"q_num_heads": 4}, FLAT),
    ("attribute q_num_heads is 0", 24, {"q_num_heads": 0, "kv_num_heads": 2}, FLAT),
    ("attribute kv_num_heads is -2", 24, {"q_num_heads": 4, "kv_num_heads": -2}, FLAT),
    (
        "attribute q_num_heads is 6, and the last dimension of Q is 32",
        24,
        {**HEADS, "q_num_heads": 6},
        FLAT,
    ),
    (
        "attribute kv_num_heads is 4, and the last dimension of K is 14",
        24,
        {**HEADS, "kv_num_heads": 4},
        {**FLAT, "k": ("float32", (2, 5, 14))},
    ),
    ("attribute q_num_heads is 4; 4-D inputs have 4", 25, HEADS, {}),
    ("attribute kv_num_heads is 1; 4-D inputs have 2", 23, {"kv_num_heads": 1}, {}),
    ("3 query heads do not divide into 2 key/value heads", 24, {}, {"q": ("float32", (2, 3, 3, 8))}),
    ("1 query heads do not divide into 2 key/value heads", 24, {}, {"q": ("float32", (2, 1, 3, 8))}),
    ("batch size differs: Q has 2, K has 1, V has 1", 24, {}, dict.fromkeys("kv", ("float32", (1, 2, 5, 8)))),
    ("batch size differs", 24, {}, {**PAST, "past_value": ("float32", (3, 2, 1, 8))}),
    ("number of heads differs: K has 2, V has 4", 24, {}, {"v": ("float32", (2, 4, 5, 8))}),
    ("number of heads differs", 24, {}, {**PAST, "past_key": ("float32", (2, 4, 1, 8))}),
    ("head size differs: Q has 8, K has 16", 24, {}, {"k": ("float32", (2, 2, 5, 16))}),
    ("sequence length differs: K has 5, V has 6", 24, {}, {"v": ("float32", (2, 2, 6, 8))}),
    (
        "sequence length differs: past_key has 1, past_value has 2",
        24,
        {},
        {**PAST, "past_value": ("float32", (2, 2, 2, 8))},
    ),
    (
        "head size of Q and K is the symbolic size",
        24,
        {},
        {"q": ("float32", (2, 4, 3, "d")), "k": ("float32", (2, 2, 5, "d"))},
    ),
    ("number of heads of Q is the symbolic size", 24, {}, {"q": ("float32", (2, "h", 3, 8))}),
    ("attribute softcap is -1.0", 24, {"softcap": -1.0}, {}),
    ("attribute softcap is nan", 24, {"softcap": float("nan")}, {}),
    ("attribute scale is -0.5", 24, {"scale": -0.5}, {}),
    ("attribute is_causal is 2", 24, {"is_causal": 2}, {}),
    ("attribute softmax_precision is 7", 24, {"softmax_precision": 7}, {}),
    ("attribute qk_matmul_output_mode is 4", 24, {"qk_matmul_output_mode": 4}, {}),
    ("attribute left_window_size is -2", 25, {"left_window_size": -2}, {}),
    ("attribute right_window_size is -7", 25, {"right_window_size": -7}, {}),
    ("attribute left_window_size does not exist before opset 25", 24, {"left_window_size": 1}, {}),
    ("input nonpad_kv_seqlen does not exist before opset 24", 23, {}, NONPAD),
    ("input past_key is given without past_value", 24, {}, {"past_key": PAST["past_key"]}),
    ("input past_value is given without past_key", 24, {}, {"past_value": PAST["past_value"]}),
    ("input past_key has rank 3", 24, {}, {**PAST, "past_key": ("float32", (2, 1, 16))}),
    ("nonpad_kv_seqlen and past_key exclude each other", 24, {}, {**PAST, **NONPAD}),
    ("input nonpad_kv_seqlen is int32 of rank 1", 24, {}, {"nonpad": ("int32", (2,))}),
    ("input nonpad_kv_seqlen is int64 of rank 2", 24, {}, {"nonpad": ("int64", (2, 1))}),
    ("input K is float16 and Q is float32", 24, {}, {"k": ("float16", (2, 2, 5, 8))}),
    ("input past_value is float16 and V is float32", 24, {}, {**PAST, "past_value": ("float16", (2, 2, 1, 8))}),
    ("input V is int32, and must be a float", 24, {}, {"v": ("int32", (2, 2, 5, 8))}),
    ("input attn_mask has rank 0", 24, {}, mask_of()),
    ("input attn_mask has rank 5", 24, {}, mask_of(1, 1, 1, 3, 5)),
    ("input attn_mask is for 6 keys, and there are 5", 24, {}, mask_of(3, 6)),
    ("dimension -1 of attn_mask differs: attn_mask has 4, the score matrix has 5", 23, {}, mask_of(3, 4)),
    ("dimension -2 of attn_mask differs: attn_mask has 2, the score matrix has 3", 24, {}, mask_of(2, 5)),
    ("dimension -3 of attn_mask differs: attn_mask has 2, the score matrix has 4", 24, {}, mask_of(2, 3, 5)),
    ("dimension -4 of attn_mask differs: attn_mask has 3, the score matrix has 2", 24, {}, mask_of(3, 1, 3, 5)),
]


@pytest.mark.parametrize(("says", "opset", "attributes", "inputs"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refuses(says: str, opset: int, attributes: dict[str, Any], inputs: dict[str, Any]) -> None:
    with pytest.raises(NodeError) as caught:
        imported(opset, attributes, {**VALID, **inputs})
    assert caught.value.where == f"ai.onnx.Attention-{opset} 'att'"
    assert says in caught.value.what


@pytest.mark.parametrize("output", ["present_key", "present_value"])
def test_refuses_presents_together_with_lengths(output: str) -> None:
    with raises("attention.nonpad_with_present"):
        imported(24, {}, {**VALID, **NONPAD}, ("y", output))


@pytest.mark.parametrize("output", ["present_key", "present_value"])
def test_refuses_one_present_alone_from_opset_25_on(output: str) -> None:
    with raises("attention.present_incomplete"):
        imported(25, {}, VALID, ("y", output))
    assert imported(24, {}, VALID, ("y", output)).module


def imported(
    opset: int, attributes: dict[str, Any], inputs: dict[str, Any], outputs: tuple[str, ...] = ("y",)
) -> ImportedModel:
    """Import the node without onnx's checker, which refuses some of these with texts of its own."""
    proto = model(opset, attributes, inputs, dict.fromkeys(outputs, ("float32", ())))
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    return import_model(ir.from_proto(proto), lookup)


def test_warns_of_head_counts_of_4d_inputs_and_of_integer_masks() -> None:
    assert "q_num_heads has no meaning for 4-D inputs" in imported(23, HEADS, VALID).warnings[0]
    [warning] = imported(24, {}, {**VALID, **mask_of(3, 5, dtype="uint8")}).warnings
    assert "ai.onnx.Attention-24 'att': input attn_mask is uint8" in warning


def test_the_vendor_operator_of_the_same_name_is_another_operator() -> None:
    proto = model(23, {}, VALID, {"y": ("float32", ())})
    proto.graph.node[0].domain = "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with raises("node.rank_unsupported"):
        import_model(ir.from_proto(proto), lookup)


@pytest.mark.parametrize("q_len", [1, 33])
def test_any_number_of_threads_gives_the_same(q_len: int) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, q_len, 16), "k": (2, 2, 300, 16), "v": (2, 2, 300, 16)}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs["nonpad"] = np.array([300, 170])
    proto = built(24, {"is_causal": 1}, inputs, ["y"], symbolic=True)
    want, *_ = attention(24, {"is_causal": 1}, *(inputs.get(name) for name in INPUTS))
    for threads in (1, 2, 5):
        got = lowering.compile(proto, threads=threads).run(inputs)["y"]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_caches_and_two_kinds_of_attention_in_one_model() -> None:
    """TensorScatter, Attention and a second Attention of another problem, at several sizes, from one compilation."""
    body = """g (float[b, 4, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v,
               float[b, 2, c, 8] cache_k, float[b, 2, c, 8] cache_v, int64[b] at)
           => (float[b, 4, s, 8] y, float[b, 4, s, 8] z, float[b, 2, c, 8] p) {
        p = TensorScatter (cache_k, k, at) r = TensorScatter (cache_v, v, at)
        rows = Shape <start = 2, end = 3> (k) valid = Add (at, rows)
        y = Attention <is_causal = 1> (q, p, r, , , , valid)
        z = Attention <left_window_size = 2, softcap = 5.0> (y, k, v)
    }"""
    compiled = lowering.compile(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 25]>\n{body}'))
    rng = np.random.default_rng(0)
    for batch, rows, capacity in ((1, 1, 9), (3, 5, 20), (2, 20, 20)):
        shapes = {"q": (4, rows), "k": (2, rows), "v": (2, rows), "cache_k": (2, capacity), "cache_v": (2, capacity)}
        inputs = {n: rng.standard_normal((batch, *shape, 8)).astype(np.float32) for n, shape in shapes.items()}
        inputs["at"] = rng.integers(0, capacity - rows + 1, batch)
        present = {name: inputs[f"cache_{name}"].copy() for name in "kv"}
        for b, at in enumerate(inputs["at"]):
            for name, cache in present.items():
                cache[b, :, at : at + rows] = inputs[name][b]
        results = compiled.run(inputs)
        y, *_ = attention(25, {"is_causal": 1}, inputs["q"], *present.values(), nonpad=inputs["at"] + rows)
        z, *_ = attention(25, {"left_window_size": 2, "softcap": 5.0}, y, inputs["k"], inputs["v"])
        assert np.array_equal(results["p"], present["k"])
        np.testing.assert_allclose(results["y"], y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(results["z"], z, rtol=1e-5, atol=1e-6)
