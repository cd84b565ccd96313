"""Compile one Attention node, run it at several sizes, save it, load it, compare with ONNX's own reference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import lowering

# Grouped-query attention: 8 query heads share 2 key/value heads. B, S and T are symbolic.
MODEL = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 24]>
attention (float[B, 8, S, 64] q, float[B, 2, T, 64] k, float[B, 2, T, 64] v) => (float[B, 8, S, 64] y) {
  y = Attention <is_causal = 1> (q, k, v)
}
""")


def main() -> None:
    module = lowering.compile(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        module.save(Path(folder) / "attention")
        module = lowering.load(Path(folder) / "attention")  # needs no compiler

        rng = np.random.default_rng(0)
        for batch, queries, keys in ((1, 128, 128), (3, 1, 77), (2, 50, 9)):
            inputs = {
                "q": rng.standard_normal((batch, 8, queries, 64), dtype=np.float32),
                "k": rng.standard_normal((batch, 2, keys, 64), dtype=np.float32),
                "v": rng.standard_normal((batch, 2, keys, 64), dtype=np.float32),
            }
            y = module.run(inputs)["y"]
            expected = ReferenceEvaluator(MODEL).run(None, inputs)[0]
            error = float(np.abs(y - expected).max())
            print(f"batch {batch}, {queries} queries, {keys} keys: max error {error:.1e}")
            assert error < 1e-5


if __name__ == "__main__":
    main()
