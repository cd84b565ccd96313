"""Matmuls as functions to schedule: C [M, N] = A [M, K] B, accumulated in float32, M symbolic."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx, topi

from lowering.records import decode
from schedules.reading.matmul import WEIGHTS


@dataclass(frozen=True)
class Matmul:
    """transposed: B is [N, K], as weights are stored. epilogue is "none", "bias" or "gate": silu(A B) times (A U)."""

    dtype: str
    columns: int
    depth: int
    transposed: bool
    epilogue: str
    factors: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of the function, in order."""
        return ("a", *self.factors, *(("bias",) if self.epilogue == "bias" else ()), "c")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Matmul:
        """Read the text of `to_json`."""
        return decode(Matmul, json.loads(text), "the matmul")

    def function(self) -> tirx.PrimFunc:
        """Return the unscheduled function."""
        m, n, k = tirx.Var("m", "int64"), *(tirx.IntImm("int64", size) for size in (self.columns, self.depth))
        a = te.placeholder((m, k), self.dtype, "a")
        bs = [te.placeholder((n, k) if self.transposed else (k, n), self.dtype, name) for name in self.factors]

        def matmul(b: te.Tensor) -> te.Tensor:
            step = te.reduce_axis((0, k), "step")

            def element(i: Any, j: Any) -> Any:
                y = b(j, step) if self.transposed else b(step, j)
                return te.sum(a(i, step).astype("float32") * y.astype("float32"), axis=step)

            return topi.cast(te.compute((m, n), element, b.op.name), self.dtype)

        arguments, matmuls = [a, *bs], [matmul(b) for b in bs]
        result = matmuls[0]
        if self.epilogue == "bias":
            arguments.append(te.placeholder((n,), self.dtype, "bias"))
            result = topi.add(result, arguments[-1])
        elif self.epilogue == "gate":
            result = topi.multiply(topi.multiply(result, topi.sigmoid(result)), matmuls[1])
        elif self.epilogue == "none":
            result = topi.identity(result)
        func = te.create_prim_func([*arguments, result])
        return func.with_attr(WEIGHTS, [1 + n for n, _ in enumerate(bs)])


def matmul_of(dtype: str, columns: int, depth: int, *, transposed: bool, epilogue: str) -> Matmul:
    """Return the matmul with the names of its factors."""
    return Matmul(dtype, columns, depth, transposed, epilogue, ("b", "up") if epilogue == "gate" else ("b",))
