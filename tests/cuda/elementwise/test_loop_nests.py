"""Loop nests of any form by threads: which loops become threads, and where arrays lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.independent_loops import independent_loops
from schedules.cuda.elementwise.loop_nests import LOCAL_BYTES, lower_to_threads
from tests import cuda_emulation as emulated

LARGE = LOCAL_BYTES // 4 + 1
"""Elements of float32 that do not fit the local memory of a thread."""


def function(body: Callable[..., None], *buffers: tuple[str, list[int | str]]) -> tirx.PrimFunc:
    """Return a function of one block with parameters of these types and shapes, where a string is a symbol."""
    symbols: dict[str, tirx.Var] = {}

    def size(extent: int | str) -> tirx.Expr:
        if isinstance(extent, int):
            return T.int64(extent)
        return symbols.setdefault(extent, tirx.Var(extent, "int64"))

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True})
        params = [T.arg(f"p{k}", T.Buffer([size(d) for d in s], t)) for k, (t, s) in enumerate(buffers)]
        with T.sblock("body"):
            T.reads([])
            T.writes([])
            body(*params)
    return builder.get()


def launches(func: tirx.PrimFunc) -> list[int]:
    """Return the threads of the blocks of each launch."""
    sizes: list[int] = []

    def visit(attribute: tirx.AttrStmt) -> None:
        if attribute.attr_key == "thread_extent" and attribute.node.thread_tag == "threadIdx.x":
            sizes.append(int(attribute.value))

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, visit))
    return sizes


def reversed_rows(extent: int) -> Callable[..., None]:
    """Return a body that reverses each row of x [rows, n] by way of an array of so many elements."""

    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        with independent_loops(x.shape[0]) as (row,):
            array = T.alloc_buffer((extent,), "float32")
            with T.serial(x.shape[1]) as k:
                T.buffer_store(array, x[row, k], [k])
            with T.serial(x.shape[1]) as k:
                T.buffer_store(y, array[x.shape[1] - 1 - k], [row, k])

    return body


@pytest.mark.parametrize("extent", [8, LARGE])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_each_thread_has_its_own_array(extent: int, rows: int) -> None:
    """It is in local memory, or in a workspace."""
    func = lower_to_threads(function(reversed_rows(extent), ("float32", ["rows", 5]), ("float32", ["rows", 5])))
    assert launches(func) == [64]
    x = np.random.default_rng(rows).standard_normal((rows, 5)).astype("float32")
    *_, y = emulated.call(func, [x, np.full_like(x, np.nan)])
    np.testing.assert_array_equal(y, x[:, ::-1])


@pytest.mark.parametrize("extent", [0, LARGE])
def test_arrays_of_no_elements(extent: int) -> None:
    """A thread allocates them all the same, and so does the host."""

    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        with independent_loops(x.shape[0]) as (row,):
            array = T.alloc_buffer((x.shape[1], T.int64(extent)), "float32")
            T.buffer_store(y, tirx.const(1, "float32"), [row])
            with T.serial(x.shape[1]) as j, T.serial(T.int64(extent)) as k:
                T.buffer_store(array, x[row, j], [j, k])
                T.buffer_store(y, array[j, k], [row])

    columns = 0 if extent else 3
    func = lower_to_threads(function(body, ("float32", [4, columns]), ("float32", [4])))
    *_, y = emulated.call(func, [np.zeros((4, columns), "float32"), np.full(4, np.nan, "float32")])
    np.testing.assert_array_equal(y, 1)


def test_loops_inside_each_other_are_threads_of_one_launch() -> None:
    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        with independent_loops(*x.shape) as (i, j, k):
            T.buffer_store(y, x[i, j, k] + tirx.const(1, "int32"), [k, i, j])

    func = lower_to_threads(function(body, ("int32", ["a", 3, "b"]), ("int32", ["b", "a", 3])))
    assert launches(func) == [64]
    x = np.arange(4 * 3 * 11, dtype="int32").reshape(4, 3, 11)
    *_, y = emulated.call(func, [x, np.zeros((11, 4, 3), "int32")])
    np.testing.assert_array_equal(y, x.transpose(2, 0, 1) + 1)


def test_launches_follow_each_other() -> None:
    """Independent loops and the code between them share an array: a running total of doubled elements, negated."""

    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        n = x.shape[0]
        array = T.sblock_alloc_buffer((n,), "int64")
        with independent_loops(n) as (i,):
            T.buffer_store(array, x[i] * 2, [i])
        with T.serial(n - 1) as i:
            T.buffer_store(array, array[i] + array[i + 1], [i + 1])
        with T.parallel(n) as i:
            T.buffer_store(y, -array[i], [i])

    func = lower_to_threads(function(body, ("int64", ["n"]), ("int64", ["n"])))
    assert launches(func) == [64, 1, 64]
    x = np.random.default_rng(0).integers(-9, 9, 100)
    *_, y = emulated.call(func, [x, np.zeros_like(x)])
    np.testing.assert_array_equal(y, -np.cumsum(2 * x))


def test_a_variable_that_launches_would_share_makes_them_one() -> None:
    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        first = T.bind(x[0])
        with independent_loops(x.shape[0]) as (i,):
            T.buffer_store(y, x[i] - first, [i])

    func = lower_to_threads(function(body, ("int64", ["n"]), ("int64", ["n"])))
    assert launches(func) == [1]
    x = np.arange(5, 12)
    *_, y = emulated.call(func, [x, np.zeros_like(x)])
    np.testing.assert_array_equal(y, x - 5)


def test_a_size_that_only_a_loop_knows_is_rejected() -> None:
    def body(x: tirx.Buffer, y: tirx.Buffer) -> None:
        with T.serial(y.shape[0]) as i:
            array = T.alloc_buffer((x[i],), "int64")
            with T.serial(x[i]) as k:
                T.buffer_store(array, k, [k])
            T.buffer_store(y, array[x[i] - 1], [i])

    with pytest.raises(ValueError, match="not known before the launch"):
        lower_to_threads(function(body, ("int64", ["n"]), ("int64", ["n"])))


def test_while_loops_are_found() -> None:
    """A function whose only loop is a While has loops."""
    from schedules.cuda.elementwise.fallback import one_number

    def body(x: tirx.Buffer) -> None:
        with T.While(x[0] > 0):
            T.buffer_store(x, x[0] - 1, [0])

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    assert one_number(function(body, ("int64", [1])), target) is None
