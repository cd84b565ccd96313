"""The emulation notices every step of synchronization that is missing, so kernels that pass have what they need.

A kernel's test is one line: `survivors` leaves out one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tests import cuda_emulation as emulated
from tests.cuda_emulation.mutations import steps_can_be_left_out, survivors

pytestmark = pytest.mark.no_gpu

THREADS, TILE = 64, 256


def function(body: Callable[[tirx.Buffer, tirx.Buffer], None], dtype: str, columns: int) -> tirx.PrimFunc:
    """f(X [n, columns], Y [n, columns])"""
    with IRBuilder() as builder, T.prim_func():
        x, y = T.arg("x", T.handle()), T.arg("y", T.handle())
        n = IRBuilder.name("n", T.int64())
        X = IRBuilder.name("X", T.match_buffer(x, (n, columns), dtype, align=16))
        Y = IRBuilder.name("Y", T.match_buffer(y, (n, columns), dtype, align=16))
        body(X, Y)
    return builder.get()


def reversed_tiles(X: tirx.Buffer, Y: tirx.Buffer) -> None:
    """Each row, a tile, back to front: the copy of the next one is under way meanwhile."""
    n = X.shape[0]
    with T.launch_thread("blockIdx.x", 1), T.launch_thread("threadIdx.x", THREADS) as tx:
        tiles = T.alloc_buffer((2 * TILE,), "float32", scope="shared", align=16)

        def copy(row: tirx.PrimExpr) -> None:
            with T.If(row < n), T.Then():
                to = tiles.ptr_to([(row % 2).astype("int32") * TILE + tx * 4])
                T.evaluate(T.ptx["cp.async.cg.shared.global"](to, X.ptr_to([row, tx * 4]), 16))
            T.evaluate(T.ptx["cp.async.commit_group"]())

        copy(T.int64(0))
        with T.serial(n) as row:
            copy(row + 1)
            T.evaluate(T.ptx["cp.async.wait_group"](1))
            T.evaluate(T.cuda.cta_sync())
            with T.unroll(4) as i:
                element = (row % 2).astype("int32") * TILE + TILE - 1 - i * THREADS - tx
                T.buffer_store(Y, tiles[element], [row, i * THREADS + tx])
            T.evaluate(T.cuda.cta_sync())


def doubled_boxes(X: tirx.Buffer, Y: tirx.Buffer) -> None:
    """Boxes of 32 rows of 64 columns come by bulk copies, are doubled in shared memory and go by bulk copies."""
    rows, columns = 32, 64
    n = X.shape[0]
    maps = []
    for buffer in (X, Y):
        maps.append(T.bind(T.tvm_stack_alloca("tensormap", 1)))
        sizes = [columns, n, columns * 2, columns, rows, 1, 1]
        T.evaluate(
            T.tensormap_encode_tiled(maps[-1], buffer.data, *sizes, descriptor_dtype="float16", rank=2, swizzle=3)
        )
    blocks = tirx.floordiv(n + rows - 1, rows)
    with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", THREADS) as tx:
        box = T.alloc_buffer((rows * columns,), "float16", scope="shared.dyn", align=1024)
        bar = T.alloc_buffer((1,), "uint64", scope="shared", align=8)
        row = bx.astype("int32") * rows
        with T.If(tx == 0), T.Then():
            T.evaluate(T.ptx.mbarrier.init.shared.b64(bar.ptr_to([0]), T.uint32(1)))
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        T.evaluate(T.cuda.cta_sync())
        with T.If(tx == 0), T.Then():
            T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar.ptr_to([0]), T.uint32(rows * columns * 2)))
            load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            T.evaluate(T.ptx[load](box.ptr_to([0]), T.address_of(maps[0]), 0, row, bar.ptr_to([0])))
        T.evaluate(T.cuda.mbarrier_wait(bar.ptr_to([0]), 0))
        with T.serial(rows * columns // THREADS) as i:
            T.buffer_store(box, box[i * THREADS + tx] * T.float16(2), [i * THREADS + tx])
        T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        T.evaluate(T.cuda.cta_sync())
        with T.If(tx == 0), T.Then():
            store = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
            T.evaluate(T.ptx[store](T.address_of(maps[1]), 0, row, box.ptr_to([0])))
            T.evaluate(T.ptx["cp.async.bulk.commit_group"]())
            T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](0))


def test_asynchronous_copies() -> None:
    x = np.random.default_rng(0).standard_normal((5, TILE)).astype("float32")
    module = emulated.module({"f": function(reversed_tiles, "float32", TILE)}, arch="sm_80")
    _, steps = steps_can_be_left_out(module.source())
    assert len(steps) == 5  # two commits, a wait, two barriers
    arrays = [x, np.full_like(x, np.nan)]
    assert survivors(module, "f", arrays, lambda after: np.array_equal(after[1], x[:, ::-1])) == []


def test_bulk_copies() -> None:
    x = np.random.default_rng(0).standard_normal((45, 64)).astype("float16")
    module = emulated.module({"f": function(doubled_boxes, "float16", 64)})
    assert survivors(module, "f", [x, np.full_like(x, np.nan)], lambda after: np.array_equal(after[1], 2 * x)) == []


def test_what_is_redundant_survives() -> None:
    def twice(X: tirx.Buffer, Y: tirx.Buffer) -> None:
        with T.launch_thread("blockIdx.x", X.shape[0]) as bx, T.launch_thread("threadIdx.x", TILE) as tx:
            row = T.alloc_buffer((TILE,), "float32", scope="shared")
            T.buffer_store(row, X[bx, tx], [tx])
            T.evaluate(T.cuda.cta_sync())
            T.evaluate(T.cuda.cta_sync())
            T.buffer_store(Y, row[TILE - 1 - tx], [bx, tx])

    x = np.random.default_rng(0).standard_normal((3, TILE)).astype("float32")
    module = emulated.module({"f": function(twice, "float32", TILE)}, arch="sm_80")
    left = survivors(module, "f", [x, np.full_like(x, np.nan)], lambda after: np.array_equal(after[1], x[:, ::-1]))
    assert [str(step) for step in left] == ["f_kernel: cuda_cta_sync (0)", "f_kernel: cuda_cta_sync (1)"]
