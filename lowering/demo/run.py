"""The main use case with figures: build, compile, save, load in another process, generate, check."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from rich.console import Console
from rich.table import Table

from ..compiling.compiler import compile_to
from .decoder import build_decoder

PROMPT_TOKENS, NEW_TOKENS, CAPACITY = 128, 32, 1024
# Float32 accumulation of a few thousand terms, in another order than the reference's.
TOLERANCE = 1e-3


def demo(output: Path | None = None) -> int:
    """Run the demo and print a table.

    Args:
        output: A folder for the model and its artifact (model.onnx, artifact/); by default a temporary folder.

    Returns:
        0 if the tokens' logits agree with the ONNX reference, else 1.
    """
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-demo-") as temporary:
        work = Path(temporary)
        folder = work if output is None else output
        folder.mkdir(parents=True, exist_ok=True)
        return _run_demo(folder, work, Console())


def _run_demo(folder: Path, work: Path, console: Console) -> int:
    model = build_decoder()
    parameters = sum(int(np.prod(t.dims)) for t in model.graph.initializer)
    onnx.save(model, folder / "model.onnx")
    console.print(f"Built a decoder with {parameters / 1e6:.1f} million weights: {folder / 'model.onnx'}")

    with console.status("compiling"):
        start = time.perf_counter()
        compile_to(folder / "artifact", folder / "model.onnx", donate=("cache_.*",))
        compile_seconds = time.perf_counter() - start

    prompt = np.random.default_rng(1).integers(0, 4096, PROMPT_TOKENS)
    request = {"prompt": prompt.tolist(), "new_tokens": NEW_TOKENS, "capacity": CAPACITY}
    (work / "request.json").write_text(json.dumps(request))
    with console.status("generating in a process that cannot import the compiler"):
        subprocess.run([sys.executable, "-m", "lowering.demo.generate", folder / "artifact", work], check=True)
    report = json.loads((work / "report.json").read_text())
    result = np.load(work / "tokens.npz")

    with console.status("checking every step against the ONNX reference"):
        expected = _compute_reference_logits(model, prompt, result["tokens"])
    error = float(np.abs(result["logits"] - expected).max())
    same = bool((result["logits"].argmax(-1) == expected.argmax(-1)).all())

    table = Table(title="onnx-lowering demo", show_header=False)
    for name, value in (
        ("compile time", f"{compile_seconds:.1f} s"),
        ("load time", f"{report['load_seconds'] * 1e3:.0f} ms, without the compiler"),
        ("prefill", f"{PROMPT_TOKENS / report['prefill_seconds']:,.0f} tokens/s"),
        ("decode", f"{1 / report['decode_seconds']:,.0f} tokens/s"),
        ("cache bytes written per token", f"{report['cache_bytes_written']:,}"),
        ("max error against the ONNX reference", f"{error:.1e} ({'same' if same else 'OTHER'} tokens)"),
    ):
        table.add_row(name, value)
    console.print(table)
    ok = same and error <= TOLERANCE and not report["compiler_imported"]
    if not ok:
        console.print("[red]The generated tokens do not agree with the reference.[/red]")
    return 0 if ok else 1


def _compute_reference_logits(model: onnx.ModelProto, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the reference's logits for the prompt and each generated token, fed with the same tokens."""
    session = ReferenceEvaluator(model)
    names = [o.name for o in model.graph.output]
    feeds = {}
    for port in model.graph.input:
        if port.name.startswith("cache_"):
            _, kv_heads, _, head_dim = (d.dim_value for d in port.type.tensor_type.shape.dim)
            feeds[port.name] = np.zeros([1, kv_heads, CAPACITY, head_dim], np.float32)
    ids, written, logits = prompt[None], 0, []
    for token in tokens:
        outputs = dict(zip(names, session.run(None, {"ids": ids, "write_indices": np.array([written]), **feeds})))
        logits.append(outputs["logits"])
        feeds = {name: outputs[name.replace("cache", "present")] for name in feeds}
        written += ids.shape[1]
        ids = np.array([[token]])
    return np.concatenate(logits)
