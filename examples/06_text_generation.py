"""Text generation: an exported decoder with its caches in place, sampling, tokens as they come.

A Llama with random weights (nothing is downloaded) is exported by torch.onnx with past keys and values as inputs, and
compiled with `static_cache`: the caches become slots that are written in place, and `Model.decoder` keeps them. ONNX
Runtime runs the same file beside it, copying its past in every step.

Needs the `examples` extra:

    pip install '.[examples]'
    python examples/06_text_generation.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from exported_llama import CONFIG, export, onnxruntime_of

import lowering

PROMPT, TOKENS, CAPACITY = 64, 64, 256


def sampled(logits: np.ndarray, rng: np.random.Generator, temperature: float = 0.8, top: int = 40) -> int:
    """A token among the `top` best, by their probabilities at that temperature."""
    best = np.argpartition(logits, -top)[-top:]
    p = np.exp((logits[best] - logits[best].max()) / temperature)
    return int(rng.choice(best, p=p / p.sum()))


def tokens_of(read: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray) -> Iterator[int]:
    """Tokens one by one, each as soon as it is known. read(ids [S]) answers with the logits behind the last of them."""
    rng = np.random.default_rng(0)
    logits = read(prompt)
    while True:
        token = sampled(logits, rng)
        yield token
        logits = read(np.array([token]))


def ours(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    decoder = lowering.compile(path, static_cache=CAPACITY, threads=1).decoder()
    return lambda ids: decoder.prefill(ids)[0, -1]


def theirs(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    session, names, past = onnxruntime_of(path)

    def read(ids: np.ndarray) -> np.ndarray:
        nonlocal past
        mask = np.ones((1, past[0].shape[2] + len(ids)), np.int64)
        logits, *past = session.run(None, dict(zip(names, [ids[None], mask, *past])))
        return logits[0, -1]

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    prompt = np.random.default_rng(1).integers(0, CONFIG.vocab_size, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.onnx"
        export(path)
        streams = {"onnx-lowering": tokens_of(ours(path), prompt), "onnxruntime": tokens_of(theirs(path), prompt)}
        texts: dict[str, list[int]] = {name: [next(stream)] for name, stream in streams.items()}  # reads the prompt
        seconds = dict.fromkeys(streams, 0.0)
        for _ in range(TOKENS - 1):
            for name, stream in streams.items():  # in turns: whatever else the machine does hits both
                start = time.perf_counter()
                texts[name].append(next(stream))
                seconds[name] += time.perf_counter() - start
            print(texts["onnx-lowering"][-1], end=" ", flush=True)
        print()
        for name in streams:
            print(f"{name:14} {(TOKENS - 1) / seconds[name]:8.0f} tokens/s")
        assert texts["onnx-lowering"] == texts["onnxruntime"], "both must choose the same tokens"


if __name__ == "__main__":
    main()
