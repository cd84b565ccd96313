"""Masks that models compute from positions, padding and ids, beside ONNX Runtime: `python benchmarks/masks.py`

One Attention node of 8 heads and 64 dimensions on one thread, with the nodes that make its mask. The first row has no
mask at all, only the attribute is_causal.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table
from timing import Timing, facts, interleaved

import lowering

# seq, i and j: positions, [S], [S, 1] and [1, S].
POSITIONS = """
    zero = Constant<value_int=0>() one = Constant<value_int=1>() first = Constant<value_ints=[0]>()
    second = Constant<value_ints=[1]>() third = Constant<value_ints=[2]>() middle = Constant<value_ints=[1, 2]>()
    S1 = Shape<start=2, end=3>(q) S = Squeeze(S1) seq = Range(zero, S, one) i = Unsqueeze(seq, second)
    j = Unsqueeze(seq, first) causal = LessOrEqual(j, i)
"""
MASKS = {
    "causal": "mask = Unsqueeze (causal, middle_of_two)",
    "causal and padding": "valid = Cast<to=9> (ids) p = Unsqueeze (valid, middle) mask = And (causal, p)",
    "window of 256": """w = Constant<value_int=256>() d = Sub (i, j) near = Less (d, w) both = And (causal, near)
        mask = Unsqueeze (both, middle_of_two)""",
    "packed documents": """a = Unsqueeze (ids, third) b = Unsqueeze (ids, second) same = Equal (a, b)
        s4 = Unsqueeze (same, second) mask = And (s4, causal)""",
}


def model(name: str) -> onnx.ModelProto:
    body = "y = Attention<is_causal=1> (q, k, v)"
    if name in MASKS:
        pair = "middle_of_two = Constant<value_ints=[0, 1]>()"
        body = f"{POSITIONS} {pair} {MASKS[name]} y = Attention (q, k, v, mask)"
    tensors = ", ".join(f"float[B, 8, S, 64] {x}" for x in "qkv")
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        g ({tensors}, int64[B, S] ids) => (float[B, 8, S, 64] y) {{ {body} }}""")


def measure(
    proto: onnx.ModelProto, feeds: dict[str, np.ndarray], options: onnxruntime.SessionOptions, repeats: int
) -> dict[str, Timing]:
    """Timings by contender, after the answers have been compared."""
    module = lowering.compile(proto, threads=1)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    (expected,) = session.run(None, feeds)
    seen = np.abs(expected).max(axis=(1, 3), keepdims=True) > 0  # rows of padding are whatever one likes
    np.testing.assert_allclose(module.run(feeds)["y"] * seen, expected * seen, atol=2e-5)
    contenders = {"onnx-lowering": lambda: module.run(feeds), "onnxruntime": lambda: session.run(None, feeds)}
    return interleaved(contenders, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    tokens, rng = arguments.tokens, np.random.default_rng(0)
    arrays = {x: rng.standard_normal((1, 8, tokens, 64), np.float32) for x in "qkv"}
    ids = {
        "causal and padding": (np.arange(tokens) >= tokens // 5)[None].astype(np.int64),
        "packed documents": np.arange(tokens)[None] * 5 // tokens,
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    table = Table(
        title=f"{tokens} tokens; milliseconds of CPU time, medians of {arguments.repeats}", title_justify="left"
    )
    for heading in ("mask", "ours", "onnxruntime", "ratio"):
        table.add_column(heading, justify="left" if heading == "mask" else "right")
    figures = {}
    for name in ("is_causal", *MASKS):
        feeds = {**arrays, "ids": ids.get(name, np.zeros((1, tokens), np.int64))}
        timings = measure(model(name), feeds, options, arguments.repeats)
        ours, theirs = (timings[x].cpu * 1e3 for x in ("onnx-lowering", "onnxruntime"))
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}")
        figures[name] = {contender: asdict(t) for contender, t in timings.items()}
    Console(width=100).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**facts(1), "tokens": tokens, "seconds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
