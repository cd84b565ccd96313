"""One attention node beside PyTorch and ONNX Runtime, in turns in one run: `python benchmarks/attention.py [case ...]`

Every contender gets the same arrays. Ours and ONNX Runtime run the same ONNX model, whose batch and lengths are
symbolic; PyTorch runs `scaled_dot_product_attention`. One thread on one core, unless --threads says otherwise. A dash
means that a contender refuses the case, or has no such operator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from timing import Timing, facts, interleaved

import lowering

Call = Callable[[], object]
PEERS = ("torch", "onnxruntime")
TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Case:
    """Sizes of one problem: B batch, Hq and Hkv heads, S query rows, T keys, D head size.

    mask: "triangle" is a bool mask [S, T] that is causal, "lengths" means that only a part of the keys of each batch is
    valid. window counts the keys before the query row. bound: "compute" (GFLOP/s) or "memory" (GB/s of K and V).
    """

    B: int
    Hq: int
    Hkv: int
    S: int
    T: int
    D: int
    dtype: str = "f32"
    causal: bool = False
    mask: str = ""
    softcap: float = 0.0
    window: int | None = None
    bound: str = "compute"

    def visible(self) -> np.ndarray | None:
        """[B or 1, 1, S, T], or None where a peer needs no mask."""
        i, j = np.arange(self.S)[:, None], np.arange(self.T)
        if self.mask == "lengths":
            return np.broadcast_to(j < self.lengths()[:, None], (self.B, self.T))[:, None, None, :]
        if self.window is not None:
            return ((j <= i) & (j >= i - self.window))[None, None]
        return (j <= i)[None, None] if self.mask == "triangle" else None

    def lengths(self) -> np.ndarray:
        """From a tenth of the keys to all of them."""
        return np.linspace(self.T / 10, self.T, self.B).astype(np.int64)

    def work(self) -> float:
        """Floating-point operations (4 for each visible pair and head dimension), or bytes of visible K and V."""
        if self.bound == "memory":
            keys = self.lengths().sum() if self.mask == "lengths" else self.B * self.T
            return 2.0 * keys * self.Hkv * self.D * TYPES[self.dtype].itemsize
        seen = self.visible()
        if seen is None:
            seen = np.tri(self.S, self.T, dtype=bool)[None, None] if self.causal else np.ones((1, 1, self.S, self.T))
        return 4.0 * self.B * self.Hq * self.D * float(seen.sum()) / seen.shape[0]


CASES = {
    "P1 full": Case(1, 8, 8, 1024, 1024, 64),
    "P1 causal": Case(1, 8, 8, 1024, 1024, 64, causal=True),
    "P1 bool mask": Case(1, 8, 8, 1024, 1024, 64, mask="triangle"),
    "P1 softcap 50": Case(1, 8, 8, 1024, 1024, 64, softcap=50.0),
    "P1 full f16": Case(1, 8, 8, 1024, 1024, 64, "f16"),
    "P1 causal f16": Case(1, 8, 8, 1024, 1024, 64, "f16", causal=True),
    "P1 full bf16": Case(1, 8, 8, 1024, 1024, 64, "bf16"),
    "P2 full": Case(1, 8, 8, 2048, 2048, 128),
    "P2 causal": Case(1, 8, 8, 2048, 2048, 128, causal=True),
    "P3 causal": Case(1, 32, 8, 2048, 2048, 128, causal=True),
    "window 256, S 4096": Case(1, 8, 8, 4096, 4096, 64, causal=True, window=256),
    "BERT 8 x 128": Case(8, 12, 12, 128, 128, 64),
    "decode 1 x 4096": Case(1, 32, 8, 1, 4096, 128, bound="memory"),
    "decode 8 x 1024": Case(8, 32, 8, 1, 1024, 128, bound="memory"),
    "decode ragged": Case(8, 32, 8, 1, 1024, 128, mask="lengths", bound="memory"),
    "decode 1 x 4096 f16": Case(1, 32, 8, 1, 4096, 128, "f16", bound="memory"),
    "decode 1 x 4096 bf16": Case(1, 32, 8, 1, 4096, 128, "bf16", bound="memory"),
}


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    """By the names of the ONNX model."""
    rng, dtype = np.random.default_rng(0), TYPES[case.dtype]
    shapes = {"Q": (case.Hq, case.S), "K": (case.Hkv, case.T), "V": (case.Hkv, case.T)}
    arrays = {n: rng.standard_normal((case.B, h, rows, case.D)).astype(dtype) for n, (h, rows) in shapes.items()}
    if case.mask == "lengths":
        arrays["nonpad_kv_seqlen"] = case.lengths()
    elif case.mask:
        arrays["attn_mask"] = np.ascontiguousarray(case.visible()[0, 0])  # type: ignore[index]
    return arrays


def model_of(case: Case, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """One Attention node; batch and lengths are symbolic. Version 25 where a window needs it."""
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    dims = {
        "Q": ("B", case.Hq, "S", case.D),
        "K": ("B", case.Hkv, "T", case.D),
        "V": ("B", case.Hkv, "T", case.D),
        "attn_mask": ("S", "T"),
        "nonpad_kv_seqlen": ("B",),
    }
    slots = [name if name in arrays else "" for name in names]
    while not slots[-1]:
        slots.pop()
    attributes: dict[str, Any] = {"is_causal": int(case.causal), "softcap": case.softcap}
    if case.window is not None:
        attributes |= {"left_window_size": case.window}

    def port(name: str, dtype: np.dtype, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(dtype), shape)

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Attention", slots, ["Y"], **attributes)],
        "attention",
        [port(name, array.dtype, dims[name]) for name, array in arrays.items()],
        [port("Y", arrays["Q"].dtype, ("B", case.Hq, "S", case.D))],
    )
    opset = onnx.helper.make_opsetid("", 24 if case.window is None else 25)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=13)


def ours(case: Case, arrays: dict[str, np.ndarray], threads: int) -> Call:
    module = lowering.compile(model_of(case, arrays), threads=threads)
    return module.bind(arrays, {"Y": np.empty_like(arrays["Q"])})


def in_torch(case: Case, arrays: dict[str, np.ndarray], threads: int) -> Call | None:
    if case.softcap:
        return None
    torch.set_num_threads(threads)
    q, k, v = (_tensor(arrays[name]) for name in "QKV")
    seen = case.visible()
    mask = None if seen is None else torch.from_numpy(seen.copy())
    causal, gqa = case.causal and mask is None, case.Hq != case.Hkv
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def in_onnxruntime(case: Case, arrays: dict[str, np.ndarray], threads: int) -> Call | None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        model = model_of(case, arrays).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        session.run(None, arrays)
    except Exception:  # its exceptions have no common base
        return None
    return lambda: session.run(None, arrays)


def measure(case: Case, threads: int, repeats: int) -> dict[str, Timing]:
    """Timings by contender, after the answers have been compared."""
    arrays = inputs_of(case)
    calls = {
        "onnx-lowering": ours(case, arrays, threads),
        "torch": in_torch(case, arrays, threads),
        "onnxruntime": in_onnxruntime(case, arrays, threads),
    }
    contenders = {name: call for name, call in calls.items() if call is not None}
    answers = {name: _array(call()) for name, call in contenders.items()}
    for name in PEERS:
        if name in answers:
            tolerance = max(2e-5, 4 * float(ml_dtypes.finfo(TYPES[case.dtype]).eps))
            np.testing.assert_allclose(answers["onnx-lowering"], answers[name], atol=tolerance, err_msg=name)
    return interleaved(contenders, repeats)


def _array(answer: Any) -> np.ndarray:
    if isinstance(answer, dict):
        answer = answer["Y"]
    if isinstance(answer, torch.Tensor):
        answer = answer.float()
    return np.asarray(answer[0] if isinstance(answer, list) else answer, np.float32)


def seconds(timing: Timing, threads: int) -> float:
    """What is compared: CPU time on one thread, where others may have had the core as well; wall time on several."""
    return timing.cpu if threads == 1 else timing.median


def row(name: str, case: Case, timings: dict[str, Timing], threads: int) -> list[str]:
    mine = timings["onnx-lowering"]
    time, unit = seconds(mine, threads), "GB/s" if case.bound == "memory" else "GF/s"
    wall = f"{mine.median * 1e3:.2f} ({mine.low * 1e3:.2f} to {mine.high * 1e3:.2f})"
    cells = [name, wall, f"{time * 1e3:.2f}", f"{case.work() / time / 1e9:.0f} {unit}"]
    for peer in PEERS:
        theirs = timings.get(peer)
        cells.append("-" if theirs is None else f"{seconds(theirs, threads) * 1e3:.2f}")
        cells.append("-" if theirs is None else f"{seconds(theirs, threads) / time:.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[-arguments.threads :]
    os.sched_setaffinity(0, cores)

    clock = "CPU" if arguments.threads == 1 else "wall"
    title = f"milliseconds, medians of {arguments.repeats}; ratio = theirs / ours by {clock} time"
    table = Table(title=title, title_justify="left")
    headings = ["", "ours, wall (spread)", f"ours, {clock}", "speed"] + [x for peer in PEERS for x in (peer, "ratio")]
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    figures, ratios = {}, []
    for name in arguments.case or CASES:
        timings = measure(CASES[name], arguments.threads, arguments.repeats)
        table.add_row(*row(name, CASES[name], timings, arguments.threads))
        figures[name] = {contender: asdict(t) for contender, t in timings.items()}
        if "torch" in timings:
            torch_time, our_time = (seconds(timings[x], arguments.threads) for x in ("torch", "onnx-lowering"))
            ratios.append(torch_time / our_time)
    Console(width=120).print(table)
    if ratios:
        print(f"torch / onnx-lowering, geometric mean of {len(ratios)}: {math.prod(ratios) ** (1 / len(ratios)):.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**facts(len(cores)), "seconds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
