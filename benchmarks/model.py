"""A whole ONNX model beside ONNX Runtime in one run: `python benchmarks/model.py model.onnx --dim batch=8 ...`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnxruntime
from timing import facts, interleaved

import lowering
from lowering.verification import random_input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (d.partition("=") for d in arguments.dim)}

    module = lowering.compile(arguments.model, threads=arguments.threads)
    rng = np.random.default_rng(0)
    feeds = {t.name: random_input(t, sizes, rng) for t in module.inputs}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(arguments.model), options, ["CPUExecutionProvider"])
    for name, expected in zip((t.name for t in module.outputs), session.run(None, feeds)):
        error = float(np.abs(np.asarray(module.run(feeds)[name], np.float64) - expected).max())
        print(f"{name}: max difference {error:.1e}")

    timings = interleaved(
        {"onnx-lowering": lambda: module.run(feeds), "onnxruntime": lambda: session.run(None, feeds)},
        arguments.repeats,
    )
    for name, t in timings.items():
        print(f"{name:14} {t.median * 1e3:8.2f} ms ({t.low * 1e3:.2f} to {t.high * 1e3:.2f}), CPU {t.cpu * 1e3:.2f} ms")
    ratio = timings["onnxruntime"].median / timings["onnx-lowering"].median
    print(f"onnxruntime / onnx-lowering: {ratio:.2f}")
    if arguments.json is not None:
        figures = {name: asdict(t) for name, t in timings.items()}
        kept = {**facts(arguments.threads), "sizes": sizes, "seconds": figures}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
