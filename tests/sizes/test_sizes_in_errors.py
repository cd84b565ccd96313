"""Errors name symbolic sizes as a reader writes them, whichever operator says so, and leave what is the user's."""

from __future__ import annotations

import pytest
from onnx import parser

import lowering

# r [n * 6 / 4, 4], t [4, n * 6 / 4], q [1, 2, n * 3].
MODEL = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> m (float[n, 6] x) => (float[a, b] y)
<int64[2] s = {-1, 4}, int64[3] s3 = {1, 2, -1}> {
    r = Reshape (x, s) t = Transpose <perm = [1, 0]> (r) q = Reshape (x, s3) BODY
}"""
ATTENTION, GROUPED = "<num_heads = 2>", "<num_heads = 2, kv_num_heads = 1>"


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ("y = Attention <q_num_heads = 5, kv_num_heads = 5> (q, q, q)", "n * 3"),
        ("i = Cast <to = 7> (t) y = ScatterND (x, i, x)", "n * 6 // 4"),
        ("y, z = GRU <hidden_size = 3> (q, q, q)", "n * 3"),
        (f"y = com.microsoft.MultiHeadAttention {ATTENTION} (q, q, q)", "n * 3"),
        (f"i = Cast <to = 6> (t) y = com.microsoft.GroupQueryAttention {GROUPED} (q, q, q, , , i, i)", "n * 3"),
        ("k = Shape (q) p = Constant <value = int64[3] {-9, 1, 1}> () m = Mul (k, p) y = Reshape (x, m)", "n * 3"),
        ("k = Shape (q) p = Constant <value = int64[3] {-9, 1, 1}> () m = Mul (k, p) y = Expand (x, m)", "n * 3"),
        ("p = Constant <value = int64[2] {7, 5}> () y = Reshape (t, p)", "n * 6 // 4 * 4"),
    ],
)
def test_sizes_are_as_one_writes_them(body: str, size: str) -> None:
    try:
        text = str(lowering.check(parser.parse_model(MODEL.replace("BODY", body))))
    except lowering.LoweringError as error:
        text = str(error)
    assert size in text and "T." not in text


@pytest.mark.parametrize("name", ["T.int64(3)", "encoder.T.max(0)", "T.weight"])
def test_names_stay_what_they_are(name: str) -> None:
    """The names of nodes, and of values, which errors quote."""
    body = "p = Constant <value = int64[2] {7, 5}> () y = Reshape (t, p)"
    model = parser.parse_model(MODEL.replace("BODY", body))
    model.graph.node[1].output[0] = model.graph.node[-1].input[0] = name
    model.graph.node[-1].name = f"{name} again"
    text = str(lowering.check(model))
    assert f"'{name} again': input '{name}' has n * 6 // 4 * 4 elements" in text
