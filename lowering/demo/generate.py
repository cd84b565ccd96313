"""Greedy generation with a compiled decoder, in a process that cannot import the compiler.

Run as `python -m lowering.demo.generate ARTIFACT WORK`: it reads WORK/request.json, and writes WORK/tokens.npz and
WORK/report.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np


def generate(folder: Path, work: Path) -> None:
    """Load the artifact, prefill the prompt, then decode token by token with in-place cache updates."""
    request = json.loads((work / "request.json").read_text())
    prompt = np.array(request["prompt"], np.int64)[None]
    capacity, new = request["capacity"], request["new_tokens"]

    start = time.perf_counter()
    import lowering

    model = lowering.load(folder)
    load_seconds = time.perf_counter() - start

    spec = {t.name: t for t in model.inputs}
    caches = {
        name: np.zeros([1, int(t.dims[1]), capacity, int(t.dims[3])], np.float32)
        for name, t in spec.items()
        if name.startswith("cache_")
    }
    written = np.zeros(1, np.int64)
    start = time.perf_counter()
    logits = model.run({"ids": prompt, "write_indices": written, **caches})["logits"]
    prefill_seconds = time.perf_counter() - start
    all_logits, tokens = [np.array(logits)], [int(logits.argmax())]

    written[0] = prompt.shape[1]
    token = np.zeros((1, 1), np.int64)
    step = model.bind({"ids": token, "write_indices": written, **caches})
    decode_seconds, bytes_per_token = [], []
    while len(tokens) < new:
        token[0, 0] = tokens[-1]
        before = {name: cache.copy() for name, cache in caches.items()}
        start = time.perf_counter()
        logits = step()["logits"]
        decode_seconds.append(time.perf_counter() - start)
        bytes_per_token.append(sum(count_changed_bytes(before[name], cache) for name, cache in caches.items()))
        all_logits.append(np.array(logits))
        tokens.append(int(logits.argmax()))
        written[0] += 1

    np.savez(work / "tokens.npz", tokens=np.array(tokens), logits=np.concatenate(all_logits))
    report = {
        "load_seconds": load_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": float(np.median(decode_seconds)),
        "cache_bytes_written": int(np.median(bytes_per_token)),
        "compiler_imported": any(name == "tvm" and sys.modules[name] is not None for name in sys.modules),
    }
    (work / "report.json").write_text(json.dumps(report))


def count_changed_bytes(before: np.ndarray, after: np.ndarray) -> int:
    """Return the bytes of the rows (last axis) that differ anywhere."""
    return int((before != after).any(axis=-1).sum()) * after.shape[-1] * after.itemsize


if __name__ == "__main__":
    sys.modules["tvm"] = None  # type: ignore[assignment] # any import of the compiler raises from here on
    generate(Path(sys.argv[1]), Path(sys.argv[2]))
