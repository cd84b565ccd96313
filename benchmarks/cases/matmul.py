"""matmuls with constant weights, and what follows them in a transformer.

Symbols: M rows, K and N the weight's sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from .attention import port
from .case import TYPES, Arrays, Case, Work

# The nodes after x [M, K] of each form, with the shapes of their weights.
_FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("Y = MatMul (x, w)", {"w": "KN"}),
    "bias": ("p = MatMul (x, w) Y = Add (p, b)", {"w": "KN", "b": "N"}),
    "gelu": ("p = MatMul (x, w) q = Add (p, b) Y = Gelu (q)", {"w": "KN", "b": "N"}),
    "residual": ("p = MatMul (x, w) q = Add (p, b) Y = Add (r, q)", {"w": "KN", "b": "N"}),
    "SwiGLU": ("g = MatMul (x, w) s = Swish (g) u = MatMul (x, w3) Y = Mul (s, u)", {"w": "KN", "w3": "KN"}),
}


@dataclass(frozen=True, kw_only=True)
class MatmulCase(Case):
    """x [M, K], M symbolic, in one of the forms above; r [M, N] is what a residual adds. few: the work is to read the
    weights, else it is arithmetic."""

    M: int
    K: int
    N: int
    form: str = "plain"
    few: bool = False

    def weights(self) -> Arrays:
        rng, sizes = np.random.default_rng(1), {"K": self.K, "N": self.N}
        return {
            name: (rng.standard_normal([sizes[d] for d in dims], np.float32) / np.sqrt(self.K)).astype(
                TYPES[self.dtype]
            )
            for name, dims in _FORMS[self.form][1].items()
        }

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        names = {"x": self.K, "r": self.N} if self.form == "residual" else {"x": self.K}
        return {
            n: rng.standard_normal((self.M, size), np.float32).astype(TYPES[self.dtype]) for n, size in names.items()
        }

    def model(self) -> onnx.ModelProto:
        dtype = {"f32": "float", "f16": "float16", "bf16": "bfloat16"}[self.dtype]
        inputs = ", ".join(f"{dtype}[M, {array.shape[1]}] {name}" for name, array in self.feeds().items())
        model = onnx.parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 24]>
            matmul ({inputs}) => ({dtype}[M, {self.N}] Y) {{ {_FORMS[self.form][0]} }}""")
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in self.weights().items())
        return model

    def expected(self) -> Arrays:
        arrays = {name: array.astype(np.float64) for name, array in (self.feeds() | self.weights()).items()}
        y = arrays["x"] @ arrays["w"]
        if "b" in arrays:
            y = y + arrays["b"]
        if self.form == "gelu":
            y = y * 0.5 * (1 + _erf(y / np.sqrt(2)))
        if self.form == "residual":
            y = arrays["r"] + y
        if self.form == "SwiGLU":
            y = y / (1 + np.exp(-y)) * (arrays["x"] @ arrays["w3"])
        return {"Y": y}

    def work(self) -> Work:
        weights = [array for array in self.weights().values() if array.ndim == 2]
        if self.few:
            return Work(float(sum(array.nbytes for array in weights)), "byte")
        return Work(2.0 * self.M * sum(array.size for array in weights), "FLOP")


@dataclass(frozen=True, kw_only=True)
class BatchedCase(Case):
    """x [B, M, K] by y [B, K, N], both computed and not constant."""

    B: int
    M: int
    K: int
    N: int

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        return {
            "x": rng.standard_normal((self.B, self.M, self.K), np.float32),
            "y": rng.standard_normal((self.B, self.K, self.N), np.float32),
        }

    def model(self) -> onnx.ModelProto:
        f32 = np.dtype(np.float32)
        node = onnx.helper.make_node("MatMul", ["x", "y"], ["Y"])
        inputs = [port("x", f32, ["B", "M", self.K]), port("y", f32, ["B", self.K, "N"])]
        graph = onnx.helper.make_graph([node], "batched", inputs, [port("Y", f32, ["B", "M", "N"])])
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)

    def expected(self) -> Arrays:
        feeds = self.feeds()
        return {"Y": feeds["x"].astype(np.float64) @ feeds["y"].astype(np.float64)}

    def work(self) -> Work:
        return Work(2.0 * self.B * self.M * self.K * self.N, "FLOP")


_erf = np.vectorize(math.erf)


def cases() -> list[Case]:
    large = (
        (2048, 2048, 2048),
        (512, 1024, 2816),
        (384, 768, 3072),
        (128, 3072, 768),
        (1000, 1000, 1000),
        (77, 576, 1536),
    )
    matmul_cases: list[Case] = [
        MatmulCase(name=f"MatMul {M} x {K} x {N}", group="matmul", M=M, K=K, N=N) for M, K, N in large
    ]
    matmul_cases += [
        MatmulCase(name=f"MatMul {M} x 4096 x 4096", group="matmul", M=M, K=4096, N=4096, few=True)
        for M in (1, 2, 4, 8)
    ]
    matmul_cases.append(MatmulCase(name="MatMul 1 x 1024 x 32000", group="matmul", M=1, K=1024, N=32000, few=True))
    matmul_cases += [
        MatmulCase(
            name=f"MatMul {M} x 4096 x 4096 {dtype}", group="matmul", M=M, K=4096, N=4096, few=M < 16, dtype=dtype
        )
        for dtype in ("f16", "bf16")
        for M in (1, 128)
    ]
    matmul_cases += [
        MatmulCase(name=f"{form}, 384 x 768 x 3072", group="matmul", M=384, K=768, N=3072, form=form)
        for form in ("bias", "gelu", "residual", "SwiGLU")
    ]
    matmul_cases.append(
        MatmulCase(name="SwiGLU, 1 x 1024 x 2816", group="matmul", M=1, K=1024, N=2816, form="SwiGLU", few=True)
    )
    batched = BatchedCase(name="batched MatMul 12 x 384 x 64 x 384", group="matmul", B=12, M=384, K=64, N=384)
    return [*matmul_cases, batched]
