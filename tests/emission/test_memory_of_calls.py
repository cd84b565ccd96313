"""Static objects of models with loops, and with sizes that depend on data: memory is the caller's, and is released."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from lowering.compiling.compiler import compile_static
from tests.emission.models import SEED, make_model
from tests.support.static_objects import RUN, Memory, StaticError, StaticObject, Threads

RNG = np.random.default_rng(SEED)
LOOP = """
m (int64 count, bool go, int64 last, float[n, 3] x) => (float[n, 3] y, float[k, n, 3] all)
{
  y, all = Loop(count, go, x) <body = b (int64 i, bool c, float[n, 3] s) => (bool g, float[n, 3] t, float[n, 3] o) {
    g = Less(i, last)
    f = CastLike(i, s)
    a = Add(s, f)
    t = Tanh(a)
    o = MatMul(t, w)
  }>
}"""
UNCHANGED = """
m (int64 count, float[n] x, float[n] z) => (float[n] y, float[n] same, float[k, n] all)
{
  y, same, all = Loop(count, , x, z) <body = b (int64 i, bool c, float[n] s, float[n] u)
    => (bool g, float[n] t, float[n] v, float[n] o) { g = Identity(c) t = Neg(s) v = Identity(u) o = Add(t, u) }>
}"""
NESTED = """
m (int64 count, float[n] x) => (float[n] y, float[k, j, n] all)
{
  y, all = Loop(count, , x) <body = b (int64 i, bool c, float[n] s) => (bool g, float[n] t, float[j, n] o) {
    g = Identity(c)
    t, o = Loop(count, , s) <body = d (int64 l, bool e, float[n] p) => (bool h, float[n] q, float[n] r) {
      h = Identity(e)
      q = Sin(p)
      r = Add(q, x)
    }>
  }>
}"""
SCAN = """
m (float[s, b] x, float[b] start) => (float[b] last, float[s, b] totals)
{
  last, totals = Scan<num_scan_inputs = 1, body = f (float[b] a, float[b] at) => (float[b] t, float[b] o) {
    t = Add(a, at)
    o = Neg(t)
  }>(start, x)
}"""
LSTM = """
m (float[s, 2, 5] x) => (float[s, 1, 2, 4] y, float[1, 2, 4] h, float[1, 2, 4] c)
{
  y, h, c = LSTM<hidden_size = 4>(x, w, r)
}"""
GRU = """
m (float[s, b, 5] x) => (float[s, 2, b, 4] y, float[2, b, 4] h)
{
  y, h = GRU<hidden_size = 4, direction = "bidirectional">(x, w, r)
}"""
NONZERO = """
m (float[n, 4] x) => (int64[2, k] y, float[k] v, float[n, 4] z)
{
  p = Relu(x)
  y = NonZero(p)
  t = Transpose(y)
  v = GatherND(x, t)
  z = Neg(p)
}"""
CHAIN = """
m (float[n, 40] x, bool[n] keep) => (float[k, 70] y, float[70] total)
{
  rows = Compress<axis = 0>(x, keep)
  a = MatMul(rows, w)
  y = Softmax(a)
  total = ReduceSum<keepdims = 0>(y, axes)
}"""
RANGE = """
m (int64 start, int64 end, float[n] x) => (float[k] y)
{
  one = Constant<value_int = 1>()
  r = Range(start, end, one)
  f = Cast<to = 1>(r)
  y = Mul(f, f)
}"""
UNEQUAL = """
m (bool c, bool d, float[n] x) => (float[k] y, float[n] z)
{
  y = If(c) <
    then_branch = g () => (float[k] a) { a = Concat<axis = 0>(x, x) },
    else_branch = h () => (float[k] b)
    {
      b = If(d) <then_branch = i () => (float[k] e) { e = Relu(x) },
                 else_branch = j () => (float[k] f) { f = Slice(x, zero, two) }>
    }>
  z = Neg(x)
}"""
COLLECT = """
m (int64 count, float[n] x) => (int64[1, k] y)
{
  s = Loop(count, , x) <body = b (int64 i, bool c, float[n] a) => (bool g, float[n] t) {
    g = Identity(c)
    t = Sin(a)
  }>
  p = Relu(s)
  y = NonZero(p)
}"""
EMPTY_ROWS = "m (float[n, 0] x, bool[n] keep) => (float[k, 0] y) { y = Compress<axis = 0>(x, keep) }"
# Attention over rows that data chooses needs less scratch memory than TopK, whose size the inputs give.
SCRATCH = """
m (float[n, 32] x, bool[n] keep, float[a, 32] z, float[r, 1] v) => (float[1, 1, a, 32] y, float[r, 1] s, int64[r, 1] i)
{
  rows = Compress<axis = 0>(x, keep)
  q = Unsqueeze(z, first_two)
  k = Unsqueeze(rows, first_two)
  y = Attention(q, k, k)
  m0 = ReduceMax<keepdims = 0>(y)
  w = Add(v, m0)
  shape = Shape(v)
  count = Slice(shape, zero, axes_end)
  s, i = TopK<axis = 0>(w, count)
}"""


def int64(number: int) -> np.ndarray:
    return np.array(number, np.int64)


def float32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("f")


Inputs = Mapping[str, np.ndarray]
CASES: dict[str, tuple[str, dict[str, Any], list[Inputs]]] = {
    "loop": (LOOP, {"w": (3, 3)}, [
        {"count": int64(count), "go": np.array(go), "last": int64(last), "x": float32(n, 3)}
        for count, go, last, n in ((5, True, 99, 2), (1, True, 99, 2), (700, True, 9999, 1), (2**62, True, 20, 3),
                                   (0, True, 9, 2), (-1, True, 9, 2), (5, False, 9, 2), (9, True, 9, 0))
    ]),
    "unchanged": (UNCHANGED, {}, [{"count": int64(n), "x": float32(3), "z": float32(3)} for n in (0, 1, 2, 33)]),
    "nested": (NESTED, {}, [{"count": int64(n), "x": float32(2)} for n in (1, 3, 12)]),
    "scan": (SCAN, {}, [{"x": float32(s, 3), "start": float32(3)} for s in (1, 2, 19)]),
    "lstm": (LSTM, {"w": (1, 16, 5), "r": (1, 16, 4)}, [{"x": float32(s, 2, 5)} for s in (1, 7)]),
    "gru": (GRU, {"w": (2, 12, 5), "r": (2, 12, 4)}, [{"x": float32(s, b, 5)} for s, b in ((1, 1), (6, 3))]),
    "nonzero": (NONZERO, {}, [{"x": float32(n, 4)} for n in (5, 1, 0)] + [{"x": -abs(float32(3, 4))}]),
    "chain": (CHAIN, {"w": (40, 70)}, [
        {"x": float32(n, 40), "keep": RNG.random(n) < share} for n, share in ((9, 0.5), (300, 0.9), (4, 0.0))
    ]),
    "range": (RANGE, {}, [
        {"start": int64(a), "end": int64(b), "x": float32(2)} for a, b in ((0, 5), (3, -2), (-7, 1000))
    ]),
    "unequal": (UNEQUAL, {}, [
        {"c": np.array(c), "d": np.array(d), "x": float32(3)} for c in (False, True) for d in (False, True)
    ]),
    "collect": (COLLECT, {}, [{"count": int64(n), "x": float32(8)} for n in (0, 1, 6)]),
    "empty rows": (EMPTY_ROWS, {}, [{"x": float32(5, 0), "keep": RNG.random(5) < 0.5}]),
    "scratch": (SCRATCH, {}, [
        {"x": float32(300, 32), "keep": np.arange(300) < k, "z": float32(16, 32), "v": float32(r, 1)}
        for k, r in ((256, 7712), (257, 7712), (1, 7712), (256, 100))
    ]),
}  # fmt: skip
CONSTANTS = {"axes": [0], "zero": [0], "two": [2], "first_two": [0, 1], "axes_end": [1]}


def make_case_model(case: str) -> onnx.ModelProto:
    text, weights, _ = CASES[case]
    model = make_model(text, weights)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(numbers), name) for name, numbers in CONSTANTS.items()
    )
    return model


@pytest.fixture(scope="module")
def static_objects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a case's name to its model, artifact and static object."""
    objects: dict[str, tuple[onnx.ModelProto, lowering.CompiledModule, StaticObject]] = {}

    def make(case: str) -> tuple[onnx.ModelProto, lowering.CompiledModule, StaticObject]:
        if case not in objects:
            model = make_case_model(case)
            folder = tmp_path_factory.mktemp(case) / "out"
            objects[case] = model, lowering.compile(model), StaticObject(folder, compile_static(folder, model))
        return objects[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_equals_the_artifact(case: str, static_objects: Any) -> None:
    _, module, static = static_objects(case)
    for inputs in CASES[case][2]:
        expected = module.run(inputs)
        actual = static.compute(inputs, expected)
        for name, array in expected.items():
            assert actual[name].shape == array.shape
            assert actual[name].tobytes() == array.tobytes(), name


def share(pool: ThreadPoolExecutor, count: int) -> Threads:
    def run(_: int, task: Any, data: int, tasks: int) -> None:
        list(pool.map(lambda number: task(data, number), reversed(range(tasks))))

    return Threads(None, count, RUN(run))


@pytest.mark.parametrize("case", ["loop", "chain", "gru", "scan"])
def test_threads_of_the_caller(case: str, static_objects: Any) -> None:
    """Scratch memory that grows while the model runs is there for each of the tasks."""
    _, module, static = static_objects(case)
    with ThreadPoolExecutor(3) as pool:
        for inputs in CASES[case][2]:
            expected = module.run(inputs)
            actual = static.compute(inputs, expected, share(pool, 5))
            for name, array in expected.items():
                assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_refused_memory_is_an_error(case: str, static_objects: Any) -> None:
    """Each block of a call in its turn: what was allocated before is released, and the next call computes."""
    _, module, static = static_objects(case)
    inputs = CASES[case][2][0]
    expected = module.run(inputs)
    whole = Memory()
    static.compute(inputs, expected, memory=whole)
    for number in range(1, whole.calls + 1):
        refused = Memory(fails_at=number)
        with pytest.raises(StaticError) as caught:
            static.compute(inputs, expected, memory=refused)
        assert caught.value.code == "run.out_of_memory"
        refused.assert_released()
    actual = static.compute(inputs, expected)
    assert all(actual[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_errors_release_memory(static_objects: Any, tmp_path: Path) -> None:
    """A step that fails, sizes that are negative or larger than memory, and a call without memory."""
    text = """
m (int64 count, int64[1] shape, float[n] x, int64[n] at) => (float[n] y, float[k] ones)
{
  y = Loop(count, , x) <body = b (int64 i, bool c, float[n] s) => (bool g, float[n] t) {
    g = Identity(c)
    down = Sub(at, i)
    t = Gather(s, down)
  }>
  ones = Expand(one, shape)
}"""
    model = make_model(text, {})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], "f"), "one"))
    module = lowering.compile(model)
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))

    def call(count: int, size: int) -> dict[str, np.ndarray]:
        return {"count": int64(count), "shape": np.array([size]), "x": float32(4), "at": np.array([0, 3, 1, 2])}

    good = call(3, 6)
    expected = module.run(good)
    for inputs, code in (
        (call(9, 6), "run.index_out_of_range"),
        (call(1, -1), "run.negative_size"),
        (call(1, 2**41), "run.size_too_large"),
        (call(1, 2**40), "run.out_of_memory"),
    ):
        with pytest.raises(lowering.errors.LoweringError) as artifact:
            module.run(inputs)
        memory = Memory()
        with pytest.raises(StaticError) as caught:
            static.compute(inputs, expected, memory=memory)
        memory.assert_released()
        assert caught.value.code == artifact.value.code == code
        actual = static.compute(good, expected)
        assert all(actual[name].tobytes() == array.tobytes() for name, array in expected.items())
    fields = dict(zip(good, good.values())) | {"y": np.zeros(4, "f")}
    with pytest.raises(StaticError) as caught:
        static.run({"n": 4}, fields)
    assert caught.value.code == "run.memory_missing"
