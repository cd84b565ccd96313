"""Cast and CastLike compared with NumPy and ml_dtypes, and float8_e8m0fnu with the table of the standard."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from tests.ops.expectations import FLOATS, INTEGERS, Expectations, import_node, make_model

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
NARROW = ("int2", "uint2", "int4", "uint4")
RNG = np.random.default_rng(0)


def find_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def make_samples(dtype: str) -> np.ndarray:
    """Return values that every number type can represent."""
    if dtype == "bool":
        return np.array([False, True, True])
    if dtype in INTEGERS:
        return np.array([0, 1, 3, 5, 7], dtype)
    return np.array([0.0, 0.25, 1.0, 2.5, 3.75, 5.0, 7.0]).astype(dtype)


def test_every_pair_of_ordinary_types() -> None:
    e = Expectations()
    for source in (*FLOATS, *INTEGERS, "bool"):
        x = make_samples(source)
        for target in (*FLOATS, *INTEGERS, "bool"):
            e.expect("Cast", [x], x.astype(target), to=find_type(target), dims=[["n"]])
    e.check()


def test_out_of_range() -> None:
    e = Expectations()
    wide = np.array([200, -200, 70000, 2**33 + 5, -1], np.int64)
    for target in ("int8", "uint8", "int16", "int32", "uint64"):  # higher bits are discarded
        e.expect("Cast", [wide], wide.astype(target), to=find_type(target))
    with np.errstate(over="ignore"):
        big = np.array([1e30, -1e30, 1e-30, np.inf, np.nan, 65519.0, 65520.0])
        for target in ("float16", "bfloat16", "float32"):
            e.expect("Cast", [big], big.astype(target), to=find_type(target))
    odd = np.array([0.0, -0.0, 0.1, -3.0, np.nan, np.inf], np.float32)
    e.expect("Cast", [odd], odd != 0, to=find_type("bool"))
    e.check()


def quantize_nearest(x: np.ndarray, dtype: str, saturate: bool) -> np.ndarray:
    """Return the bits that the standard requires, searched among all values of the type: ties go to even bits."""
    bits = np.arange(128, dtype=np.uint8)
    values = bits.view(dtype).astype(np.float64)
    bits, values = bits[np.isfinite(values)], values[np.isfinite(values)]
    step = values[-1] - values[-2]
    magnitude = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    middle = (values[above - 1] + values[above]) / 2
    even = np.where(bits[above] % 2 == 0, above, above - 1)
    nearest = np.where(magnitude > middle, above, np.where(magnitude < middle, above - 1, even))
    limit = values[-1] + step / 2
    beyond = (magnitude > limit) | ((magnitude == limit) & (bits[-1] % 2 == 1))
    infinity = np.array([np.inf], np.float32).astype(dtype).view(np.uint8)[0]  # NaN where the type lacks infinity
    result = np.where(beyond & (not saturate), infinity, bits[nearest])
    negative = np.signbit(x.astype(np.float64)) & ~(("fnuz" in dtype) & ((result == 0) | (result == 0x80)))
    result = np.where(negative, result | 0x80, result)
    return np.where(np.isnan(x.astype(np.float64)), np.array([np.nan]).astype(dtype).view(np.uint8)[0], result)


@pytest.mark.parametrize("saturate", [0, 1])
def test_to_float8(saturate: int) -> None:
    """Values are rounded to nearest even once: a detour from float64 through float32 would be seen."""
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, -480, 57344, 61440, 61441, 1e9, -1e9])
    small = np.ldexp(RNG.uniform(-2, 2, 200), RNG.integers(-20, -4, 200))
    ties = (np.arange(-40, 40) + 0.5) / 512
    between = np.nextafter(np.array([17 / 16, 19 / 16, 9 / 8, 11 / 8, 464]), np.inf)
    values = np.concatenate([special, small, ties, between, RNG.normal(0, 100, 200)])
    e = Expectations()
    for source in ("float64", "float32", "float16", "bfloat16"):
        with np.errstate(over="ignore"):
            x = values.astype(source)
        for target in FLOAT8:
            expected = quantize_nearest(x, target, bool(saturate)).astype(np.uint8)
            e.expect("Cast", [x], expected, dims=[["n"]], to=find_type(target), saturate=saturate)
    check_bytes(e, FLOAT8)


def check_bytes(e: Expectations, formats: tuple[str, ...]) -> None:
    """Check like `Expectations.check`, with the outputs read as bytes, where only bit patterns of NaN may differ."""
    targets = [a.i for node in e.nodes for a in node.attribute if a.name == "to"]
    for output, target in zip(e.outputs, targets, strict=True):
        output.type.tensor_type.elem_type = target
    graph = helper.make_graph(e.nodes, "g", e.inputs, e.outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", e.opset)], ir_version=11)
    results = lowering.compile(proto).run(e.feeds)
    for name, (label, expected) in e.expected.items():
        actual = results[name]
        assert actual.dtype.name in formats
        expected_floats = expected.view(actual.dtype).astype(np.float32)
        is_number = ~np.isnan(expected_floats)
        np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), ~is_number, err_msg=label)
        np.testing.assert_array_equal(actual.view(np.uint8)[is_number], expected[is_number], err_msg=label)


def test_from_narrow_floats() -> None:
    """All 256 bit patterns of every format, and all 16 of float4."""
    e = Expectations()
    for source in (*FLOAT8, "float8_e8m0fnu"):
        x = np.arange(256, dtype=np.uint8).view(source)
        for target in ("float32", "float64", "bfloat16"):
            e.expect("Cast", [x], x.astype(target), to=find_type(target))
    x = np.arange(16, dtype=np.uint8).view("float4_e2m1fn")
    e.expect("Cast", [x], x.astype("float32"), to=TensorProto.FLOAT)
    e.check()


def test_narrow_integers() -> None:
    e = Expectations()
    for source, least, count in (("int4", -8, 16), ("uint4", 0, 16), ("int2", -2, 4), ("uint2", 0, 4)):
        x = np.arange(least, least + count).astype(source)
        for target in ("int8", "uint8", "int64", "float32", "float16", "bool"):
            e.expect("Cast", [x], x.astype(np.int64).astype(target), to=find_type(target))
    wide = np.arange(-20, 300, 7).astype(np.int32)
    floats = np.array([-8.0, -1.5, -0.5, 0.5, 3.9, 7.0], np.float32)
    for target in NARROW:
        e.expect("Cast", [wide], wide.astype(target), to=find_type(target))
        e.expect("Cast", [floats], floats.astype(np.int32).astype(target), to=find_type(target))
    e.check()


def test_to_float4() -> None:
    x = np.array(
        [0, 0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 100.0, -0.3, -5.1, np.inf, -np.inf], np.float32
    )
    e = Expectations()
    e.expect("Cast", [x], x.astype("float4_e2m1fn"), to=TensorProto.FLOAT4E2M1)
    e.check()


@pytest.mark.parametrize(
    ("mode", "saturate", "expected"),
    [
        # 2**-130   2**-127   1.5*2**-127   1    1.25   1.5  2**127  1.5*2**127  inf  nan
        ("up", 1, [0, 0, 1, 127, 128, 128, 254, 254, 254, 255]),
        ("down", 1, [0, 0, 0, 127, 127, 127, 254, 254, 254, 255]),
        ("nearest", 1, [0, 0, 1, 127, 127, 128, 254, 254, 254, 255]),
        ("nearest", 0, [255, 0, 1, 127, 127, 128, 254, 255, 255, 255]),
    ],
)
def test_to_float8_e8m0(mode: str, saturate: int, expected: list[int]) -> None:
    x = np.array(
        [2.0**-130, 2.0**-127, 1.5 * 2.0**-127, 1, 1.25, 1.5, 2.0**127, 1.5 * 2.0**127, np.inf, np.nan], np.float32
    )
    e = Expectations()
    bits = np.array(expected, np.uint8)
    e.expect("Cast", [x], bits, to=TensorProto.FLOAT8E8M0, round_mode=mode, saturate=saturate)
    check_bytes(e, ("float8_e8m0fnu",))


def test_cast_like() -> None:
    e = Expectations()
    x = np.array([0.5, 300.0], np.float32)
    e.expect("CastLike", [x, np.zeros(3, np.float64)], x.astype(np.float64), dims=[["n"], ["m"]])
    e.expect("CastLike", [x, np.zeros((), np.int32)], x.astype(np.int32))
    e.expect("CastLike", [x, np.zeros((), "float8_e5m2")], x.astype(ml_dtypes.float8_e5m2))
    e.check()


def test_strings_and_complex_are_refused() -> None:
    for dtype in ("complex64", "string"):
        with pytest.raises(lowering.NodeError, match=rf"Cast-25 'the_node': cannot cast float32 to {dtype}"):
            import_node("Cast", [("float32", [2])], to=onnx.TensorProto.DataType.Value(dtype.upper()))


def cast_constant(x: np.ndarray, kind: int, like: bool = False) -> np.ndarray:
    """Return the result of a model that casts a constant, by Cast, or by CastLike and an input of the type."""
    attributes = {} if like else {"to": kind}
    node = helper.make_node("CastLike" if like else "Cast", ["x", "like"] if like else ["x"], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("like", kind, ["n"])] if like else []
    outputs = [helper.make_tensor_value_info("y", kind, x.shape)]
    proto = make_model([node], inputs, outputs, 25, [numpy_helper.from_array(x, "x")])
    feeds = {"like": np.zeros(1, helper.tensor_dtype_to_np_dtype(kind))} if like and kind != TensorProto.STRING else {}
    feeds = {"like": np.array(["a"], object)} if like and kind == TensorProto.STRING else feeds
    return np.asarray(lowering.compile(proto).run(feeds)["y"])


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "float64", "uint8"])
def test_constants_to_strings(dtype: str, like: bool) -> None:
    """Strings are those of NumPy and of onnx's evaluator."""
    numbers = [0, 1, 7] if dtype in ("bool", "uint8", "int64") else [0.1, -1.5, 1e-7, 6e4, np.inf, np.nan, 3.0]
    x = np.array(numbers).astype(dtype)
    actual = cast_constant(x, TensorProto.STRING, like)
    assert actual.dtype == object and actual.tolist() == [str(element) for element in x]


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"])
def test_constant_strings_to_floats(dtype: str, like: bool) -> None:
    texts = np.array([["0.25", " -3 ", "1e2"], ["+INF", "-inf", "NaN"]], object)
    expected = np.array([[0.25, -3.0, 100.0], [np.inf, -np.inf, np.nan]])
    if dtype.startswith("float8"):  # float8 lacks infinity
        texts, expected = texts[:1], expected[:1]
    actual = cast_constant(texts, find_type(dtype), like).astype(np.float32)
    np.testing.assert_array_equal(actual, expected.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8", "int4"])
def test_constant_strings_to_integers(dtype: str) -> None:
    actual = cast_constant(np.array(["3", "+4", " 05", "2.7"], object), find_type(dtype))
    assert actual.dtype == np.dtype(dtype) and actual.astype(int).tolist() == [3, 4, 5, 2]
    if dtype == "int64":  # outside the integers of float64
        assert cast_constant(np.array(["-9223372036854775807"], object), find_type(dtype)).tolist() == [-(2**63) + 1]


@pytest.mark.parametrize(
    ("text", "dtype", "words"),
    [
        ("four", "float32", "the string 'four' to float32: it is not a number"),
        ("", "int64", "the string '' to int64: it is not a number"),
        ("300", "uint8", "the string '300' to uint8"),
        ("-1", "uint64", "the string '-1' to uint64"),
        ("inf", "int32", "it is not a number"),
        ("1", "bool", "the string '1' to bool"),
    ],
)
def test_constant_strings_that_are_not_numbers(text: str, dtype: str, words: str) -> None:
    with pytest.raises(lowering.NodeError, match=words):
        cast_constant(np.array([text], object), find_type(dtype))
