"""Models of static objects, with their inputs and poisoned outputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

SEED = 20261130
HEAD = '<ir_version: 10, opset_import: ["" : 24]>\n'

EMBEDDING = """
m (int64[batch, n] ids, float[batch, n, 64] x) => (float[batch, n, 96] y, float[batch, n, 64] z)
{
  e = Gather<axis = 0>(table, ids)
  z = Add(x, e)
  a = MatMul(z, w)
  y = Softmax<axis = -1>(a)
}"""
ATTENTION = """
m (float[batch, 4, q, 32] query, float[batch, 2, k, 32] key, float[batch, 2, k, 32] value, bool[batch, 1, q, k] mask)
  => (float[batch, 4, q, 32] y)
{
  y = Attention(query, key, value, mask)
}"""
CACHE = """
m (float[b, 2, 24, 16] cache, float[b, 2, t, 16] fresh, int64[b] start) => (float[b, 2, 24, 16] present, float[] total)
{
  present = TensorScatter<axis = 2>(cache, fresh, start)
  total = ReduceSum<keepdims = 0>(present)
}"""
ALIASES = """
m (float[n, 8] x, int32[n] k)
  => (float[n, 8] same, float[8, n] turned, float[n, 8] relu, float[n, 8] other, int32[n] same_k)
{
  same = Identity(x)
  turned = Transpose(x)
  relu = Relu(x)
  other = Identity(relu)
  same_k = Identity(k)
}"""
WIDE = """
m (float[n, 300] x) => (float[n, 500] y)
{
  a = MatMul(x, w)
  y = Gelu(a)
}"""
BRANCHES = """
m (bool c, bool d, float[n, 300] x) => (float[n, 500] y, float[n, 300] z, float[n, 300] again)
{
  y, z = If(c) <
    then_branch = f () => (float[n, 500] a, float[n, 300] b) { a = MatMul(x, w) b = Neg(x) },
    else_branch = g () => (float[n, 500] a2, float[n, 300] b2)
    {
      b2 = If(d) <then_branch = h () => (float[n, 300] e) { e = Identity(x) },
                  else_branch = i () => (float[n, 300] e2) { e2 = Relu(x) }>
      doubled = Add(x, x)
      a2 = MatMul(doubled, w)
    }>
  again = Add(z, x)
}"""
ACOSH = "m (float[n, 5] x) => (float[n, 5] y) { y = Acosh(x) }"
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], list[dict[str, int]]]] = {
    "embedding": (EMBEDDING, {"table": (10, 64), "w": (64, 96)}, [{"batch": 2, "n": 5}, {"batch": 1, "n": 33}]),
    "attention": (ATTENTION, {}, [{"batch": 2, "q": 7, "k": 19}, {"batch": 1, "q": 1, "k": 300}]),
    "cache": (CACHE, {}, [{"b": 2, "t": 3}, {"b": 1, "t": 1}]),
    "aliases": (ALIASES, {}, [{"n": 3}, {"n": 0}, {"n": 1}]),
    "acosh": (ACOSH, {}, [{"n": 4}]),
    "wide": (WIDE, {"w": (300, 500)}, [{"n": 1}, {"n": 100}, {"n": 0}]),
}


def make_model(text: str, weights: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    rng = np.random.default_rng(SEED)
    model = onnx.parser.parse_model(HEAD + text)
    for name, shape in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    return model


def make_inputs(model: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng(SEED), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            arrays[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            arrays[value.name] = rng.integers(0, 2 if dtype.kind == "b" else 10, shape).astype(dtype)
    return arrays


def make_outputs(expected: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(bytearray(b"\xa5" * array.nbytes), array.dtype).reshape(array.shape)
            for name, array in expected.items()}  # fmt: skip
