"""States on which tests run single passes, and compilations without some of the passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import numpy as np
import tvm

from lowering.compiling import pipeline
from lowering.importing.quantized_matrix import QuantizedMatrix
from lowering.passes.compile_state import CompileState
from lowering.target import Target, resolve


def make_state(
    module: tvm.IRModule,
    target: tvm.target.Target | None = None,
    weights: Mapping[str, np.ndarray | QuantizedMatrix] | None = None,
) -> CompileState:
    """Return the state of a module for a CPU: TVM's target, or that of this machine."""
    record = resolve("cpu")[0] if target is None else Target("cpu", target, (), "cc")
    return CompileState(module, record, weights=weights or {})


@contextmanager
def leave_out(*names: str) -> Iterator[None]:
    """Compile without these passes in the block."""
    assert set(names) <= {entry.name for entry in pipeline.PASSES}
    passes = tuple(entry for entry in pipeline.PASSES if entry.name not in names)
    with mock.patch("lowering.compiling.compilation.PASSES", passes):
        yield
