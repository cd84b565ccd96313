"""Compiles the model of this example into the folder `artifact`: grouped-query attention over a slot cache.

One token per call: its keys and values are written into the caches at write_indices, its queries attend to the rows up
to there. The caches are donated, so that only the new rows are written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx

import lowering

MODEL = """
<ir_version: 11, opset_import: ["" : 24]>
decode (
  float[B, 4, 1, 32] q, float[B, 2, 1, 32] k, float[B, 2, 1, 32] v, int64[B] write_indices,
  float[B, 2, C, 32] cache_k, float[B, 2, C, 32] cache_v
) => (float[B, 4, 1, 32] y, float[B, 2, C, 32] present_k, float[B, 2, C, 32] present_v) {
  present_k = TensorScatter <axis = 2> (cache_k, k, write_indices)
  present_v = TensorScatter <axis = 2> (cache_v, v, write_indices)
  one = Constant <value_int = 1> ()
  valid = Add (write_indices, one)
  y = Attention (q, present_k, present_v, , , , valid)
}
"""


def main(folder: Path) -> None:
    lowering.compile(onnx.parser.parse_model(MODEL), donate=("cache_.*",)).save(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "artifact"))
