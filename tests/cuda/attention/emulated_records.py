"""Random records on emulated kernels against the float64 reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests import cuda_emulation as emulated
from tests.cases.attention_cases import arrays, check, draw_cases, outputs
from tests.cases.record_cases import CALLS


def equals_the_reference(module: emulated.Module, seed: int, tensor_cores: bool) -> None:
    """Call the module's function attention_{seed}, a kernel of the problem that the seed draws, and check its results.

    Tensor cores take probabilities that are rounded to the type of V.
    """
    for case in draw_cases(seed, CALLS, tensor_cores):
        inputs = arrays(case)
        results = outputs(case, inputs)
        names = case.problem.parameters()
        order = "ascending" if case.seed % 2 else "descending"
        arguments = [(inputs | results)[name] for name in names]
        # compiled code takes float8 as bytes
        arguments = [x.view(np.uint8) if getattr(x, "dtype", None) == ml_dtypes.float8_e4m3fn else x for x in arguments]
        outputs_and_inputs = module.call(f"attention_{seed}", arguments, order=order)
        actual = {name: x for name, x in zip(names, outputs_and_inputs) if name in results}
        check(case, inputs, actual, float(ml_dtypes.finfo(case.problem.dtype).eps) if tensor_cores else 0.0)
