"""Matmuls of float32 on tensor cores, emulated: as TF32, and in two terms as accurate as float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from tvm.tirx import reinterpret

import lowering
from lowering.tuning_records.database import hash_task
from lowering.tuning_records.task import create_tiles_task
from schedules.cuda.matmul import tensor_types
from schedules.cuda.matmul.matmul_tiles import MatmulTiles
from schedules.cuda.primitives import ptx
from schedules.cuda.primitives.ptx import store_element
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.audits.machine_code import machine_code
from tests.cuda.audits.test_accesses_of_kernels import SIZE, is_good, measured
from tests.cuda.matmul.test_matmul_on_gpus import SMALL, Case, check, first_variant, make_module
from tests.cuda.models import exported
from tests.cuda_emulation.mutations import survivors
from tests.support.error_codes import raises

SAMPLES = Path(__file__).parents[2] / "exports" / "samples"


def float32(matmuls: str, **fields: Any) -> Case:
    return Case(dtype="float32", matmuls=matmuls, **fields)


CASES = {
    "columns of B": ("sm_80", float32("3xtf32")),
    "A transposed": ("sm_90a", float32("tf32", m=40, a_transposed=True, epilogue="none", sizes=({},))),
    "rows of B": ("sm_80", float32("3xtf32", b_transposed=True, epilogue="residual")),
    "both transposed": ("sm_90a", float32("3xtf32", m=40, a_transposed=True, b_transposed=True, sizes=({},))),
    "gate": ("sm_80", float32("3xtf32", n=48, epilogue="gate", tiles=dataclasses.replace(SMALL, n=64))),
    "k in parts": ("sm_90a", float32("tf32", k=260, epilogue="residual", b_transposed=True)),
    "nothing is a multiple": ("sm_80", float32("3xtf32", n=37, k=19)),
    "columns are none": ("sm_90a", float32("tf32", n=37, k=24, b_transposed=True)),
    "symbolic depth": ("sm_80", float32("3xtf32", k="k", batch=2, sizes=({"m": 33, "k": 48}, {"m": 7, "k": 21}))),
    "batches": ("sm_90a", float32("3xtf32", batch="b", b_transposed=True, sizes=({"b": 3, "m": 40}, {"b": 0, "m": 4}))),
    "default tiles": ("sm_80", float32("tf32", m=130, n=136, k=80, tiles=None, sizes=({},))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    """TF32 has an error up to 2^-11 of each operand, and two terms have that of float32 accumulators."""
    arch, case = CASES[name]
    check(case, make_module(case, arch), TURNS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_order_of_threads_and_copies(name: str) -> None:
    arch, case = CASES[name]
    check(case, make_module(case, arch), TURNS[1:])


FEW = {
    "one row": float32("3xtf32", k=520, b_transposed=True, sizes=({"m": 1}, {"m": 0})),
    "gate": float32("3xtf32", k=100, n=40, b_transposed=True, epilogue="gate", sizes=({"m": 8},)),
    "ragged columns": float32("tf32", n=37, b_transposed=True, epilogue="residual", sizes=({"m": 13},)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FEW)
def test_small_m(name: str) -> None:
    case = FEW[name]
    check(case, make_module(case, rows=8 if case.epilogue == "gate" else 16), TURNS[:1])


def test_infinity_is_what_it_is_in_float32() -> None:
    """Also where it meets another infinity, NaN and 0, without a second term. Rows without it stay the same."""
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-4, 5, shape).astype("float32") for shape in ((16, 24), (24, 32)))
    a += (a == 0).astype("float32")
    a[1, 3], a[2, 5], a[3, 7], a[4, 0], a[5, 1] = np.inf, -np.inf, np.nan, np.inf, np.pi
    b[2, 9], b[0, 11], b[0, 12], b[23, 1] = np.inf, -np.inf, 0, 1e30
    with np.errstate(invalid="ignore"):
        want = a @ b
    assert np.isposinf(want).any() and np.isneginf(want).any() and np.isnan(want).any()
    case = float32("3xtf32", m=16, n=32, k=24, epilogue="none", sizes=({},))
    got = make_module(case).call("main", [a, b, np.full((16, 32), np.nan, "float32")])[-1]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.no_gpu
def test_without_a_part_the_error_is_that_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Therefore, the other tests would notice that one of the terms is missing."""
    case = float32("3xtf32", m=16, n=32, k=24, epilogue="none", sizes=({},))
    for left_out in range(3):
        kind = tensor_types.TENSOR_TYPES["3xtf32"]
        terms = tuple(term for n, term in enumerate(kind.terms) if n != left_out)
        with monkeypatch.context() as patch:
            patch.setitem(tensor_types.TENSOR_TYPES, "3xtf32", dataclasses.replace(kind, terms=terms))
            with pytest.raises(AssertionError):
                check(case, make_module(case), TURNS[:1])


