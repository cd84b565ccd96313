"""Attention of onnx's reference evaluator, without a bug of onnx 1.23.

With is_causal and a mask of one row, the evaluator masks for all queries the keys that the first query may not see.
With a mask of one dimension it raises an error. The operator's function body, which is the standard, broadcasts the
mask over the queries first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention as _Attention

_MASK = 3


class Attention(_Attention):
    """The replacement of the evaluator's own Attention."""

    op_domain = ""

    def run(self, *inputs: Any, **attributes: Any) -> Any:
        mask = inputs[_MASK] if len(inputs) > _MASK else None
        if mask is not None and (mask.ndim == 1 or (mask.ndim > 1 and mask.shape[-2] == 1)):
            rows = inputs[0].shape[-2]
            mask = np.broadcast_to(mask, (*mask.shape[:-2], rows, mask.shape[-1]))
            inputs = (*inputs[:_MASK], mask, *inputs[_MASK + 1 :])
        return OpRun.run(self, *inputs, **attributes)
