"""Operators that move elements, where versions, types and kinds of sizes differ, compared with NumPy."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (int4 as a NumPy type name)
import numpy as np
import onnx
import pytest

import lowering
from tests.ops.expectations import Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# -- every type is moved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "bfloat16", "bool", "uint16"])
def test_elements_stored_in_other_ways(dtype: str) -> None:
    x = RNG.integers(0, 2, (2, 3)).astype(dtype)
    check_movement(x)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex(dtype: str) -> None:
    check_movement((floats(2, 3) + 1j * floats(2, 3)).astype(dtype))


def test_strings() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (string[B, 3] x) => (string[3, B] t, string[B, 6] twice, string[B] first, string[1, 3] added) {
            t = Transpose(x)
            twice = Concat<axis=1>(x, x)
            i = Constant<value_int=0>()
            first = Gather<axis=1>(x, i)
            c = Constant<value_strings=["p", "q", "r"]>()
            axis = Constant<value_ints=[0]>()
            added = Unsqueeze(c, axis)
        }""")
    x = np.array([["a", "b", "a"], ["", "d", "e"]], object)
    results = lowering.compile(model).run({"x": x})
    for name, expected in {
        "t": x.T, "twice": np.concatenate([x, x], 1), "first": x[:, 0], "added": np.array([["p", "q", "r"]], object),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(results[name], expected, err_msg=name)


def check_movement(x: np.ndarray) -> None:
    e = Expectations()
    named = [["a", "b"]]
    e.expect("Identity", [x], x, dims=named)
    e.expect("Transpose", [x], x.T, dims=named)
    e.expect("Reshape", [x, ints(3, -1)], x.reshape(3, 2), constant=[1])
    e.expect("Concat", [x, x[:, :1]], np.concatenate([x, x[:, :1]], 1), dims=[["a", "b"], ["a", "c"]], axis=1)
    e.expect("Slice", [x, ints(1), ints(9), ints(1)], x[:, 1:], dims=[*named, None, None, None], constant=[1, 2, 3])
    e.expect("Gather", [x, ints(-1, 0)], x[:, [-1, 0]], dims=[*named, None], axis=1)
    e.expect("Where", [np.array([[True], [False]]), x, x[::-1]], np.stack([x[0], x[0]]))
    e.expect("Expand", [x, ints(2, 1, 1)], np.stack([x, x]), constant=[1])
    e.expect("Tile", [x, ints(1, 2)], np.tile(x, (1, 2)), dims=[*named, None], constant=[1])
    e.check()


# -- indices ----------------------------------------------------------------------------------------------------------


def test_negative_indices_count_from_the_back() -> None:
    e = Expectations()
    x = floats(4, 3)
    rows = np.array([[0, -1], [-4, 3]], np.int32)
    e.expect("Gather", [x, rows], x[rows], dims=[["n", 3], ["r", 2]])
    e.expect("Gather", [x, np.array(-2)], x[:, -2], axis=-1)
    e.expect(
        "GatherElements", [x, rows[:, :1]], np.take_along_axis(x[:, :1], rows[:, :1], 0), dims=[["n", 3], ["r", 1]]
    )
    pairs = np.array([[[0, -1]], [[-1, 0]]])
    e.expect("GatherND", [x, pairs], x[[[0], [-1]], [[-1], [0]]], dims=[["n", 3], ["r", 1, 2]])
    batched = floats(2, 3, 4)
    indices = np.array([[[-1], [0]], [[1], [-3]]])
    expected = np.stack([b[p[:, 0]] for b, p in zip(batched, indices)])
    e.expect("GatherND", [batched, indices], expected, dims=[["b", "n", 4], ["b", 2, 1]], batch_dims=1)
    e.check()


def test_static_indices_out_of_range_are_rejected() -> None:
    e = Expectations()
    e.expect("Gather", [floats(3), ints(3)], floats(1), constant=[1])
    with raises("node.index_out_of_range"):
        e.check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
def test_scatter_applies_repeated_indices_in_order(dtype: str) -> None:
    e = Expectations(opset=18)
    x = RNG.integers(1, 9, (4, 3)).astype(dtype)
    rows = np.array([[1], [-3], [1]])
    updates = RNG.integers(1, 9, (3, 3)).astype(dtype)
    combine = {"none": lambda _, b: b, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for reduction, function in combine.items():
        by_row, by_element = x.copy(), x.copy()
        for k, row in enumerate(rows[:, 0]):
            by_row[row] = function(by_row[row], updates[k])
            by_element[row, 0] = function(by_element[row, 0], updates[k, 0])
        dims = [["n", 3], ["k", 1], ["k", 3]]
        e.expect("ScatterND", [x, rows, updates], by_row, dims=dims, reduction=reduction)
        dims = [["n", 3], ["k", 1], ["k", 1]]
        e.expect("ScatterElements", [x, rows, updates[:, :1]], by_element, dims=dims, reduction=reduction)
    e.check()


def test_one_hot() -> None:
    e = Expectations()
    indices = np.array([0, -1, 5, 2], np.int32)
    expected = np.full((4, 3), -1, np.float32)
    expected[0, 0] = expected[1, 2] = expected[3, 2] = 7
    values = np.array([-1, 7], np.float32)
    e.expect("OneHot", [indices, ints(3), values], expected, dims=[["n"], None, None])
    e.expect("OneHot", [indices.astype(np.float32), np.array(3), values], expected.T, constant=[1], axis=0)
    e.check()


def test_reverse_sequence() -> None:
    e = Expectations()
    x = floats(4, 2, 3)
    expected = x.copy()
    expected[:3, 0] = x[:3, 0][::-1]
    e.expect("ReverseSequence", [x, ints(3, 1)], expected, dims=[["t", "b", 3], ["b"]])
    e.check()


# -- concatenating and splitting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("float32", "float16", "bool", "int8", "complex64", "complex128"))
@pytest.mark.parametrize("axis, lengths", ((0, (3, 1, 40000)), (1, (5, 0)), (-1, (70, 1, 13))), ids=str)
def test_concat_is_copied_by_all_threads(dtype: str, axis: int, lengths: tuple[int, ...]) -> None:
    """Rows are split into tasks, with tensors of any length in them, one of them empty."""
    shapes = [[2, 3, 4] for _ in lengths]
    for shape, size in zip(shapes, lengths):
        shape[axis] = size
    arrays = [(9 * RNG.standard_normal(shape)).astype(dtype) for shape in shapes]
    names = [f"x{k}" for k in range(len(arrays))]
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    sizes = [["a", "b", "c"] for _ in lengths]
    for k, shape in enumerate(sizes):
        shape[axis] = f"n{k}"
    ports = [onnx.helper.make_tensor_value_info(name, kind, s) for name, s in zip(names, sizes)]
    output = onnx.helper.make_tensor_value_info("y", kind, ["d", "e", "f"])
    node = onnx.helper.make_node("Concat", names, ["y"], axis=axis)
    graph = onnx.helper.make_graph([node], "g", ports, [output])
    opset = [onnx.helper.make_opsetid("", 20)]
    compiled = lowering.compile(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10))
    assert [kernel.schedule for kernel in compiled.manifest.kernels] == ["concat"]
    bound = compiled.bind(dict(zip(names, arrays)), threads=2)
    np.testing.assert_array_equal(bound()["y"], np.concatenate(arrays, axis))


def test_concat_of_empty_tensors() -> None:
    e = Expectations()
    x, nothing = floats(2, 3), floats(0, 3)
    e.expect("Concat", [x, nothing], x, dims=[["a", 3], ["b", 3]], axis=0)
    e.expect("Concat", [nothing, x], x, constant=[0], axis=0)
    e.expect("Concat", [nothing, nothing], nothing, axis=-2)
    e.check()


def test_concat_asserts_the_other_dimensions() -> None:
    e = Expectations()
    e.expect("Concat", [floats(2, 3), floats(3, 3)], floats(5, 3), dims=[["a", 3], ["b", 3]], axis=1)
    with raises("run.size_mismatch"):
        e.check()
    with raises("node.shape_mismatch"):
        import_node("Concat", [("float32", [2, 3]), ("float32", [3, 3])], axis=1)


def test_split_through_the_versions() -> None:
    x = floats(7, 2)
    e = Expectations(opset=11)
    e.expect("Split", [x], x[:3], x[3:], split=[3, 4])
    e.expect("Split", [x], x[:, :1], x[:, 1:], axis=1)
    e.check()
    e = Expectations(opset=18)
    e.expect("Split", [x, ints(3, 0, 4)], x[:3], x[3:3], x[3:], dims=[["n", 2], None])
    e.expect("Split", [x], x[:3], x[3:6], x[6:], num_outputs=3)
    e.expect("Split", [x], x[:3], x[3:6], x[6:], dims=[["n", 2]], num_outputs=3)
    e.check()


def test_split_lengths_must_add_up() -> None:
    with raises("split.lengths_mismatch"):
        import_node("Split", [("float32", [7, 2])], results=2, opset=11, split=[3, 5])
    e = Expectations()
    e.expect("Split", [floats(7), ints(3, 5)], floats(3), floats(5))
    with raises("node.shape_mismatch"):
        e.check()


def test_old_slice_and_scatter() -> None:
    x = floats(4, 3)
    e = Expectations(opset=9)
    e.expect("Slice", [x], x[1:, -2:], dims=[["n", 3]], starts=[1, -2], ends=[100, 3])
    e.expect("Slice", [x], x[:, :2], axes=[-1], starts=[0], ends=[2])
    expected = x.copy()
    expected[2, 1] = 5
    e.expect("Scatter", [x, np.array([[1]]), np.array([[5]], np.float32)], np.where(x == x[1, 0], 5, x), axis=0)
    e.check()


def test_slice_at_run_time() -> None:
    e = Expectations()
    x = floats(6, 4)
    named = ["n", "m"]
    e.expect(
        "Slice", [x, ints(4, -1), ints(0, -100), ints(0, -1), ints(-2, -1)], x[4:0:-2, ::-1], dims=[named] + [None] * 4
    )
    e.expect("Slice", [x, ints(1), ints(100), ints(1)], x[:, 1:], dims=[named] + [None] * 3)
    e.expect("Slice", [x, ints(5), ints(2)], x[5:2], dims=[named, None, None])
    e.check()


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("at", ["import", "run"])
def test_pad(mode: str, at: str) -> None:
    e = Expectations()
    x = floats(3, 4)
    constant = [1] if at == "import" else []
    expected = np.pad(x, ((5, 1), (0, 7)), mode=mode)
    e.expect("Pad", [x, ints(5, 0, 1, 7)], expected, dims=[["n", "m"], None], constant=constant, mode=mode)
    cropped = np.pad(x[1:, :-2], ((0, 2), (1, 0)), mode=mode) if mode == "constant" else x[1:, :-2]
    amounts = ints(-1, 1, 2, -2) if mode == "constant" else ints(-1, 0, 0, -2)
    e.expect("Pad", [x, amounts], cropped, constant=constant, mode=mode)
    e.check()


def test_pad_value_and_axes() -> None:
    e = Expectations()
    x = RNG.integers(0, 9, (2, 3))
    expected = np.pad(x, ((0, 0), (1, 2)), constant_values=-7)
    for constant in ([1, 2, 3], [1, 3], []):
        e.expect("Pad", [x, ints(1, 2), np.array(-7), ints(-1)], expected, constant=constant)
    e.check()
    old = Expectations(opset=2)
    y = floats(2, 3)
    old.expect("Pad", [y], np.pad(y, ((0, 1), (2, 0)), constant_values=1.5), pads=[0, 2, 1, 0], value=1.5)
    old.check()


# -- others -----------------------------------------------------------------------------------------------------------


def test_trilu_with_diagonal_at_run_time() -> None:
    e = Expectations()
    x = floats(2, 3, 4)
    for k in (-2, 0, 1, 9):
        e.expect("Trilu", [x, np.array(k)], np.triu(x, k), dims=[["b", "n", "m"], None])
        e.expect("Trilu", [x, np.array(k)], np.tril(x, k), upper=0)
    e.check()


def test_blocks_between_depth_and_space() -> None:
    e = Expectations(opset=28)
    x = floats(1, 8, 2, 3)
    dcr = x.reshape(1, 2, 2, 2, 2, 3).transpose(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 6)
    crd = x.reshape(1, 2, 2, 2, 2, 3).transpose(0, 1, 4, 2, 5, 3).reshape(1, 2, 4, 6)
    e.expect("DepthToSpace", [x], dcr, dims=[["b", 8, "h", "w"]], blocksize=2)
    e.expect("DepthToSpace", [x], crd, dims=[["b", 8, "h", "w"]], blocksize=2, mode="CRD")
    e.expect("SpaceToDepth", [dcr], x, blocksize=2)
    e.expect("SpaceToDepth", [crd], x, blocksize=2, mode="CRD")
    e.check()


def test_static_empty_tensors() -> None:
    e = Expectations()
    x = floats(0, 3)
    e.expect("Transpose", [x], x.T)
    e.expect("Tile", [x, ints(2, 2)], floats(0, 6), constant=[1])
    e.expect("Gather", [floats(3, 2), ints()], floats(0, 2))
    e.expect("Reshape", [x, ints(0, 5)], floats(0, 5), constant=[1], allowzero=1)
    e.expect("Slice", [floats(3), ints(2), ints(2)], floats(0), constant=[1, 2])
    e.check()
