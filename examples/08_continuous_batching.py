"""Continuous batching: requests arrive over time, and every call works on all that are there.

An exported Llama is compiled with `serve`: its caches become one paged pool, and a call takes packed tokens of many
requests, parts of prompts and single new tokens side by side. `Batcher` plans the calls; prompts that begin alike share
blocks. Beside it run the same file with static batching, eight requests at a time, padded and until the last of them is
done, and ONNX Runtime, request by request. All choose the same tokens.

Needs the `examples` extra:

    pip install '.[examples]'
    python examples/08_continuous_batching.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from exported_llama import CONFIG, export, onnxruntime_of

import lowering

REQUESTS, TOGETHER, CONTEXT = 32, 8, 512
SHARED = 32  # tokens that all prompts begin with, as those of one assistant do
TIE = 1e-3  # of two logits this close either may be chosen: sums in another order differ by rounding


@dataclass
class Request:
    """What is asked, and what came of it: tokens, when each was known, and how far the next best logit was behind; the
    first logits."""

    prompt: list[int]
    wanted: int
    arrival: float  # seconds from the start
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    first: np.ndarray | None = None

    def take(self, logits: np.ndarray, now: float) -> int:
        """The best token."""
        self.first = logits if self.first is None else self.first
        second, best = np.argpartition(logits, -2)[-2:]
        self.tokens.append(int(best))
        self.times.append(now)
        self.margins.append(float(logits[best] - logits[second]))
        return int(best)

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.wanted


def traffic(gap: float) -> list[Request]:
    """Short prompts and long ones, and lengths of answers as chats have them: many short, a few long."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, CONFIG.vocab_size, SHARED).tolist()
    found = []
    for k in range(REQUESTS):
        own = rng.integers(0, CONFIG.vocab_size, 1 + int(rng.exponential(48))).tolist()
        found.append(Request((shared + own)[:192], min(4 + int(rng.exponential(48)), 256), k * gap))
    return found


class Clock:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def arrived(self, queue: list[Request]) -> bool:
        """Whether the first of the queue is there; waits for it where nothing else is to be done."""
        return bool(queue) and queue[0].arrival <= self.now()

    def wait_for(self, request: Request) -> None:
        time.sleep(max(0.0, request.arrival - self.now()))


def continuous(model: lowering.Model, requests: list[Request]) -> Iterator[lowering.Batcher]:
    """Gives its batcher after each step."""
    batcher, queue, active, clock = lowering.Batcher(model, blocks=256), list(enumerate(requests)), 0, Clock()
    while queue or active:
        while queue and active < TOGETHER and clock.arrived([queue[0][1]]):
            k, request = queue.pop(0)
            batcher.add(k, request.prompt)
            active += 1
        if not active:
            clock.wait_for(queue[0][1])
            continue
        for k, logits in batcher.step().items():
            token = requests[k].take(logits, clock.now())
            if requests[k].done:
                batcher.free(k)
                active -= 1
            else:
                batcher.extend(k, token)
        yield batcher


def static(model: lowering.Model, requests: list[Request]) -> None:
    """Eight requests at a time: prompts are padded on the left, and the batch is done when its longest answer is."""
    clock, queue = Clock(), list(requests)
    while queue:
        clock.wait_for(queue[0])
        batch = []
        while clock.arrived(queue) and len(batch) < TOGETHER:
            batch.append(queue.pop(0))
        longest = max(len(request.prompt) for request in batch)
        ids, mask = np.zeros((2, len(batch), longest), np.int64)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = request.prompt
            mask[row, longest - len(request.prompt) :] = 1
        decoder = model.decoder()
        logits = decoder.prefill(ids, mask)[:, -1]
        while True:
            now = clock.now()
            tokens = [0 if r.done else r.take(row, now) for r, row in zip(batch, logits)]
            if all(request.done for request in batch):
                break
            logits = decoder.step(np.array(tokens))


def one_by_one(path: Path, requests: list[Request]) -> None:
    session, names, empty = onnxruntime_of(path)
    clock = Clock()
    for request in requests:
        clock.wait_for(request)
        past, ids = empty, np.array([request.prompt])
        while not request.done:
            mask = np.ones((1, past[0].shape[2] + ids.shape[1]), np.int64)
            logits, *past = session.run(None, dict(zip(names, [ids, mask, *past])))
            ids = np.array([[request.take(logits[0, -1], clock.now())]])


def report(name: str, requests: list[Request]) -> float:
    """Prints what users see; answers with tokens a second."""
    count, end = sum(len(r.tokens) for r in requests), max(r.times[-1] for r in requests)
    first = [r.times[0] - r.arrival for r in requests]
    each = [(r.times[-1] - r.times[0]) / (len(r.tokens) - 1) for r in requests if len(r.tokens) > 1]
    rate = count / end
    print(
        f"{name:28} {rate:8.0f} {np.median(first) * 1e3:12.0f} {np.max(first) * 1e3:8.0f} {np.median(each) * 1e3:12.2f}"
    )
    return rate


def differ(ours: list[Request], theirs: list[Request]) -> int:
    """How many requests got other tokens, but for ties."""
    wrong = 0
    for a, b in zip(ours, theirs):
        first = next((k for k, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
        wrong += first is not None and b.margins[first] > TIE
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=float, default=0.01, help="seconds between two requests (0.01)")
    gap = parser.parse_args().gap
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.onnx"
        export(path)
        served = lowering.compile(path, serve=lowering.Serve(CONTEXT), threads=1)
        coded = lowering.compile(path, serve=lowering.Serve(CONTEXT, cache="int8"), threads=1)
        padded = lowering.compile(path, static_cache=CONTEXT, threads=1)
        contenders: dict[str, Callable[[list[Request]], object]] = {
            "continuous": lambda requests: max(b.usage().shared for b in continuous(served, requests)),
            "continuous, int8 cache": lambda requests: list(continuous(coded, requests)),
            "static": lambda requests: static(padded, requests),
            "onnxruntime": lambda requests: one_by_one(path, requests),
        }
        for contender in contenders.values():
            contender(traffic(0.0)[:TOGETHER])  # the first calls of a process wait for memory
        runs = {name: traffic(gap) for name in contenders}
        shared, *_ = [contender(runs[name]) for name, contender in contenders.items()]
    print(f"{REQUESTS} requests, one every {gap * 1e3:.0f} ms, {TOGETHER} at a time; {shared} shared blocks at most\n")
    print(f"{'':28} {'tokens/s':>8} {'first, ms':>12} {'worst':>8} {'next, ms':>12}")
    rates = {name: report(name, requests) for name, requests in runs.items()}
    print(f"\ncontinuous against static batching: {rates['continuous'] / rates['static']:.2f}x the tokens a second")
    pairs = list(zip(runs["continuous, int8 cache"], runs["onnxruntime"]))
    off = max(np.abs(a.first - b.first).max() / np.ptp(b.first) for a, b in pairs)
    same = np.mean([x == y for a, b in pairs for x, y in zip(a.tokens, b.tokens)])
    print(
        f"int8 cache: logits behind prompts are off by {off:.1e} of their range; {same:.0%} of all tokens are the same"
    )
    for name in ("continuous", "static"):
        wrong = differ(runs[name], runs["onnxruntime"])
        assert not wrong, f"{name}: {wrong} requests got other tokens than alone"


if __name__ == "__main__":
    main()
