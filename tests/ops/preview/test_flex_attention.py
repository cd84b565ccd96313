"""FlexAttention of ai.onnx.preview: the meaning of a node, and unsupported graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.errors import NodeError
from lowering.importing.importer import Importer, import_model
from lowering.ops import lookup
from tests.support.error_codes import raises

from .flex_models import HEADS, KV_HEADS, NUMPY, D, attend, draw_operands, make_model

SIZES = [(1, 1, 1), (2, 7, 7), (3, 1, 70), (2, 70, 33), (1, 130, 259)]

TOLERANCE = {"float": 3e-6, "float16": 1e-3, "bfloat16": 1.2e-2, "double": 1e-13}

CAUSAL = "seen = GreaterOrEqual(i, j) r = Where(seen, s, low)"
SOFT_CAP = "c0 = Constant<value_float=2.0>() c = CastLike(c0, s) x = Div(s, c) y = Tanh(x) r = Mul(y, c)"
SUM = "e = Exp(s) n = ReduceSum(e, last) x = Div(e, n) r = Add(s, x)"
HALVED = "c0 = Constant<value_float=0.5>() c = CastLike(c0, s) r = Mul(s, c)"
DROPPED = (
    "three = Constant<value_int=3>() x = Mod(d, three) third = Equal(x, zero) c = CastLike(third, s) r = Mul(s, c)"
)

CHANGES: dict[str, tuple[str, Any]] = {
    "": ("", None),
    "causal": (CAUSAL, lambda s, i, j: np.where(i >= j, s, -np.inf)),
    "soft cap": (SOFT_CAP, lambda s, i, j: 2 * np.tanh(s / 2)),
    "relative": ("x = CastLike(d, s) r = Sub(s, x)", lambda s, i, j: s - (i - j)),
    "by a sum over keys": (SUM, lambda s, i, j: s + np.exp(s) / np.exp(s).sum(-1, keepdims=True)),
    "magnitude": ("x = Neg(s) r = Max(x, s)", lambda s, i, j: np.abs(s)),
}
PROBABILITIES: dict[str, tuple[str, Any]] = {
    "": ("", None),
    "halved": (HALVED, lambda p, i, j: p / 2),
    "dropped": (DROPPED, lambda p, i, j: p * ((i - j) % 3 == 0)),
    "cumulative": ("three = Constant<value_int=3>() r = CumSum(s, three)", lambda p, i, j: p.cumsum(-1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("score", "prob"), [*((score, "") for score in CHANGES), *(("causal", prob) for prob in PROBABILITIES if prob)]
)
def test_equals_the_standard(score: str, prob: str) -> None:
    (score_mod, scores), (prob_mod, probabilities) = CHANGES[score], PROBABILITIES[prob]
    proto = make_model(score_mod, prob_mod)
    compiled, evaluator = lowering.compile(proto), ReferenceEvaluator(proto)
    for b, s, t in SIZES:
        inputs = draw_operands(b, s, t)
        y = compiled.run(inputs)["y"]
        for expected in (attend(**inputs, score=scores, prob=probabilities), evaluator.run(None, inputs)[0]):
            np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-5, err_msg=f"{b} {s} {t}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("score", ["causal", "soft cap", "by a sum over keys"])
def test_every_type(dtype: str, score: str) -> None:
    """The arithmetic is at least that of the softmax's type, and Y is rounded once."""
    body, change = CHANGES[score]
    compiled = lowering.compile(make_model(body, dtype=dtype))
    for b, s, t in SIZES[1:4]:
        inputs = draw_operands(b, s, t, dtype)
        y = compiled.run(inputs)["y"]
        assert y.dtype.name == NUMPY[dtype]
        expected = attend(**inputs, score=change)
        np.testing.assert_allclose(y.astype(float), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "softmax", "prob"),
    [
        *(("float", softmax, "") for softmax in ("float16", "bfloat16", "double")),
        *(("float16", "bfloat16", ""), ("float16", "double", "halved")),
        *(("double", "float", ""), ("double", "float16", "halved")),
    ],
)
def test_softmax_precision(dtype: str, softmax: str, prob: str) -> None:
    """Graphs compute in the type of the softmax; the results are at least as exact."""
    number = {"float": 1, "float16": 10, "double": 11, "bfloat16": 16}[softmax]
    (body, change), (prob_mod, probabilities) = CHANGES["causal"], PROBABILITIES[prob]
    attributes = f"softmax_precision = {number}"
    compiled = lowering.compile(make_model(body, prob_mod, dtype=dtype, softmax=softmax, attributes=attributes))
    inputs = draw_operands(2, 9, 9, dtype)
    expected = attend(**inputs, score=change, prob=probabilities)
    atol = max(TOLERANCE[dtype], 4 * TOLERANCE[softmax] if prob else 1e-6 if softmax != "double" else 0)
    np.testing.assert_allclose(compiled.run(inputs)["y"].astype(float), expected, rtol=atol, atol=atol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "score"),
    [(*heads, s) for heads in ((6, 2), (1, 1), (5, 1), (3, 3)) for s in ("causal", "by a sum over keys")],
)
def test_heads_of_queries_share_those_of_keys(score: str, heads: int, kv_heads: int) -> None:
    body, change = CHANGES[score]
    compiled = lowering.compile(make_model(body, q=f"B, {heads}, S, {D}", kv=f"B, {kv_heads}, N, {D}"))
    inputs = draw_operands(2, 5, 9, heads=(heads, kv_heads))
    np.testing.assert_allclose(compiled.run(inputs)["y"], attend(**inputs, score=change), atol=2e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", [0.3, 0.0, 1.5])
def test_scale(scale: float) -> None:
    for score, prob in (("", ""), ("soft cap", ""), ("", "halved")):
        (body, change), (prob_mod, probabilities) = CHANGES[score], PROBABILITIES[prob]
        inputs = draw_operands(1, 6, 11)
        y = lowering.compile(make_model(body, prob_mod, attributes=f"scale = {scale}")).run(inputs)["y"]
        expected = attend(**inputs, score=change, prob=probabilities, scale=scale)
        np.testing.assert_allclose(y, expected, atol=2e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prob", ["", "halved"])
@pytest.mark.parametrize("score", ["", "causal", "by a sum over keys"])
def test_nothing_to_attend(score: str, prob: str) -> None:
    """Without keys Y is 0, as in a row without visible keys; without rows or batches Y is empty."""
    compiled = lowering.compile(make_model(CHANGES[score][0], PROBABILITIES[prob][0]))
    for b, s, t in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        y = compiled.run(draw_operands(b, s, t))["y"]
        assert y.shape == (b, HEADS, s, D) and not y.any()


@pytest.mark.parametrize("prob", ["", "halved"])
@pytest.mark.parametrize(
    "score",
    ["x = Identity(s)", SUM.replace("r =", "o =").replace("x =", "w =").replace(", x)", ", w)") + " x = Identity(o)"],
)
def test_rows_without_visible_keys_are_zero(score: str, prob: str) -> None:
    score += " seen = Greater(i, j) r = Where(seen, x, low)"
    y = lowering.compile(make_model(score, PROBABILITIES[prob][0])).run(draw_operands(1, 5, 5))["y"]
    assert not y[:, :, 0].any() and y[:, :, 1:].all()


def test_hidden_keys_may_be_anything() -> None:
    inputs = draw_operands(1, 6, 6)
    expected = attend(**inputs, score=CHANGES["causal"][1])[:, :, :5]
    inputs["k"][:, :, 5], inputs["v"][:, :, 5] = np.nan, np.inf
    y = lowering.compile(make_model(CAUSAL)).run(inputs)["y"]
    np.testing.assert_allclose(y[:, :, :5], expected, atol=2e-6)


def test_names_in_graphs_mean_nothing_outside() -> None:
    """Two nodes whose graphs use the same names, and a name of the surrounding graph."""
    graph = "g (float[b, h, s_, t_] x) => (float[b, h, s_, t_] r) {{ c = Constant<value_float={}>() r = Mul(x, c) }}"
    nodes = (
        f"y{k} = ai.onnx.preview.FlexAttention<score_mod = {graph.format(c)}> (q, k, v)"
        for k, c in ((1, 2.0), (2, -1.0))
    )
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 26, "ai.onnx.preview" : 1]>
        g (float[2, 4, 5, 16] q, float[2, 2, 5, 16] k, float[2, 2, 5, 16] v) => (float[2, 4, 5, 16] y)
        {{ x = Constant<value_float=3.0>() {" ".join(nodes)} y3 = Mul(y2, x) y = Add(y1, y3) }}""")
    inputs = draw_operands(2, 5, 5)
    expected = attend(**inputs, score=lambda s, i, j: 2 * s) + 3 * attend(**inputs, score=lambda s, i, j: -s)
    np.testing.assert_allclose(lowering.compile(proto).run(inputs)["y"], expected, atol=1e-5)


def test_a_graph_may_contain_another_attention() -> None:
    """The inner node's scores differ from the scores of the outer node, which its graph uses, too."""
    inner = """t = Transpose<perm=[0, 1, 3, 2]>(s) n = ReduceMean(t, last)
        w = ai.onnx.preview.FlexAttention<score_mod = inner (float[b, h, s_, t_] z) => (float[b, h, s_, t_] o)
        { o = Add(z, s) }> (s, s, s) r = Add(w, s)"""
    shapes = f"1, {HEADS}, 6, {D}"
    compiled = lowering.compile(make_model(inner, q=shapes, kv=shapes))
    inputs = draw_operands(1, 6, 6, heads=(HEADS, HEADS))

    def change(s: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return attend(s, s, s, score=lambda z, i, j: z + s) + s

    np.testing.assert_allclose(compiled.run(inputs)["y"], attend(**inputs, score=change), atol=1e-5)


SAME = "r = Identity(s)"

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    # the text of the error, its remedy, the change of a legal node
    ("input Q has rank 3", "[batch, heads, length, head size]", {"q": f"B, S, {D}"}),
    ("input Q is int32", "Use float32", {"dtype": "int32", "softmax": "float"}),
    ("3 query heads do not divide into 2", "as a positive multiple of", {"q": f"B, 3, S, {D}"}),
    ("head size differs: Q has 8, K has 16", "", {"q": f"B, {HEADS}, S, 8"}),
    ("batch size differs: Q has 2, K has 3, V has 3", "", {"q": f"2, 4, S, {D}", "kv": f"3, 2, N, {D}"}),
    ("number of heads of Q is the symbolic size", "", {"q": f"B, H, S, {D}"}),
    ("attribute scale is -1.0", "Use 0 or more", {"attributes": "scale = -1.0"}),
    ("attribute softmax_precision is 7", "Use one of 1 (float32)", {"attributes": "softmax_precision = 7"}),
    ("takes float16, and the softmax is in float32", "set the attribute softmax_precision", {"softmax": "float16"}),
    ("takes a tensor of shape [b, h, s_]", f"float32[B, {HEADS}, S, N]", {"shape": "b, h, s_"}),
    ("takes a tensor of shape [b, 3, s_, t_]", f"float32[B, {HEADS}, S, N]", {"shape": "b, 3, s_, t_"}),
    ("returns int64, and the softmax is in float32", "Make it float32", {"score": "r = Add(i, j)"}),
    ("returns float16, and", "Make it float32", {"score": "r = Cast<to=10>(s)"}),
    ("returns a tensor of shape [S, N]", f"float32[B, {HEADS}, S, N]", {"score": "r = CastLike(d, s)"}),
    ("returns a tensor of shape [B, 4, S, 1]", "", {"score": "r = ReduceSum(s, last)", "kv": f"B, {KV_HEADS}, 7, {D}"}),
    ("graph prob_mod returns a tensor of shape [B, 4, S]", "", {"prob": "r = ReduceSum<keepdims=0>(s, last)"}),
]


@pytest.mark.parametrize(("says", "remedy", "differs"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refuses(says: str, remedy: str, differs: dict[str, Any]) -> None:
    proto = make_model(**{"score": SAME, **differs})
    with pytest.raises(NodeError) as caught:
        import_model(ir.from_proto(proto), lookup)
    assert caught.value.where == "ai.onnx.preview.FlexAttention-1 giving 'y'"
    assert says in caught.value.what and remedy in caught.value.remedy


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("what", ["input", "output"])
def test_refuses_graphs_of_any_other_number_of_tensors(what: str, count: int) -> None:
    proto = make_model(SAME)
    values = getattr(proto.graph.node[0].attribute[0].g, what)
    other = onnx.ValueInfoProto()
    other.CopyFrom(values[0])
    other.name = "keys" if what == "output" else "other"
    if count:
        values.append(other)
    else:
        del values[:]
    with pytest.raises(NodeError) as caught:
        import_model(ir.from_proto(proto), lookup)
    assert f"the graph score_mod has {count} {what}s" in caught.value.what
    assert f"Give it one, float32[B, {HEADS}, S, N]" in caught.value.remedy
    assert caught.value.code == "flex_attention.mod_signature_unsupported"


def test_check_names_nodes_inside_graphs() -> None:
    """All errors of a model are found at once, inside graphs and after them."""
    errors: list[NodeError] = []
    proto = make_model("c = Loop(one, , s) r = Add(s, s)", prob="r = Add(i, j)")
    Importer(ir.from_proto(proto), lookup, errors=errors).run()
    where = "ai.onnx.preview.FlexAttention-1 giving 'y'"
    assert [error.where for error in errors] == [f"ai.onnx.Loop-26 giving 'c' in score_mod of {where}", where]


def test_sizes_that_differ_at_run_time_are_an_error() -> None:
    compiled = lowering.compile(make_model(CAUSAL, kv=f"B2, {KV_HEADS}, N, {D}"))
    inputs = draw_operands(2, 3, 4)
    compiled.run(inputs)
    with raises("run.size_mismatch"):
        compiled.run({**inputs, **{n: inputs[n][:1] for n in "kv"}})
    compiled = lowering.compile(make_model("r = ReduceMax(s, last)"))
    compiled.run(draw_operands(2, 3, 1))
    with raises("node.shape_mismatch"):
        compiled.run(inputs)
