"""Faults for the instrument to find: each replaces the lowering of Relu, or what surrounds it, within one attack."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

import lowering.ops
from lowering.errors import InputError
from lowering.importing.node import Node
from lowering.importing.values import Value, prod
from lowering.ops.helpers.kernels import emit_loops, serial
from lowering.ops.tensor.reshape import reshape_to
from lowering.runtime import Model

# More than the compiler puts on the stack.
_SCRATCH = 4096


def _kernel(statements: Callable[..., None]) -> Callable[[Node, Value], Value]:
    """Return a lowering by a kernel over the flat data: statements(n, x, out, scratch), after a correct Relu."""

    def lowered(node: Node, data: Value) -> Value:
        flat = reshape_to(node, data, (prod(data.shape),))
        zero = tirx.const(0, data.dtype)

        def body(x: Any, out: Any, scratch: Any) -> None:
            with serial(x.shape[0]) as i:
                T.buffer_store(out, tirx.max(x[i], zero), [i])
            T.buffer_store(scratch, zero, [0])
            statements(x.shape[0], x, out, scratch)

        outputs, scratch = [(flat.shape, data.dtype)], [((_SCRATCH,), data.dtype)]
        (result,) = emit_loops(node, "planted", body, [flat], outputs, scratch=scratch)
        return reshape_to(node, result, data.shape)

    return lowered


def _write(index: Callable[[Any], Any]) -> Callable[..., None]:
    return lambda n, x, out, scratch: T.buffer_store(out, x[0], [index(n)])


def _read(index: Callable[[Any], Any]) -> Callable[..., None]:
    return lambda n, x, out, scratch: T.buffer_store(out, x[index(n)], [0])


def _into_scratch(n: Any, x: Any, out: Any, scratch: Any) -> None:
    T.buffer_store(scratch, x[0], [_SCRATCH + n - n])
    T.buffer_store(out, scratch[0] + out[0], [0])


def _into_input(n: Any, x: Any, out: Any, scratch: Any) -> None:
    T.buffer_store(x, x[0] + tirx.const(1, x.dtype), [0])


def _forgotten(node: Node, data: Value) -> Value:
    """Lower to a kernel that writes no element."""
    (result,) = emit_loops(node, "planted", lambda x, out: T.evaluate(0), [data], [(data.shape, data.dtype)])
    return result


def _wrong(n: Any, x: Any, out: Any, scratch: Any) -> None:
    T.buffer_store(out, out[n - 1] + tirx.const(1, x.dtype), [n - 1])


def _make_failing(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising


def _reject_relu(node: Node, data: Value) -> Value:
    raise node.error("node.attribute_unsupported", "input x is odd.")


def _patch_relu(lowered: Callable[..., Any]) -> AbstractContextManager[Any]:
    return mock.patch.dict(lowering.ops._REGISTRY, {("", "Relu"): {1: lowered}})


# By name: the function that plants the fault, and the kind of finding that must follow.
PLANTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "write after the end": (lambda: _patch_relu(_kernel(_write(lambda n: n))), "outside"),
    "write before the begin": (lambda: _patch_relu(_kernel(_write(lambda n: n - n - 1))), "outside"),
    "write far away": (lambda: _patch_relu(_kernel(_write(lambda n: n + (1 << 40)))), "outside"),
    "write into an input": (lambda: _patch_relu(_kernel(_into_input)), "outside"),
    "write after a workspace": (lambda: _patch_relu(_kernel(_into_scratch)), "outside"),
    "read after the end": (lambda: _patch_relu(_kernel(_read(lambda n: n + 4096))), "outside"),
    "forgotten elements": (lambda: _patch_relu(_forgotten), "wrong"),
    "wrong answer": (lambda: _patch_relu(_kernel(_wrong)), "wrong"),
    "refusal of what is legal": (lambda: _patch_relu(_reject_relu), "refused"),
    "terms of the compiler": (
        lambda: mock.patch.object(
            Model, "run", _make_failing(InputError("run.kernel_failed", "Check failed: tvm::PrimExpr"))
        ),
        "unclear",
    ),
    "raw exception": (lambda: mock.patch.object(Model, "run", _make_failing(KeyError("x0"))), "raw"),
    "death": (lambda: mock.patch.object(Model, "run", lambda *_: os.abort()), "crash"),
    "endless call": (lambda: mock.patch.object(Model, "run", lambda *_: time.sleep(60)), "hang"),
    "enormous memory": (lambda: mock.patch.object(Model, "run", lambda *_: np.zeros(1 << 33)), "raw"),
}
