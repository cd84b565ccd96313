"""Run exported models on the emulated GPU. Tests call these functions in its process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np

import lowering
from lowering.choices import Precision


def measured(folder: str | Path, arch: str, precision: Precision | None) -> tuple[Counter[str], float]:
    """Return how many kernels each rule made, and the largest error.

    The counts include "matmuls" and "matmuls by" their rule, with and without norm prologues and epilogues. The
    error is the difference from PyTorch in float64, relative to the range of the output."""
    model = lowering.compile(Path(folder) / "model.onnx", f"cuda:{arch}", precision=precision)
    kernels: Counter[str] = Counter()
    for kernel in model.manifest.kernels:
        if kernel.kind in ("matmul", "conv"):
            kernels.update(
                ["matmuls", f"matmuls by {kernel.schedule.removeprefix('prologue_').removeprefix('epilogue_')}"]
            )
        else:
            kernels[kernel.schedule] += 1
    types = {spec.name: np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype)) for spec in model.inputs}
    worst = 0.0
    for path in sorted(Path(folder).glob("*.npz")):
        with np.load(path) as arrays:
            feeds = {key: arrays[key].astype(types[key]) for key in arrays.files if not key.startswith("=")}
            results = model.run(feeds)
            for key in (key for key in arrays.files if key.startswith("=")):
                difference = results[key[1:]].astype("float64") - arrays[key]
                worst = max(worst, float(np.abs(difference).max() / np.ptp(arrays[key])))
    return kernels, worst
