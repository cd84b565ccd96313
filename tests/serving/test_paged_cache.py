"""Sharing, copies, refusals and usage of a PagedKVCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowering.errors import InputError
from lowering.serving import PagedKVCache
from tests.serving.paged_caches import DIM, HEADS, list_blocks, snapshot_state
from tests.support.error_codes import raises


def make_cache(blocks: int = 8, size: int = 4, dtype: Any = "float32") -> PagedKVCache:
    return PagedKVCache(blocks, size, layers=2, kv_heads=HEADS, head_dim=DIM, dtype=dtype)


def begin_request(cache: PagedKVCache, request: Any, tokens: int, ids: list[int] | None = None) -> None:
    """Add a request of so many tokens, whose ids are `ids` or missing."""
    past = cache.add(request, ids)
    cache.reserve(request, tokens - past)
    cache.advance(request, tokens - past if ids is None else ids[past:])


def test_prompts_share_whole_blocks_and_leave_a_token_to_compute() -> None:
    cache, ids = make_cache(), list(range(12))
    begin_request(cache, "a", 12, ids)
    for length, shared in [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]:
        assert cache.add("b", [*ids, 99][:length]) == shared == cache.length("b")
        cache.free("b")
    assert cache.add("b", [0, 1, 2, 3, 7, 5, 6, 7, 8]) == 4  # only the equal beginning
    assert cache.usage().shared == 1
    cache.free("a")
    assert cache.add("c", ids) == 4  # of "b", its last owner
    cache.free("b")
    cache.free("c")
    assert cache.add("d", ids) == 0  # freed requests share nothing


def test_equal_hashes_share_nothing() -> None:
    assert hash((-1,) * 4) == hash((-2,) * 4)
    cache = make_cache()
    begin_request(cache, "a", 4, [-1] * 4)
    assert cache.add("b", [-2] * 5) == 0
    assert cache.add("c", [-1] * 5) == 4


def test_ids_stay_shared_when_later_tokens_are_truncated() -> None:
    cache, ids = make_cache(), list(range(12))
    cache.add("a")
    cache.reserve("a", 9)
    cache.advance("a", ids[:6])
    cache.advance("a", 3)
    for length in (9, 8, 6):
        cache.truncate("a", length)
    cache.reserve("a", 2)
    cache.advance("a", ids[6:8])
    assert cache.add("b", ids) == 8


def test_tokens_are_shared_once_they_are_written() -> None:
    cache, ids = make_cache(), list(range(9))
    cache.add("a", ids)
    cache.reserve("a", 9)
    assert cache.add("b", ids) == 0
    cache.advance("a", ids[:6])
    assert cache.add("c", ids) == 4
    cache.advance("a", ids[6:])
    assert cache.add("d", ids) == 8
    cache.truncate("a", 7)
    assert cache.add("e", ids) == 8  # "d" still owns it
    cache.free("d")
    cache.free("e")
    assert cache.add("f", ids) == 4


def test_a_token_without_an_id_ends_what_is_shared() -> None:
    cache, ids = make_cache(), list(range(12))
    cache.add("a", ids)
    cache.reserve("a", 12)
    cache.advance("a", ids[:6])
    cache.advance("a", 1)
    cache.advance("a", ids[7:])
    assert cache.add("b", ids) == 4
    cache.truncate("a", 6)  # the remaining ids are complete
    cache.reserve("a", 6)
    cache.advance("a", ids[6:])
    assert cache.add("c", ids) == 8


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", ml_dtypes.bfloat16])
def test_a_shared_block_is_copied_bit_for_bit_when_it_is_written(dtype: Any) -> None:
    cache = make_cache(dtype=dtype)
    raw = cache.pool.view(np.uint8)
    raw[:] = np.random.default_rng(1).integers(0, 256, raw.shape)  # including NaN
    begin_request(cache, "a", 6)
    cache.fork("a", "b")
    cache.fork("a", "c")
    assert cache.usage().used == cache.usage().shared == 2
    (copied,) = cache.reserve("b", 1)
    assert copied == (list_blocks(cache, "a", 6)[1], list_blocks(cache, "b", 6)[1])
    assert np.array_equal(raw[copied[0]], raw[copied[1]])
    assert list_blocks(cache, "a", 4) == list_blocks(cache, "b", 4) == list_blocks(cache, "c", 4)
    assert len(cache.reserve_all({"a": 1, "c": 1})) == 1  # the last owner still has it
    assert cache.usage().used == 4 and cache.usage().shared == 1
    assert np.array_equal(raw[list_blocks(cache, "a", 6)], raw[list_blocks(cache, "c", 6)])
    assert cache.pool.dtype == np.dtype(dtype) and cache.pool.shape == (8, 2, 2, HEADS, 4, DIM)


def test_all_owners_of_a_block_but_the_last_need_a_copy() -> None:
    for total, enough in [(3, False), (4, True)]:
        cache = make_cache(total)
        begin_request(cache, "a", 6)
        cache.fork("a", "b")
        cache.fork("a", "c")
        counts = {"a": 1, "b": 2, "c": 1}
        if enough:
            assert len(cache.reserve_all(counts)) == 2 and cache.usage().free == 0
        else:
            with raises("batcher.blocks_exhausted"):
                cache.reserve_all(counts)


def test_tables_of_beams_and_prompts() -> None:
    cache = make_cache()
    begin_request(cache, "p", 6)
    for name, count in [("a", 5), ("r", 0)]:
        begin_request(cache, name, count)
    cache.fork("a", "b")
    cache.reserve_all({"a": 1, "b": 1})
    assert cache.first_slots(["p", "r", "a", "b"]).tolist() == [[0, 4], [0, 0], [8, 16], [8, 12]]
    entry = {b: [4 * b, 4 * b + 1] for b in range(8)}
    expected = [[[entry[0], entry[1]]] * 2, [[entry[2], entry[4]], [entry[2], entry[3]]]]
    actual = cache.block_offsets(["p", ["a", "b"]], beams=2)
    assert np.array_equal(actual, np.moveaxis(np.array(expected), 2, 3)) and actual.dtype == np.int32
    assert cache.block_offsets(["r"]).tolist() == [[[[0], [0]]]]
    assert cache.block_offsets(iter([["a"]]), beams=1).shape == (1, 1, 2, 2)
    assert cache.block_offsets([], beams=3).shape == (0, 3, 2, 1) and cache.first_slots([]).shape == (0, 1)
    assert cache.lengths(["b", "p"]).tolist() == [5, 6] and cache.lengths(["b"]).dtype == np.int32


def test_usage() -> None:
    cache = make_cache()
    assert cache.usage().filled == 1 and cache.usage().free == 8
    begin_request(cache, "a", 6)
    cache.fork("a", "b")
    cache.reserve("a", 3)
    used = cache.usage()
    assert (used.total, used.free, used.used, used.shared, used.tokens) == (8, 4, 4, 1, 8)
    assert used.bytes == cache.pool.nbytes // 2 and used.filled == 0.5


def test_a_full_pool_says_what_is_missing() -> None:
    cache = make_cache()
    begin_request(cache, "a", 14)
    cache.fork("a", "b")
    cache.add("c")
    before = snapshot_state(cache)
    for counts, subject, needed in [
        ({"c": 17}, "request 'c' needs 5 more blocks", 5),
        ({"b": 15}, "request 'b' needs 5 more blocks", 5),
        ({"a": 9, "b": 9, "c": 0}, "a batch of 3 requests needs 5 more blocks", 5),
        ({"c": 10**30}, "request 'c' needs", 25 * 10**28),
    ]:
        with raises("batcher.blocks_exhausted") as error:
            cache.reserve_all(counts)
        assert subject in str(error.value)
        assert (error.value.needed, error.value.free, error.value.total) == (needed, 4, 8)
        assert snapshot_state(cache) == before
    cache.reserve_all({"a": 6, "b": 2, "c": 8})
    with raises("batcher.blocks_exhausted"):
        cache.reserve("a", 7)


ODD: list[tuple[str, Callable[[PagedKVCache], Any]]] = [
    ("there is a request 'a' already", lambda c: c.add("a")),
    ("there is a request 'a' already", lambda c: c.add("a", [1])),
    ("there is a request 'a' already", lambda c: c.fork("b", "a")),
    ("there is a request 'b' already", lambda c: c.fork("b", "b")),
    ("there is no request 'x'", lambda c: c.fork("x", "y")),
    ("there is no request 'x'", lambda c: c.reserve("x", 1)),
    ("there is no request 'x'", lambda c: c.reserve_all({"a": 1, "x": 1})),
    ("there is no request 'x'", lambda c: c.advance("x", 1)),
    ("there is no request 'x'", lambda c: c.truncate("x", 0)),
    ("there is no request 'x'", lambda c: c.free("x")),
    ("there is no request 'x'", lambda c: c.length("x")),
    ("there is no request 'x'", lambda c: c.lengths(["a", "x"])),
    ("there is no request 'x'", lambda c: c.first_slots(["x"])),
    ("there is no request 'x'", lambda c: c.block_offsets([["a", "x"]], 2)),
    ("must be hashable, and \\['a'\\] is not", lambda c: c.add(["a"])),
    ("must be hashable, and \\['a'\\] is not", lambda c: c.reserve(["a"], 1)),
    ("must be hashable, and \\['a'\\] is not", lambda c: c.first_slots([["a"]])),
    ("tokens of request 'x' must be a sequence of integers", lambda c: c.add("x", [1.0])),
    ("tokens of request 'x' must be a sequence of integers", lambda c: c.add("x", 7)),
    ("tokens of request 'x' must be a sequence of integers", lambda c: c.add("x", np.zeros((1, 2), np.int64))),
    ("tokens of request 'a' must be a sequence of integers", lambda c: c.advance("a", "one")),
    ("tokens of request 'a' must be a sequence of integers", lambda c: c.advance("a", 1.0)),
    ("tokens of request 'a' must be an integer of at least 0, not -1", lambda c: c.advance("a", -1)),
    ("request 'a' has room for 2 tokens, and 3 are given", lambda c: c.advance("a", 3)),
    ("request 'a' has room for 2 tokens, and 3 are given", lambda c: c.advance("a", [1, 2, 3])),
    ("request 'b' has room for 0 tokens, and 1 are given", lambda c: c.advance("b", 1)),
    ("count of request 'a' must be an integer of at least 0, not -1", lambda c: c.reserve("a", -1)),
    ("count of request 'b' must be an integer of at least 0, not 1.5", lambda c: c.reserve_all({"a": 9, "b": 1.5})),
    ("counts must map requests", lambda c: c.reserve_all(["a"])),
    ("length of request 'a' must be an integer of at least 0, not -1", lambda c: c.truncate("a", -1)),
    ("length of request 'a' is 6, and cannot become 7", lambda c: c.truncate("a", 7)),
    ("request 'a' has room for 2 tokens that are not written", lambda c: c.fork("a", "x")),
    ("requests must differ, and 'a' is given twice", lambda c: c.lengths(["a", "b", "a"])),
    ("requests must differ, and 'a' is given twice", lambda c: c.first_slots(["a", "a"])),
    ("requests must differ, and 'b' is given twice", lambda c: c.block_offsets([["a", "b"], "b"], 2)),
    ("requests must have 2 beams each, and \\['a'\\] has 1", lambda c: c.block_offsets([["a"]], 2)),
    ("requests must have 1 beams each, and \\['a', 'b'\\] has 2", lambda c: c.block_offsets([["a", "b"]])),
    ("beams must be an integer of at least 1, not 0", lambda c: c.block_offsets(["a"], 0)),
    ("requests must be a list of names, not 'ab'", lambda c: c.first_slots("ab")),
    ("requests must be a list of names, not 1", lambda c: c.lengths(1)),
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_wrong_arguments_are_named_and_change_nothing(number: int) -> None:
    words, call = ODD[number]
    cache = make_cache()
    begin_request(cache, "a", 6, list(range(6)))
    begin_request(cache, "b", 9, list(range(9)))
    cache.reserve("a", 2)
    before = snapshot_state(cache)
    with pytest.raises(InputError, match=words):
        call(cache)
    assert snapshot_state(cache) == before


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("blocks must be an integer of at least 1, not 0", {"blocks": 0}),
        ("blocks must be fewer than 536870912", {"blocks": 2**29}),
        ("tokens_per_block must be an integer of at least 1, not 2.0", {"tokens_per_block": 2.0}),
        ("tokens_per_block must be a power of two, not 12", {"tokens_per_block": 12}),
        ("layers must be an integer of at least 1", {"layers": 0}),
        ("kv_heads must be an integer of at least 1", {"kv_heads": -1}),
        ("head_dim must be an integer of at least 1", {"head_dim": None}),
        ("dtype must be one of float32, .*, not float64", {"dtype": np.float64}),
        ("dtype must be one of float32, .*, not fp9", {"dtype": "fp9"}),
    ],
)
def test_wrong_pools_are_refused(words: str, changed: dict[str, Any]) -> None:
    arguments = {"blocks": 4, "tokens_per_block": 4, "layers": 2, "kv_heads": 1, "head_dim": 2, **changed}
    with pytest.raises(InputError, match=words):
        PagedKVCache(arguments.pop("blocks"), arguments.pop("tokens_per_block"), **arguments)


def test_a_long_prompt_is_a_long_chain() -> None:
    """The blocks of a request are not walked by recursion, nor in quadratic time."""
    count = 100_000
    cache = PagedKVCache(count + 1, 1, layers=1, kv_heads=1, head_dim=1, dtype="int8")
    ids = np.arange(count)
    begin_request(cache, "a", count, ids.tolist())
    assert cache.add("b", ids) == count - 1
    cache.fork("b", "c")
    cache.reserve("c", 1)
    assert cache.usage().shared == count - 1
    for name in "abc":
        cache.free(name)
    assert cache.usage().free == count + 1
