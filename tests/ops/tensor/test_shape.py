"""Operators on shapes, in the versions whose inputs or attributes differ, and with sizes of the run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.expectations import Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_older_versions_take_attributes() -> None:
    e = Expectations(opset=11)
    x = floats(2, 1, 3, 1)
    e.expect("Squeeze", [x], x[:, 0], dims=[["b", 1, 3, 1]], axes=[1])
    e.expect("Squeeze", [x], x[:, 0, :, 0])
    e.expect("Unsqueeze", [x], x[None, :, None], axes=[0, 2])
    e.expect("Reshape", [x, ints(3, 0, -1)], x.reshape(3, 1, 2), constant=[1])
    e.check()


def test_axes_at_run_time() -> None:
    e = Expectations()
    x = floats(2, 1, 3, 1)
    e.expect("Squeeze", [x, ints(-1, 1)], x[:, 0, :, 0], dims=[["b", 1, "s", 1], None])
    e.expect("Unsqueeze", [x, ints(-1, 0)], x[None, ..., None], dims=[["b", 1, "s", 1], None])
    e.check()


def test_reshape_at_run_time() -> None:
    e = Expectations()
    x = floats(2, 3, 4)
    for target in ((6, 4), (-1, 4), (0, -1), (24,), (0, 0, 0), (1, -1, 1)):
        e.expect("Reshape", [x, ints(*target)], x.reshape([d or x.shape[k] for k, d in enumerate(target)]))
    e.expect("Reshape", [floats(0, 3), ints(3, 0)], np.zeros((3, 0), np.float32), allowzero=1)
    e.check()


def test_reshape_to_another_number_of_elements_is_an_error() -> None:
    e = Expectations()
    e.expect("Reshape", [floats(2, 3), ints(4, 2)], floats(4, 2))
    with raises("node.element_count_mismatch"):
        e.check()
    with raises("node.element_count_mismatch"):
        e = Expectations()
        e.expect("Reshape", [floats(2, 3), ints(4, 2)], floats(4, 2), constant=[1])
        e.check()


def test_flatten() -> None:
    e = Expectations()
    x = floats(2, 3, 4)
    for axis, shape in ((0, (1, 24)), (1, (2, 12)), (-1, (6, 4)), (3, (24, 1))):
        e.expect("Flatten", [x], x.reshape(shape), dims=[["a", "b", "c"]], axis=axis)
    e.check()


def test_shape_and_size() -> None:
    e = Expectations()
    x = floats(2, 3, 4)
    for start, end in ((0, 3), (1, 2), (-2, 100), (-100, -1), (2, 1)):
        e.expect("Shape", [x], ints(*x.shape[start:end]), dims=[["a", 3, "c"]], start=start, end=end)
    e.expect("Size", [x], np.array(24), dims=[["a", 3, "c"]])
    e.check()


def test_constant_of_shape() -> None:
    e = Expectations()
    import onnx

    three = onnx.numpy_helper.from_array(np.array([3], np.int32))
    e.expect("ConstantOfShape", [ints(2, 3)], np.zeros((2, 3), np.float32))
    e.expect("ConstantOfShape", [ints(2, 0)], np.zeros((2, 0), np.int32), value=three)
    e.expect("ConstantOfShape", [ints(2, 3)], np.full((2, 3), 3, np.int32), value=three, constant=[0])
    e.expect("ConstantOfShape", [ints()], np.array(3, np.int32), value=three)
    e.check()


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "float16", "float32", "float64"])
def test_range_at_run_time(dtype: str) -> None:
    e = Expectations(opset=27)
    for start, limit, delta in ((0, 5, 1), (10, 1, -3), (2, 9, 3), (3, 3, 1), (5, 1, 1)):
        scalars = [np.array(v, dtype) for v in (start, limit, delta)]
        e.expect("Range", scalars, np.arange(start, limit, delta).astype(dtype))
    e.check()


def test_eye_like() -> None:
    e = Expectations()
    e.expect("EyeLike", [floats(3, 4)], np.eye(3, 4, 1, dtype=np.float32), dims=[["a", "b"]], k=1)
    e.expect("EyeLike", [floats(3, 2)], np.eye(3, 2, -1, dtype=np.int32), k=-1, dtype=6)
    e.check()


def test_values_without_a_rank_are_rejected() -> None:
    with raises("squeeze.axes_ambiguous"):
        import_node("Squeeze", [("float32", ["n", 1])])
    with raises("node.static_length_required"):
        import_node("Reshape", [("float32", [4]), ("int64", ["n"])])
    with raises("squeeze.size_not_one"):
        import_node("Squeeze", [("float32", [1, 3])], opset=11, axes=[1])
