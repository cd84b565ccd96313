"""Matmuls: every rank and type, sizes that must agree, Einsum by equation, and their form in Relax."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.ops.expectations import Dims, Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
SHAPES: list[tuple[Dims, Dims, Dims, Dims]] = [
    ((4,), (4,), ("k",), ("k",)),
    ((4,), (4, 3), ("k",), (4, "n")),
    ((3, 4), (4,), ("m", "k"), ("k",)),
    ((2, 3, 4), (4, 5), ("b", "m", 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5), ("b", "m", "k"), ("b", "k", "n")),
    ((2, 1, 3, 4), (5, 4, 6), ("b", 1, "m", "k"), ("c", "k", "n")),
    ((4,), (2, 4, 5), (4,), ("b", "k", "n")),
    ((2, 3, 4), (4,), ("b", "m", "k"), ("j",)),
    ((1, 3, 4), (2, 4, 5), (1, 3, "k"), ("b", "j", "n")),
]


def random(shape: Dims, dtype: str) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype) if "float" in dtype else RNG.integers(0, 9, shape).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype("float64")


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64", "int32", "uint64"))
def test_matmul(dtype: str) -> None:
    case = Expectations()
    for a_shape, b_shape, a_dims, b_dims in SHAPES if dtype == "float32" else SHAPES[5:6]:
        a, b = random(a_shape, dtype), random(b_shape, dtype)
        case.expect("MatMul", [a, b], np.asarray(np.matmul(wide(a), wide(b))).astype(dtype), dims=[a_dims, b_dims])
    case.check()


def test_half_precision_accumulates_in_float32() -> None:
    """In float16 an accumulator of ones stops growing at 2048."""
    ones = np.ones((1, 4096), "float16")
    case = Expectations()
    case.expect("MatMul", [ones, ones.T], np.array([[4096]], "float16"))
    case.check()


@pytest.mark.parametrize("dtype", ("float16", "int64"))
def test_gemm(dtype: str) -> None:
    case = Expectations()
    for trans_a, trans_b, c_shape in ((0, 0, (5,)), (1, 0, (3, 1)), (0, 1, ()), (1, 1, (3, 5))):
        a, b = random((4, 3) if trans_a else (3, 4), dtype), random((5, 4) if trans_b else (4, 5), dtype)
        c = random(c_shape, dtype)
        matmul = wide(a.T if trans_a else a) @ wide(b.T if trans_b else b)
        dims = [("p", "q"), ("r", "s"), None]
        y = (2 * matmul + 3 * wide(c)).astype(dtype)
        case.expect("Gemm", [a, b, c], y, dims=dims, transA=trans_a, transB=trans_b, alpha=2.0, beta=3.0)
        case.expect("Gemm", [a, b], matmul.astype(dtype), dims=dims[:2], transA=trans_a, transB=trans_b)
    case.check()


def test_weights_are_the_right_operand_of_a_relax_matmul() -> None:
    """The weight packing pass searches this form."""
    weight = RNG.standard_normal((64, 8)).astype("float32")
    for operator, tensor, attributes in (("MatMul", weight.T, ""), ("Gemm", weight, "<transB=1>")):
        proto = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 8] x) => (float[N, 64] y) '
            f"{{ y = {operator}{attributes}(x, w) }}"
        )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(tensor), "w"))
        script = import_model(load_model(proto), lookup).module["main"].script(show_meta=False)
        assert "R.matmul(" in script and ("R.permute_dims(weight_0" in script) == (operator == "Gemm")


def test_sizes_that_do_not_agree() -> None:
    f = "float32"
    for a, b, message in (
        ((3, 4), (5, 6), "the inner dimension differs between the inputs: 4 and 5"),
        ((2, 3, 4), (3, 4, 5), "a batch dimension differs between the inputs: 2 and 3"),
        ((), (3,), "scalar"),
    ):
        with pytest.raises(lowering.NodeError, match=message):
            import_node("MatMul", [(f, a), (f, b)])
    with raises("gemm.rank_unsupported"):
        import_node("Gemm", [(f, (2, 3, 4)), (f, (4, 5))])
    with raises("gemm.factor_not_integer"):
        import_node("Gemm", [("int32", (3, 4)), ("int32", (4, 5))], alpha=0.5)


EQUATIONS: list[tuple[str, list[Dims], list[Dims]]] = [
    ("bqhd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 4, 5)], [("b", "q", 4, 5), ("b", "k", 4, 5)]),
    ("btd,dhk->bthk", [(2, 3, 6), (6, 2, 4)], [("b", "t", 6), (6, 2, 4)]),
    ("bthk,hkd->btd", [(2, 3, 2, 4), (2, 4, 6)], [("b", "t", 2, 4), (2, 4, 6)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 6)], [("b", 1, "i", "j"), ("c", "j", "k")]),
    ("ii->i", [(4, 4)], [("n", "n")]),
    ("ij->", [(3, 4)], [("n", "m")]),
    ("ij->ji", [(3, 4)], [("n", "m")]),
    ("i,j", [(3,), (4,)], [("i",), ("j",)]),
    ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)], [("a", "b"), ("b", "c"), ("c", "d")]),
    ("bhst,bthd,hde->bse", [(2, 3, 4, 5), (2, 5, 3, 2), (3, 2, 7)], ["bhst", "bthd", "hde"]),
    ("bi,ij,bj->b", [(3, 4), (4, 5), (3, 5)], ["bi", "ij", "bj"]),
    ("ab,bc,bd->a", [(2, 3), (3, 4), (3, 5)], ["ab", "bc", "bd"]),
    ("Zij,Zjk", [(2, 3, 4), (2, 4, 5)], [("x", "y", "z"), ("x", "w", "v")]),
    ("i...->...", [(3, 2, 2)], [("a", "b", "c")]),
]


def test_einsum() -> None:
    case = Expectations()
    for equation, shapes, dims in EQUATIONS:
        arrays = [random(shape, "float32") for shape in shapes]
        expected = np.asarray(np.einsum(equation, *map(wide, arrays))).astype("float32")
        case.expect("Einsum", arrays, expected, dims=dims, equation=equation)
    integers = random((3, 4), "int32")
    case.expect("Einsum", [integers, integers], np.einsum("ij,kj->ik", integers, integers), equation="ij,kj->ik")
    case.check()


def test_matmuls_inside_of_an_equation() -> None:
    """Two of three operands are multiplied first: a kernel never reduces over all labels at once."""
    shapes = [("float32", [*labels]) for labels in ("bhst", "bthd", "hde")]
    text = str(import_node("Einsum", shapes, opset=20, equation="bhst,bthd,hde->bhse").module["main"])
    assert text.count("R.matmul") == 2 and "einsum" not in text


@pytest.mark.parametrize(
    "equation, message",
    [("ij,jk->ik", "2 terms"), ("ijk->i", "rank 2"), ("ij->ik", "result label"), ("i1->i", "rank 2")],
)
def test_equations_that_are_refused(equation: str, message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node("Einsum", [("float32", (3, 4))], equation=equation)


def test_labels_of_two_sizes() -> None:
    with raises("node.size_mismatch"):
        import_node("Einsum", [("float32", (3, 4)), ("float32", (5, 6))], equation="ij,jk->ik")
