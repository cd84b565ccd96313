"""com.microsoft operators that are others followed by an activation or with more types, and Inverse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, attacks, require
from tests.attacks.draw import Draw
from tests.attacks.generators.math.matmuls import conv, gemm, quantized
from tests.attacks.generators.shapes import trilu


@attacks("FusedConv", domain=MICROSOFT)
def fused_conv(d: Draw, op: str) -> Attack:
    base, has_residual = conv(d, "Conv"), d.chance(0.5)

    def feed() -> Arrays:
        x, w, *bias = (None if a is None else a.astype(np.float32) for a in base.feed())
        if not has_residual:
            return [x, w, *bias]
        assert x is not None and w is not None
        try:
            y = base.rule(x, w, *bias)
        except Exception:  # an attack by itself
            y = None
        shape = x.shape if y is None else y[0].shape
        return [x, w, bias[0] if bias else None, d.array("float32", d.corrupted(shape) if d.chance(0.2) else shape)]

    def rule(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, z: np.ndarray | None = None) -> Answer:
        answer = base.rule(x, w, b)
        assert answer is not None
        (y,) = answer
        require(z is None or z.shape == y.shape, "Z")
        return [np.maximum(y if z is None else y + z, 0).astype(np.float32)]

    attributes = {**base.attributes, "activation": "Relu"}
    return replace(base, op=op, domain=MICROSOFT, opset=21, feed=feed, rule=rule, attributes=attributes)


@attacks("FusedGemm", domain=MICROSOFT)
def fused_gemm(d: Draw, op: str) -> Attack:
    base = gemm(d, "Gemm")

    def rule(*arrays: np.ndarray) -> Answer:
        answer = base.rule(*arrays)
        assert answer is not None
        return [np.maximum(y, 0) for y in answer]

    attributes = {**base.attributes, "activation": "Relu"}
    return replace(base, op=op, domain=MICROSOFT, opset=21, rule=rule, attributes=attributes)


@attacks("Trilu", domain=MICROSOFT)
def microsoft_trilu(d: Draw, op: str) -> Attack:
    base = trilu(d, op)

    def feed() -> Arrays:
        data, *k = base.feed()
        assert data is not None
        return [data.astype(np.float32), *k]

    return replace(base, domain=MICROSOFT, opset=21, feed=feed)


@attacks("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT)
def microsoft_quantize(d: Draw, op: str) -> Attack:
    return replace(quantized(d, op), domain=MICROSOFT, opset=21)


@attacks("Inverse", domain=MICROSOFT)
def inverse(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4) if d.chance(0.1) else d.int(2, 4), d.dtype(("float32", "float64"))

    def feed() -> Arrays:
        shape = [*d.shape(max(rank - 2, 0)), *[d.pick((0, 1, 2, 3, 7))] * 2][:rank]
        x = d.array(dtype, shape) / 16
        if rank > 1:
            x = x + 4 * np.eye(shape[-1], dtype=dtype)
        return [x.astype(dtype)[..., :-1] if d.chance(0.1) and shape[-1] else x.astype(dtype)]

    def rule(x: np.ndarray) -> Answer:
        require(x.ndim > 1 and x.shape[-1] == x.shape[-2], "not square")
        return [np.linalg.inv(x.astype(np.float64)).astype(x.dtype)]

    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, close=1e-4)