@pytest.mark.no_gpu
def test_what_is_not_rounded_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator takes only TF32, as PTX specifies: all operands are rounded."""
    case = float32("tf32", m=16, n=32, k=24, epilogue="none", sizes=({},))
    monkeypatch.setattr(
        ptx, "round_to_tf32", lambda to, x: store_element(to.source, to.indices[0], reinterpret("uint32", x))
    )
    with pytest.raises(emulated.EmulationError, match="not rounded to TF32"):
        check(case, make_module(case), TURNS[:1])


@pytest.mark.no_gpu
@pytest.mark.slow
def test_nothing_can_be_left_out() -> None:
    """The only exception is the wait of a warp after its last rows."""
    case = float32("3xtf32", m=50, n=40, k=100)
    arrays, want = case.arrays({})
    tiles = MatmulTiles(32, 32, 16, 2, 1, 3, split_steps=100)
    module = emulated.module({"main": first_variant(case).make(tiles=tiles)}, arch="sm_80")

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=1e-5, atol=1e-4)

    assert [step.name for step in survivors(module, "main", arrays, right)] == ["cuda_warp_sync"]


ACCESSED = {
    "A across k, [K, N]": float32("tf32", **SIZE, a_transposed=True),
    "[N, K]": float32("3xtf32", **SIZE, b_transposed=True),
    "small M": float32("tf32", **SIZE | {"m": 8, "k": 512}, b_transposed=True),
}


@pytest.mark.sampled(3)
@pytest.mark.no_gpu
@pytest.mark.parametrize("name", ACCESSED)
def test_no_bank_is_met_twice(name: str) -> None:
    """Chunks in the order of copies, and elements that are read one by one, at swizzled addresses."""
    case = ACCESSED[name]
    accesses = measured((emulated.module({"main": first_variant(case).make()}), case.arrays({})[0]))
    is_good(accesses, few=2)  # eight elements of 4 bytes are two chunks
    one_by_one = [access for access in accesses if access.bytes == 4 and "^" in access.source]
    assert bool(one_by_one) == case.a_transposed
    assert all(access.taken == access.least for access in one_by_one)


AUDITED = {
    "sm_80": float32("3xtf32", n=768, k=768, tiles=None, b_transposed=True, epilogue="gate"),
    "sm_90a": float32("tf32", n=768, k=768, tiles=None),
    "sm_100": float32("3xtf32", m=512, n=768, k=768, tiles=None, a_transposed=True),
    "sm_120": float32("3xtf32", n=768, k=768, tiles=None, b_transposed=True),
}


@pytest.mark.sampled(4)
@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", AUDITED)
def test_machine_code(arch: str) -> None:
    """Tensor cores, no register in memory, and no complaint of ptxas."""
    case = AUDITED[arch]
    variant = first_variant(case, arch)
    code = machine_code(variant.make(), arch)
    assert (code.spills, code.stack, code.said) == (0, 0, "")
    tiles, kind = variant.tiles["tiles"], variant.problem.type
    # 16 x 8 x 8 each, of a warp and a step along k
    assert code.loop["HMMA"] == len(kind.terms) * tiles.m * tiles.n * tiles.k // (tiles.threads // 32) // 1024
    assert code.loop["LDGSTS"] == (tiles.m + tiles.n) * tiles.k // kind.chunk // tiles.threads


MODELS = [
    ("distilbert-traced17", "sm_90a", "3xtf32"),
    ("gemma2-past-dynamo23", "sm_80", "3xtf32"),
    ("modernbert-dynamo23", "sm_120", "tf32"),
    ("t5-dynamo18", "sm_100", "tf32"),
]
BARS = {"tf32": 3e-3, "3xtf32": 2e-6}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "arch", "precision"), MODELS)
def test_sample(name: str, arch: str, precision: str) -> None:
    kernels, worst = emulated.run(exported.measured, SAMPLES / name, arch, precision, arch=arch, timeout=500)
    assert worst < BARS[precision]
    assert kernels["matmuls by matmul"] == kernels["matmuls"] > 0


CONVOLUTIONS = """
<ir_version: 10, opset_import: ["" : 23]>
model (float[n, 6, 9, h] x, float[12, 6, 3, 3] w, float[12] b, float[8, 12, 1, 1] w2, float[12, 4, 3, 3] wt)
  => (float[n, 8, p, q] y, float[n, 4, s, t] z)
{
  c = Conv <pads=[1, 0, 1, 2], strides=[2, 1]> (x, w, b)
  r = Relu (c)
  y = Conv (r, w2)
  z = ConvTranspose <strides=[2, 2]> (r, wt)
}
"""


def convolved(precision: str | None, target: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """Return the outputs, those on the CPU, and the notes of the manifest."""
    rng = np.random.default_rng(2)
    model = onnx.parser.parse_model(CONVOLUTIONS)
    for value in [i for i in model.graph.input if i.name != "x"]:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = rng.standard_normal(shape).astype("float32")
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
        model.graph.input.remove(value)
    feeds = {"x": rng.standard_normal((2, 6, 9, 11)).astype("float32")}
    there = lowering.compile(model, target, precision=precision)
    return there.run(feeds), lowering.compile(model).run(feeds), " ".join(there.manifest.notes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["3xtf32", "tf32"])
def test_convolutions(precision: str) -> None:
    got, want, notes = emulated.run(convolved, precision, "cuda:sm_80", arch="sm_80", timeout=300)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=BARS[precision] * np.ptp(array), err_msg=name)
    assert "precision: 3 kernels of matmuls compute in TF32" in notes and "0 others" in notes


@pytest.mark.no_gpu
def test_records_of_one_way_are_none_of_another() -> None:
    """Records that were tuned for TF32 serve only TF32."""
    shapes, target = [(16, 72), (72, 96), (96,), (16, 96)], tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, "llvm")
    names = set()
    for matmuls in ("tf32", "3xtf32"):
        task = create_tiles_task(float32(matmuls).function(), shapes, target)
        assert task is not None
        names.add(hash_task(task))
    plain = dataclasses.replace(float32("tf32"), matmuls="")
    assert len(names) == 2 and create_tiles_task(plain.function(), shapes, target) is None


@pytest.mark.no_gpu
def test_a_cpu_refuses() -> None:
    with raises("precision.target_unsupported"):
        lowering.compile(SAMPLES / "distilbert-traced17" / "model.onnx", precision="tf32")
