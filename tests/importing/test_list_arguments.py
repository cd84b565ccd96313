"""Inputs and outputs of models that are sequences or optional values: lists of arrays, and None."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.commands import cli
from lowering.manifest import arguments
from lowering.packaging.module import generate_module
from tests.support.error_codes import raises

HEAD = '<ir_version: 10, opset_import: ["" : 18]>'


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {text}")


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


A, B, C = floats(2, 3), floats(4, 3, seed=1), floats(1, 3, seed=2)

# A model, the numbers of elements, and its inputs; onnxruntime says what it gives.
SEQUENCES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "given out as it came": (
        "g (seq(float[N, 3]) s) => (seq(float[N, 3]) t) { t = Identity (s) }",
        {"s": 2},
        {"s": [A, B]},
    ),
    "of one tensor": (
        "g (seq(float[N, 3]) s) => (float[N, 3] y) <int64 i = {-1}> { y = SequenceAt (s, i) }",
        {"s": 1},
        {"s": [A]},
    ),
    "between tensors": (
        """g (float[M, 3] x, seq(float[N, 3]) s, float[3] z) => (float[P, 3] y, seq(float[N, 3]) t, float[M, 3] w)
        { c = ConcatFromSequence <axis = 0> (s) y = Mul (c, z) t = SequenceInsert (s, x) w = Add (x, z) }""",
        {"s": 3},
        {"x": A, "s": [B, C, A], "z": A[0]},
    ),
    "made of a tensor": (
        "g (float[4, N] x) => (seq(float[1, N]) t) { t = SplitToSequence <axis = 0> (x) }",
        {},
        {"x": floats(4, 5)},
    ),
    "two of them": (
        """g (seq(float[N, 3]) s, seq(float[M, 3]) r) => (seq(float[P, 3]) t, seq(float[Q, 3]) u)
        <int64 i = {0}> { a = SequenceAt (s, i) t = SequenceInsert (r, a) u = SequenceErase (s, i) }""",
        {"s": 2, "r": 1},
        {"s": [A, B], "r": [C]},
    ),
    "empty ones": (
        """g (seq(float[N, 3]) s, float[N, 3] x) => (seq(float[P, 3]) t, seq(int64[Q]) e)
        { t = SequenceInsert (s, x) e = SequenceEmpty <dtype = 7> () }""",
        {"s": 0},
        {"s": [], "x": A},
    ),
    "one tensor twice": (
        "g (float[N] x) => (seq(float[N]) t, float[N] y) { y = Neg (x) t = SequenceConstruct (y, x, y) }",
        {},
        {"x": A[0]},
    ),
    "of whole numbers": (
        "g (seq(int64[N]) s) => (seq(float[N]) t, int64 n) { t = SequenceMap <body = b (int64[N] a) => (float[N] c) "
        "{ c = Cast <to = 1> (a) }> (s) n = SequenceLength (s) }",
        {"s": 2},
        {"s": [np.arange(3), np.arange(5)]},
    ),
    "with a fixed size": (
        "g (seq(float[N, K]) s) => (seq(float[N, K]) t, int64[2] n) <int64 i = {1}> { a = SequenceAt (s, i) "
        "n = Shape (a) t = SequenceErase (s, i) }",
        {"s": 2, "K": 3},
        {"s": [A, B]},
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences(case: str, tmp_path: Path) -> None:
    """Through an artifact, whose runtime is without the compiler."""
    text, dims, inputs = SEQUENCES[case]
    model = parsed(text)
    lowering.compile(model, dims=dims).save(tmp_path / "out")
    loaded = lowering.load(tmp_path / "out")
    results = loaded.run(inputs)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = dict(zip([value.name for value in model.graph.output], session.run(None, inputs)))
    assert [*results] == [*expected]
    for name, reference in expected.items():
        check(results[name], reference)
    flat = {
        tensor.name: array
        for argument in arguments(loaded.inputs, loaded.manifest.input_lists)
        for tensor, array in zip(
            argument.tensors, inputs[argument.name] if argument.kind == "list" else [inputs[argument.name]]
        )
    }
    for name, value in loaded.bind(flat)().items():
        check(value, expected[name])


def check(actual: Any, expected: Any) -> None:
    assert isinstance(actual, list) == isinstance(expected, list)
    pairs = [*zip(actual, expected, strict=True)] if isinstance(expected, list) else [(actual, expected)]
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-6)


OPTIONAL = parsed(
    """g (float[N] x, optional(float[N]) o, optional(seq(float[N])) s)
    => (float[N] y, bool h, optional(float[N]) p, optional(seq(float[N])) q) {
    h = OptionalHasElement (o) k = OptionalHasElement (s) p = Identity (o) q = Identity (s)
    z = If (h) <then_branch = t () => (float[N] u) { v = OptionalGetElement (o) u = Add (x, v) },
                else_branch = e () => (float[N] w) { w = Neg (x) }>
    y = If (k) <then_branch = m () => (float[N] a) { b = OptionalGetElement (s) i = Constant <value_int = 0> ()
                c = SequenceAt (b, i) a = Mul (z, c) },
                else_branch = n () => (float[N] d) { d = Identity (z) }> }"""
)


@pytest.mark.parametrize("has", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_optional_values(has: int, count: int, tmp_path: Path) -> None:
    x, o, s = floats(4), floats(4, seed=1) if has else None, [floats(4, seed=k + 2) for k in range(count)] or None
    lowering.compile(OPTIONAL, dims={"o": has, "s": count}).save(tmp_path / "out")
    model = lowering.load(tmp_path / "out")
    y = -x if o is None else x + o
    expected = {"y": y if s is None else y * s[0], "h": np.array(has == 1), "p": o, "q": s}
    optional = {"x": x, "o": o, "s": s}
    for inputs in (optional, {name: value for name, value in optional.items() if value is not None}):
        results = model.run(inputs)
        assert [*results] == [*expected]
        for name, reference in expected.items():
            if reference is None:
                assert results[name] is None
            else:
                check(results[name], reference)


def test_a_loop_carries_an_optional_value() -> None:
    """The first step creates its element."""
    model = parsed(
        """g (float[N] x, optional(float[N]) o) => (float[N] y) <int64 n = {3}> {
        l = Loop (n, , o) <body = b (int64 i, bool go, optional(float[N]) a) => (bool g, optional(float[N]) r) {
            g = Identity (go) h = OptionalHasElement (a)
            r = If (h) <then_branch = t () => (float[N] u) { v = OptionalGetElement (a) u = Add (v, x) },
                        else_branch = e () => (float[N] w) { w = Identity (x) }> }>
        y = OptionalGetElement (l) }"""
    )
    x, o = floats(4), floats(4, seed=1)
    (y,) = lowering.compile(model, dims={"o": 0}).run({"x": x}).values()
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)
    (y,) = lowering.compile(model, dims={"o": 1}).run({"x": x, "o": o}).values()
    np.testing.assert_allclose(y, o + 3 * x, rtol=1e-5)


def test_strings_and_half_floats() -> None:
    model = parsed(
        "g (seq(string[N]) s, seq(float16[N]) h) => (seq(string[N]) t, seq(float[N]) r) { t = Identity (s) "
        "r = SequenceMap <body = b (float16[N] a) => (float[N] c) { c = Cast <to = 1> (a) }> (h) }"
    )
    texts, halves = [np.array(["a", "b"], object), np.array(["c"], object)], [np.ones(2, np.float16)]
    results = lowering.compile(model, dims={"s": 2, "h": 1}).run({"s": texts, "h": halves})
    assert [array.tolist() for array in results["t"]] == [["a", "b"], ["c"]]
    check(results["r"], [np.ones(2, np.float32)])


def test_of_nothing_but_a_list_of_nothing() -> None:
    model = lowering.compile(parsed("g () => (seq(float[N]) e) { e = SequenceEmpty () }"))
    assert model.run({}) == {"e": []}
    model = lowering.compile(
        parsed("g (optional(float[N]) o) => (optional(float[N]) p) { p = Identity (o) }"), dims={"o": 0}
    )
    assert model.run({"o": None}) == model.run({}) == {"p": None}


MODEL = parsed(
    """g (seq(float[N, 3]) s, optional(float[N]) o, float[2] x) => (seq(float[N, 3]) t, bool h, seq(float[2]) e)
    { t = Identity (s) h = OptionalHasElement (o) e = SequenceConstruct (x) }"""
)


@pytest.fixture(scope="module")
def compiled() -> lowering.Model:
    return lowering.compile(MODEL, dims={"s": 2, "o": 0})


X = floats(2)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too short": ({"s": [A], "x": X}, r"input 's' is a list of 1 arrays, and the model was compiled for 2.*\{'s': 1\}"),
    "too long": ({"s": (A, A, A), "x": X}, r"input 's' is a list of 3 arrays, and the model was compiled for 2"),
    "not a list": ({"s": np.stack([A, A]), "x": X}, r"input 's' must be a list of 2 arrays, not a ndarray"),
    "a dictionary": ({"s": {0: A, 1: A}, "x": X}, r"input 's' must be a list of 2 arrays, not a dict"),
    "None": ({"s": None, "x": X}, r"input 's' must be a list of 2 arrays, not a NoneType"),
    "an element of another shape": ({"s": [A, A[:, :2]], "x": X}, r"input 's\[1\]' must have size 3 along axis 1"),
    "an element of another type": ({"s": [A.astype("f8"), A], "x": X}, r"input 's\[0\]' must be float32, not float64"),
    "an element that is no array": ({"s": [A, "y"], "x": X}, r"input 's\[1\]' is a str; pass a NumPy array"),
    "an element that is None": ({"s": [A, None], "x": X}, r"input 's\[1\]' is missing"),
    "missing": ({"x": X}, r"input 's' is missing; the model takes a list of 2 arrays"),
    "a value for None": ({"s": [A, A], "x": X, "o": X}, r"input 'o' must be None, as the model was compiled, not a nd"),
    "a list for a tensor": ({"s": [A, A], "x": [X, X]}, r"input 'x' is a list; pass a NumPy array"),
    "another name": ({"s": [A, A], "x": X, "u": [A]}, r"there is no input 'u'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(compiled: lowering.Model, case: str) -> None:
    inputs, message = WRONG[case]
    for call in (compiled.run, compiled.bind):
        with pytest.raises(lowering.InputError, match=message):
            call(inputs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"o": 0}, r"input 's' is a sequence, whose length must be known.*dims= \(--dim\): s=K for K tensors"),
    "no choice": (
        {"s": 1},
        r"input 'o' is an optional value\. Whether it is None must.*: o=1 for a value, o=0 for None",
    ),
    "a range": ({"s": (1, 2), "o": 0}, r"input 's' must have one number of elements, not 1 to 2"),
    "below zero": ({"s": -1, "o": 0}, r"number of elements of input 's' must be a whole number from 0 to 512, not -1"),
    "too many": ({"s": 513, "o": 0}, r"number of elements of input 's' must be a whole number from 0 to 512"),
    "two values": ({"s": 1, "o": 2}, r"number of elements of input 'o' must be a whole number from 0 to 1, not 2"),
    "a half": ({"s": 1.5, "o": 0}, r"number of elements of input 's' must be a whole number"),
    "another dimension": ({"s": 1, "o": 0, "M": 3}, r"no input has a symbolic dimension 'M'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_that_are_refused(case: str) -> None:
    dims, message = REFUSED[case]
    for ask in (lowering.compile, lowering.check):
        with pytest.raises(lowering.InputError, match=message):
            ask(MODEL, dims=dims)


ILLEGAL = {
    "g (seq(float) s, float[s] x) => (float[s] y) { y = Neg (x) }": "'s' is both an input and a symbolic dimension",
    "g (seq(seq(float[N])) s) => (int64 y) { y = SequenceLength (s) }": r"Input 's' is Sequence\(Sequence",
    "g (float[N] x) => (seq(float[N]) y) { y = Neg (x) }": r"output 'y': it is declared Sequence.*float32 of rank 1",
    "g (float[N] x) => (float[N] y) { y = SequenceConstruct (x, x) }": "compute a sequence of 2 tensors of float32",
    "g (float[N] x) => (seq(int64[N]) y) { y = SequenceConstruct (x) }": "element type is declared int64, but",
    "g (optional(float[N]) s) => (float[N] y) { y = Identity (s) }": "compute an optional value without an element",
    "g (optional(float[N]) s) => (float[N] y) { y = OptionalGetElement (s) }": "input is an optional value without",
    "g (optional(float[N]) s) => (float[N] y) { y = Relu (s) }": "input X is an optional value without an element",
}


@pytest.mark.parametrize("text", ILLEGAL)
def test_models_that_are_refused(text: str) -> None:
    with pytest.raises(lowering.LoweringError, match=ILLEGAL[text]):
        lowering.compile(parsed(text), dims={"s": 0} if "s)" in text or "s," in text else {})


def test_an_element_may_be_both_named_and_taken() -> None:
    """Names of tensors are not those of other values."""
    text = "g (seq(float[N]) s, float[N] x) => (seq(float[N]) t, float[N] y) { t = Identity (s) y = Neg (x) }"
    model = parsed(text)
    model.graph.input[1].name = model.graph.node[1].input[0] = "s[0]"
    model.graph.output[1].name = model.graph.node[1].output[0] = "t[1]"
    a, b, c = (floats(3, seed=k) for k in range(3))
    results = lowering.compile(model, dims={"s": 2}).run({"s": [a, b], "s[0]": c})
    check(results["t"], [a, b])
    check(results["t[1]"], -c)


def test_arrays_are_bound_for_results(compiled: lowering.Model) -> None:
    out = [np.empty_like(A), np.empty_like(B)]
    call = compiled.bind({"s": [A, B], "x": X}, outputs={"t": out})
    results = call()
    assert all(a is b for a, b in zip(results["t"], out, strict=True))
    check(out, [A, B])
    with raises("input.list_length_mismatch"):
        compiled.bind({"s": [A, B], "x": X}, outputs={"t": out[:1]})


def test_calls_that_come_later(compiled: lowering.Model) -> None:
    accepted = compiled.accept({"s": [A, B], "x": X})
    for later in (compiled.run(accepted), compiled.submit({"s": [A, B], "x": X}).result()):
        check(later["t"], [A, B])
        check(later["e"], [X])
    check(pickle.loads(pickle.dumps(compiled)).run({"s": [A, B], "x": X})["t"], [A, B])


def test_several_calls_are_not_joined(compiled: lowering.Model) -> None:
    with raises("batching.list_unsupported"):
        lowering.Batching(compiled)


def test_what_an_artifact_says(compiled: lowering.Model, tmp_path: Path) -> None:
    """To people, to C++ hosts, and by the command line."""
    assert "s: list of 2 (s[0]: float32[s[0]_0, 3], s[1]: float32[s[1]_0, 3]), o: None, x: float32[2] -> " in repr(
        compiled
    )
    compiled.save(tmp_path / "out")
    header = (tmp_path / "out" / "model.h").read_text()
    assert "//   input  s: a list in the ONNX model, and 2 tensors here\n//   input  s[0]: float32[" in header
    assert "//   input  o: None in the ONNX model, and no tensor here" in header
    for name, array in (("a", A), ("b", B), ("x", X)):
        np.save(tmp_path / f"{name}.npy", array)
    files = {"s[0]": "a", "s[1]": "b", "x": "x"}
    inputs = [argument for name, file in files.items() for argument in ("--input", f"{name}={tmp_path / file}.npy")]
    assert cli.main(["run", str(tmp_path / "out"), *inputs, "--output-dir", str(tmp_path / "results")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "results" / "t%5B1%5D.npy"), B)


def test_a_package_of_an_artifact(compiled: lowering.Model) -> None:
    text = generate_module(compiled.manifest)
    assert "def run(s: list[NDArray[np.float32]], x: NDArray[np.float32]) -> Outputs:" in text
    assert "    t: list[NDArray[np.float32]]\n" in text and "        t=outputs['t']," in text


@pytest.mark.parametrize("case", ["between tensors", "made of a tensor", "two of them", "empty ones"])
def test_verification(case: str) -> None:
    text, dims, inputs = SEQUENCES[case]
    for arrays, sizes in ((inputs, {}), ({}, dims)):
        assert lowering.verify(parsed(text), inputs=arrays, sizes=sizes).first_difference is None
    wrong = lowering.compile(parsed(text.replace("Mul", "Sub").replace("Identity", "Neg")), dims=dims)
    difference = lowering.verify(parsed(text), inputs=inputs, artifact=wrong).first_difference
    assert (difference is not None) == ("Mul" in text)
