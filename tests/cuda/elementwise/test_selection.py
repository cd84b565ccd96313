"""ArgMax, ArgMin, TopK and CumSum on the emulated GPU, against NumPy, whole artifacts in one model."""

from __future__ import annotations

import numpy as np
import onnx

import lowering
from tests import cuda_emulation as emulated

MODEL = """
<ir_version: 10, opset_import: ["" : 23]>
model (float[a, n] x, float16[b, m, 3] y, int64[1] k, int64[b, m] z, float[a, 0] nothing,
       float16[c, 100] w, int8[c, 40, 3] v) =>
  (int64[a] first, int64[a, 1] last, int64[b, 1, 3] smallest, float[a, k] top, int64[a, k] indices,
   float16[b, 4, 3] low, int64[b, 4, 3] low_indices, int64[b, m] totals, float16[b, m, 3] suffix, float[a, 0] none,
   float16[c, 5] few, int64[c, 5] few_indices, int8[c, 6, 3] least, int64[c, 6, 3] least_indices)
{
  first = ArgMax <axis=1, keepdims=0> (x)
  last = ArgMax <axis=1, select_last_index=1> (x)
  smallest = ArgMin <axis=1> (y)
  top, indices = TopK (x, k)
  four = Constant <value_ints=[4]> ()
  low, low_indices = TopK <axis=1, largest=0> (y, four)
  axis = Constant <value_int=1> ()
  totals = CumSum (z, axis)
  suffix = CumSum <exclusive=1, reverse=1> (y, axis)
  none = CumSum (nothing, axis)
  five = Constant <value_ints=[5]> ()
  few, few_indices = TopK (w, five)
  six = Constant <value_ints=[6]> ()
  least, least_indices = TopK <axis=1, largest=0> (v, six)
}
"""


def run(feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], set[str]]:
    """Return the outputs, and the functions without a rule of onnx-lowering."""
    model = lowering.compile(onnx.parser.parse_model(MODEL), "cuda:sm_80")
    other_kernels = {k.name for k in model.manifest.kernels if k.schedule in ("ordinary", "plain")}
    return model.run(feeds), other_kernels


def test_against_numpy() -> None:
    """Equal elements everywhere, NaN in a row; rows longer than the limit of a block's sort, and of one element."""
    rng = np.random.default_rng(0)
    for a, n, b, m, k in ((2, 2500, 2, 70, 2500), (3, 1, 1, 4, 1), (1, 40, 0, 5, 0)):
        x = rng.integers(-200, 200, (a, n)).astype("float32")
        if n > 1000:
            x[1, [7, 1900]] = np.nan
        y, z = rng.integers(-9, 9, (b, m, 3)).astype("float16"), rng.integers(-(2**40), 2**40, (b, m))
        w, v = rng.integers(-9, 9, (a, 100)).astype("float16"), rng.integers(-99, 99, (a, 40, 3)).astype("int8")
        w[0, [99, 3]] = np.nan
        feeds = {"x": x, "y": y, "k": np.array([k]), "z": z, "nothing": np.zeros((a, 0), "float32"), "w": w, "v": v}
        got, other_kernels = emulated.run(run, feeds, arch="sm_80")
        assert all(name.startswith("zeros") for name in other_kernels), other_kernels
        order = np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=1, kind="stable")[:, :k]
        few = np.argsort(np.where(np.isnan(w), -np.inf, -w), axis=1, kind="stable")[:, :5]
        least = np.argsort(v, axis=1, kind="stable")[:, :6]
        lowest = np.argsort(y, axis=1, kind="stable")[:, :4]
        expected = {
            "first": np.argmax(x, 1),
            "last": n - 1 - np.argmax(x[:, ::-1], 1, keepdims=True),
            "smallest": np.argmin(y, 1, keepdims=True),
            "top": np.take_along_axis(x, order, 1),
            "indices": order,
            "low": np.take_along_axis(y, lowest, 1),
            "low_indices": lowest,
            "totals": np.cumsum(z, 1),
            "suffix": np.cumsum(y[:, ::-1].astype("float64"), 1)[:, ::-1] - y,
            "none": np.zeros((a, 0)),
            "few": np.take_along_axis(w, few, 1),
            "few_indices": few,
            "least": np.take_along_axis(v, least, 1),
            "least_indices": least,
        }
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{name} at {a, n, b, m, k}")


FEW = """
<ir_version: 10, opset_import: ["" : 23]>
model (double[a, 1024] x, uint8[a, 20] y, int64[a, 33] z) =>
  (double[a, 32] first, int64[a, 32] first_indices, uint8[a, 3] second, int64[a, 3] second_indices,
   int64[a, 4] third, int64[a, 4] third_indices)
  <int64[1] k0 = {32}, int64[1] k1 = {3}, int64[1] k2 = {4}>
{
  first, first_indices = TopK (x, k0)
  second, second_indices = TopK (y, k1)
  third, third_indices = TopK <largest=0> (z, k2)
}
"""


def few(feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], set[str]]:
    model = lowering.compile(onnx.parser.parse_model(FEW), "cuda:sm_80")
    return model.run(feeds), {kernel.schedule for kernel in model.manifest.kernels}


def test_few_of_short_rows() -> None:
    """As many as a lane can store, and fewer than there are lanes; elements of 1 and 8 bytes; no rows."""
    rng = np.random.default_rng(1)
    for rows in (3, 0):
        feeds = {
            "x": rng.integers(-99, 99, (rows, 1024)).astype("float64"),
            "y": rng.integers(0, 255, (rows, 20)).astype("uint8"),
            "z": rng.integers(-(2**62), 2**62, (rows, 33)),
        }
        got, schedules = emulated.run(few, feeds, arch="sm_80")
        assert schedules == {"top_few"}
        for name, source, sign, k in (("first", "x", -1, 32), ("second", "y", -1, 3), ("third", "z", 1, 4)):
            order = feeds[source] if sign > 0 else -feeds[source].astype("float64")
            indices = np.argsort(order, axis=1, kind="stable")[:, :k]
            np.testing.assert_array_equal(got[f"{name}_indices"], indices)
            np.testing.assert_array_equal(got[name], np.take_along_axis(feeds[source], indices, 1))
