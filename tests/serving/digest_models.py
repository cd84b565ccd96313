"""Models for tests of Batcher, whose answer to a request is a digest of all its tokens so far.

A token that is lost, repeated or read from another request changes the digest. Recorder has a cache, Carrier states,
Picky tokens that it cannot read; generate_alone is what a request must get.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowering import InputError
from lowering.manifest import CachePool, ServedCache, StatePool, TensorSpec

VOCABULARY = 64


class Recorder:
    """A model whose cache contains the tokens themselves. Its answer is a digest of all tokens of a request so far."""

    def __init__(self, context: int = 40, block: int = 4, scales: int = 0) -> None:
        pool = CachePool("kv_cache", "kv_cache_scale" if scales else "", 1, 1, 1)
        served = ServedCache(context, block, (pool,), "int8" if scales else "float32", scales, "ids")
        inputs, outputs = [TensorSpec("ids", "int32", "int32", (1, "tokens"))], [SimpleNamespace(name="logits")]
        self.manifest: Any = SimpleNamespace(served=served, inputs=inputs, outputs=outputs)
        self.block, self.calls = block, 0
        self.max_tokens = 0  # the largest number of tokens of a call

    gpu = None

    def to_numpy(self, name: str, array: np.ndarray) -> np.ndarray:
        return array

    def run(self, inputs: Any) -> Any:
        self.calls += 1
        ids, starts, past, table = (inputs[n] for n in ("ids", "row_starts", "past_lengths", "block_table"))
        assert ids.dtype == np.int32 and ids.shape == (1, starts[-1]) and len(starts) == len(past) + 1 == len(table) + 1
        self.max_tokens = max(self.max_tokens, ids.shape[1])
        cells = inputs["kv_cache_scale" if "kv_cache_scale" in inputs else "kv_cache"][:, 0, 0, 0, :, 0]
        answers = []
        for r, before in enumerate(past):
            new = ids[0, starts[r] : starts[r + 1]]
            assert len(new)
            for t, token in enumerate(new, before):
                cells[table[r, t // self.block], t % self.block] = token
            seen = [int(cells[table[r, t // self.block], t % self.block]) for t in range(before + len(new))]
            answers.append(np.bincount([compute_digest(seen)], minlength=VOCABULARY))
        return {"logits": np.array(answers)}


class Carrier(Recorder):
    """A model whose states are digests of the tokens that requests have read, with a cache or without one."""

    def __init__(self, has_cache: bool, context: int = 40) -> None:
        super().__init__(context)
        pools = self.manifest.served.pools if has_cache else ()
        states = (StatePool("states", 2, (1,), "float64"),)
        self.manifest.served = replace(self.manifest.served, pools=pools, states=states)
        self.slots: set[int] = set()

    def run(self, inputs: Any) -> Any:
        if self.manifest.served.pools:
            super().run(inputs)
        self.calls += 1
        ids, starts, past = (inputs[n] for n in ("ids", "row_starts", "past_lengths"))
        self.max_tokens, answers = max(self.max_tokens, ids.shape[1]), []
        assert len({*inputs["state_slots"].tolist()}) == len(past)
        for r, (before, slot) in enumerate(zip(past, inputs["state_slots"])):
            state = inputs["states"][slot, 1]
            state[0] = fold_tokens(7 if before == 0 else int(state[0]), ids[0, starts[r] : starts[r + 1]])
            answers.append(np.bincount([int(state[0]) % VOCABULARY], minlength=VOCABULARY))
            self.slots.add(int(slot))
        return {"logits": np.array(answers)}


class Picky:
    """Raises for a call in which a token is one of the unreadable ones."""

    def __init__(self, model: Recorder, *unreadable: int) -> None:
        self.read, self.unreadable = model.run, unreadable
        model.run = self.run  # type: ignore[method-assign]

    def run(self, inputs: Any) -> Any:
        results = self.read(inputs)  # states are updated before it fails
        if np.isin(inputs["ids"], self.unreadable).any():
            raise InputError("run.check_failed", "a token has no row")
        return results


def fold_tokens(value: int, tokens: Any) -> int:
    for token in tokens:
        value = (value * 31 + int(token)) % 1009
    return value


def compute_digest(tokens: list[int]) -> int:
    return fold_tokens(7, tokens) % VOCABULARY


def generate_alone(prompt: list[int], count: int) -> list[int]:
    """Return the answers to a request that runs without others."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(compute_digest(tokens))
    return tokens
