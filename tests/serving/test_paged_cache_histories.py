"""A PagedKVCache behaves like a dictionary of token values, for any history of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from lowering.errors import InputError
from lowering.serving import PagedKVCache, PoolFullError
from tests.serving.paged_caches import (
    ANY,
    DIM,
    HEADS,
    IDS,
    count_columns,
    list_blocks,
    make_contents,
    read_values,
    snapshot_state,
    write_values,
)


@dataclass
class Model:
    """The expected state of a request: the id of each written token, or None, and the seeds of its values."""

    ids: list[int | None] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    reserved: int = 0

    def first(self, length: int | None) -> Model:
        return Model(self.ids[:length], self.seeds[:length])

    def leading_ids(self) -> list[Any]:
        return self.ids[: self.ids.index(None) if None in self.ids else None]


class Histories(RuleBasedStateMachine):
    """Values of tokens with ids depend on the ids up to theirs, as keys and values do; all others are unique."""

    @initialize(total=st.integers(4, 40), size=st.sampled_from([1, 2, 4]), layers=st.integers(1, 2))
    def start(self, total: int, size: int, layers: int) -> None:
        self.cache = PagedKVCache(total, size, layers=layers, kv_heads=HEADS, head_dim=DIM)
        self.cache.pool[:] = -1
        self.model: dict[Any, Model] = {}
        self.seeds_by_ids: dict[tuple[int | None, ...], int] = {}
        self.count = 0

    def make_seed(self, ids: list[int | None]) -> int:
        self.count += 1
        return self.count if None in ids else self.seeds_by_ids.setdefault(tuple(ids), self.count)

    def make_name(self) -> Any:
        """Return a name. Names of freed requests are used again, and are of several types."""
        return next(name for name in ["a", ("b", 1), 2, "d", 4, "e", "f", "g", "h", "i"] if name not in self.model)

    def list_requests(self, which: int) -> list[Any]:
        """Return all requests; `which` chooses the first."""
        start = which % len(self.model)
        return [*list(self.model)[start:], *list(self.model)[:start]]

    def choose_request(self, which: int) -> Any:
        return self.list_requests(which)[0]

    def write_tokens(self, request: Any, count: int, ids: list[int] | None) -> None:
        """Write all reserved tokens like a kernel, and advance by `count` of them."""
        state, size = self.model[request], self.cache.tokens_per_block
        start, end = len(state.ids), len(state.ids) + state.reserved
        if state.reserved:
            new_blocks = list_blocks(self.cache, request, end)[start // size :]
            other_blocks = [b for other, m in self.model.items() if other != request for b in self.blocks_of(other, m)]
            assert not {*new_blocks} & {*other_blocks}  # written blocks have one owner
            assert all(self.cache._blocks.count_owners(block) == 1 for block in new_blocks)
        for i in range(count):
            state.ids.append(ids[i] if ids is not None else None)
            state.seeds.append(self.make_seed(state.ids))
        noise = [2**17 + i for i in range(end - start - count)]
        write_values(self.cache, request, start, make_contents(self.cache, state.seeds[start:] + noise))
        self.cache.advance(request, count if ids is None else ids)
        state.reserved -= count

    def blocks_of(self, request: Any, state: Model) -> list[int]:
        return list_blocks(self.cache, request, len(state.ids) + state.reserved)

    def count_copies(self, counts: dict[Any, int]) -> int:
        """Return the number of shared blocks that these requests must copy."""
        owners = Counter(b for name, m in self.model.items() for b in self.blocks_of(name, m))
        writers: Counter[int] = Counter()
        for name in (name for name, count in counts.items() if count):
            start, request_blocks = len(self.model[name].ids), self.blocks_of(name, self.model[name])
            writers.update(request_blocks[start // self.cache.tokens_per_block :][:1])
        return sum(min(count, owners[block] - 1) for block, count in writers.items())

    def reserved(self, counts: dict[Any, int]) -> bool:
        """Reserve tokens, or check that a necessary refusal changes nothing. Return whether it was reserved."""
        needed = copies = self.count_copies(counts)
        for name, count in counts.items():
            state = self.model[name]
            more = count_columns(self.cache, len(state.ids) + count) - count_columns(
                self.cache, len(state.ids) + state.reserved
            )
            needed += max(0, more)
        before = snapshot_state(self.cache)
        if needed > before[3].free:
            with pytest.raises(PoolFullError) as error:
                self.cache.reserve_all(counts)
            refusal = error.value
            assert (refusal.needed, refusal.free, refusal.total) == (needed, before[3].free, before[3].total)
            assert snapshot_state(self.cache) == before
            return False
        pairs = self.cache.reserve_all(counts)
        assert len(pairs) == copies == len({target for _, target in pairs})
        assert not {source for source, _ in pairs} & {target for _, target in pairs}
        assert self.cache.usage().free == before[3].free - needed
        for name, count in counts.items():
            self.model[name].reserved = max(self.model[name].reserved, count)
        return True

    @precondition(lambda self: len(self.model) < 7)
    @rule(ids=st.lists(IDS, max_size=7), like=ANY, choice=ANY, whole=st.booleans())
    def add(self, ids: list[int], like: int, choice: int, whole: bool) -> None:
        """Add a prompt that begins like another request, and compute all or some of it at once."""
        if self.model:
            leading = self.model[self.choose_request(like)].leading_ids()
            ids = [*leading[: None if like % 2 else choice % (len(leading) + 1)], *ids]
        size, before, past, donor = self.cache.tokens_per_block, self.cache.usage(), 0, Model()
        for state in self.model.values():
            for end in range(size, len(ids), size):
                if end > past and state.leading_ids()[:end] == ids[:end]:
                    past, donor = end, state
        name = self.make_name()
        assert self.cache.add(name, np.array(ids, np.int64) if ids else None) == past
        assert self.cache.usage().free == before.free
        self.model[name] = Model(donor.ids[:past], donor.seeds[:past])
        if self.reserved({name: len(ids) - past}):
            end = len(ids) if whole else past + choice % (len(ids) - past + 1)
            self.write_tokens(name, end - past, ids[past:end])

    @precondition(lambda self: 0 < len(self.model) < 7)
    @rule(which=ANY, count=st.integers(1, 3))
    def fork(self, which: int, count: int) -> None:
        request = self.choose_request(which)
        for _ in range(count):
            name = self.make_name()
            if self.model[request].reserved:
                self.check_refused(lambda name=name: self.cache.fork(request, name))
                self.cache.truncate(request, len(self.model[request].ids))
                self.model[request].reserved = 0
            free = self.cache.usage().free
            self.cache.fork(request, name)
            assert self.cache.usage().free == free
            self.model[name] = self.model[request].first(None)

    @precondition(lambda self: len(self.model) > 2)
    @rule(which=ANY)
    def free(self, which: int) -> None:
        request = self.choose_request(which)
        self.cache.free(request)
        del self.model[request]

    @precondition(lambda self: self.model)
    @rule(which=ANY, length=ANY)
    def truncate(self, which: int, length: int) -> None:
        request = self.choose_request(which)
        state = self.model[request]
        # usually a few tokens, as after speculation
        left = max(0, len(state.ids) - length % 5) if length % 3 else length % (len(state.ids) + 1)
        self.cache.truncate(request, left)
        self.model[request] = state.first(left)

    @precondition(lambda self: self.model)
    @rule(which=ANY, counts=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def reserve(self, which: int, counts: list[int]) -> None:
        self.reserved(dict(zip(self.list_requests(which), counts)))

    @precondition(lambda self: any(m.reserved for m in self.model.values()))
    @rule(which=ANY, ids=st.none() | st.lists(IDS, min_size=9, max_size=9), count=st.integers(0, 9))
    def advance(self, which: int, ids: list[int] | None, count: int) -> None:
        reserving = [name for name, m in self.model.items() if m.reserved]
        request = reserving[which % len(reserving)]
        count = min(count, self.model[request].reserved)
        self.write_tokens(request, count, None if ids is None else ids[:count])

    @precondition(lambda self: self.model)
    @rule(which=ANY, steps=st.lists(st.lists(IDS, max_size=5), min_size=1, max_size=7))
    def call(self, which: int, steps: list[list[int]]) -> None:
        """Run one call of a batch: some requests have one token without an id, others have several with ids."""
        batch = dict(zip(self.list_requests(which), steps))
        if self.reserved({name: len(ids) or 1 for name, ids in batch.items()}):
            for name, ids in batch.items():
                self.write_tokens(name, len(ids) or 1, ids or None)

    @precondition(lambda self: self.model)
    @rule(which=ANY, by=st.integers(1, 9))
    def mistake(self, which: int, by: int) -> None:
        request = self.choose_request(which)
        state = self.model[request]
        self.check_refused(lambda: self.cache.advance(request, state.reserved + by))
        self.check_refused(lambda: self.cache.advance(request, [0] * (state.reserved + by)))
        self.check_refused(lambda: self.cache.truncate(request, len(state.ids) + by))
        self.check_refused(lambda: self.cache.reserve_all({request: by, "nobody": by}))
        self.check_refused(lambda: self.cache.add(request, state.leading_ids()))

    def check_refused(self, action: Callable[[], Any]) -> None:
        before = snapshot_state(self.cache)
        with pytest.raises(InputError):
            action()
        assert snapshot_state(self.cache) == before

    @invariant()
    def every_request_reads_what_it_wrote(self) -> None:
        cache = self.cache
        for name, state in self.model.items():
            expected = make_contents(cache, state.seeds)
            by_entry, by_slot = read_values(cache, name)
            assert np.array_equal(by_entry, expected) and np.array_equal(by_slot, expected)
        assert cache.lengths(self.model).tolist() == [len(state.ids) for state in self.model.values()]

    @invariant()
    def blocks_are_counted(self) -> None:
        cache, size, used = self.cache, self.cache.tokens_per_block, self.cache.usage()
        owners = Counter(b for name, m in self.model.items() for b in self.blocks_of(name, m))
        assert [cache._blocks.count_owners(block) for block in range(used.total)] == [
            owners[b] for b in range(used.total)
        ]
        assert sorted(cache._blocks._free) == [block for block in range(used.total) if not owners[block]]
        assert (used.used, used.free) == (len(owners), used.total - len(owners))
        assert used.shared == sum(count > 1 for count in owners.values())
        assert used.bytes == used.used * cache.pool[0].nbytes
        filled_slots: set[int] = set()
        for name, state in self.model.items():
            own = list_blocks(cache, name, len(state.ids))
            filled_slots |= {own[t // size] * size + t % size for t in range(len(state.ids))}
        assert used.tokens == len(filled_slots)
        assert used.filled == (len(filled_slots) / (used.used * size) if owners else 1)

    @invariant()
    def tables_end_with_the_last_block(self) -> None:
        if not self.model:
            return
        cache, layers = self.cache, self.cache.pool.shape[1]
        offsets, first = cache.block_offsets(self.model), cache.first_slots(self.model)
        longest = max(count_columns(cache, len(m.ids) + m.reserved) for m in self.model.values())
        assert offsets.shape == (len(self.model), 1, 2, max(1, longest)) and offsets.dtype == np.int32
        assert first.shape == (len(self.model), max(1, longest)) and first.dtype == np.int64
        for row, starts, (name, state) in zip(offsets, first, self.model.items()):
            own = self.blocks_of(name, state)
            assert not row[:, :, len(own) :].any() and not starts[len(own) :].any()
            assert row[0, :, : len(own)].tolist() == [[b * layers * 2 + kind for b in own] for kind in range(2)]

    @invariant()
    def the_index_contains_the_written_blocks(self) -> None:
        expected: Counter[tuple[int | None, ...]] = Counter()
        for state in self.model.values():
            leading, size = state.leading_ids(), self.cache.tokens_per_block
            expected.update(tuple(leading[:end]) for end in range(size, len(leading) + 1, size))
        actual: Counter[tuple[int | None, ...]] = Counter()

        def walk(prefix: Any, ids: tuple[int, ...]) -> None:
            for tokens, child in prefix.children.items():
                assert child.parent is prefix and child.length == len(ids) + len(tokens)
                actual[ids + tokens] = len(child.holders)
                walk(child, ids + tokens)

        walk(self.cache._prefixes.root, ())
        assert actual == expected


def run_histories(examples: int, steps: int, derandomize: bool) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_machine(Histories, settings=chosen)


def test_histories() -> None:
    run_histories(200, 40, derandomize=True)


@pytest.mark.slow
def test_long_histories() -> None:
    run_histories(1500, 80, derandomize=False)
