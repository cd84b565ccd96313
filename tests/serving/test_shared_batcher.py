"""One Batcher that eight threads use under one lock: every request gets its answers, each once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lowering import Batcher, InputError, PoolFullError, RequestError
from tests.serving.digest_models import Carrier, Picky, Recorder, generate_alone

THREADS, REQUESTS = 8, 200
# A token that the model cannot read, and one outside the vocabulary.
UNREADABLE, OUTSIDE = 50, 2**40


class Shared:
    """A batcher, its lock, and the answers of each request."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.lock = batcher, threading.Lock()
        self.answers: dict[Any, list[int]] = {}
        self.failed: dict[Any, InputError] = {}

    def step(self) -> None:
        """Run one call for all threads. The caller has the lock."""
        try:
            answers = self.batcher.step()
        except RequestError as error:
            answers = error.answers
            self.failed |= error.errors
        except PoolFullError:  # until other requests continue or end
            return
        for name, logits in answers.items():
            self.answers[name].append(int(logits.argmax()))


class Client:
    """A thread's own requests, one after the other: answered, canceled, refused, or failed."""

    def __init__(self, shared: Shared, thread: int) -> None:
        self.shared, self.rng = shared, np.random.default_rng(thread)
        self.names = range(thread, REQUESTS, THREADS)

    def run(self) -> None:
        for name in self.names:
            prompt = self.rng.integers(0, UNREADABLE, self.rng.integers(1, 20)).tolist()
            self._refused(name, prompt)
            kind = self.rng.choice(["answered", "answered", "canceled", "unreadable"])
            if kind == "unreadable":
                prompt[int(self.rng.integers(len(prompt)))] = UNREADABLE
            self._request(name, prompt, int(self.rng.integers(1, 12)), kind)

    def _refused(self, name: int, prompt: list[int]) -> None:
        batcher = self.shared.batcher
        for call in (
            lambda: batcher.add(name, [*prompt, OUTSIDE]),
            lambda: batcher.add(name, []),
            lambda: batcher.extend(name, 1),
            lambda: batcher.free(("nobody", name)),
        ):
            with self.shared.lock, pytest.raises(InputError):
                call()

    def _request(self, name: int, prompt: list[int], count: int, kind: str) -> None:
        with self.shared.lock:
            self.shared.answers[name] = []
            self.shared.batcher.add(name, prompt)
        turns = int(self.rng.integers(0, 6)) if kind == "canceled" else 10_000
        while True:
            with self.shared.lock:
                if turns == 0 or self._has_ended(name, prompt, count, kind):
                    break
                self.shared.step()
            turns -= 1
        assert turns or kind == "canceled"
        if turns == 0:
            with self.shared.lock:
                if name not in self.shared.failed:
                    self.shared.batcher.free(name)

    def _has_ended(self, name: int, prompt: list[int], count: int, kind: str) -> bool:
        """Extend the request by its last answer, or free it."""
        batcher, answers = self.shared.batcher, self.shared.answers[name]
        if name in self.shared.failed:
            assert kind == "unreadable" and "has no row" in str(self.shared.failed[name]) and not answers
            return True
        assert answers == generate_alone(prompt, len(answers))[len(prompt) :]
        if len(answers) == count or UNREADABLE in answers:
            assert kind != "unreadable"
            batcher.free(name)
            return True
        if answers and len(batcher.tokens(name)) < len(prompt) + len(answers):
            batcher.extend(name, answers[-1])
        assert len(batcher.tokens(name)) == len(prompt) + len(answers)
        return False


@pytest.mark.parametrize(("blocks", "budget", "has_states"), [(200, 64, False), (60, 9, False), (80, 30, True)])
def test_eight_threads_under_one_lock(blocks: int, budget: int, has_states: bool) -> None:
    model = Carrier(has_cache=True) if has_states else Recorder()
    Picky(model, UNREADABLE)
    shared = Shared(Batcher(model, blocks, budget))
    clients = [Client(shared, thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(client.run) for client in clients]:
            done.result()
    assert sorted(shared.answers) == list(range(REQUESTS)) and 10 < len(shared.failed) < REQUESTS / 2
    assert not any(shared.answers[name] for name in shared.failed)
    assert sum(map(len, shared.answers.values())) > REQUESTS
    assert shared.batcher.waiting == [] and shared.batcher.usage().used == 0
