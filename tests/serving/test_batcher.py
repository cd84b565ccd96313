"""Batcher plans calls: each request's tokens in order, each once, for any other requests and any number of blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowering import Batcher, InputError, PoolFullError, RequestError
from tests.serving.digest_models import VOCABULARY, Carrier, Picky, Recorder, compute_digest, generate_alone
from tests.support.error_codes import raises


def generate_together(
    batcher: Batcher, prompts: dict[Any, list[int]], count: int, together: int
) -> dict[Any, list[int]]:
    queue, done, active = list(prompts), {}, 0
    while queue or active:
        while queue and active < together:
            name = queue.pop(0)
            batcher.add(name, prompts[name])
            active += 1
        for name, logits in batcher.step().items():
            batcher.extend(name, int(logits.argmax()))
            if len(tokens := batcher.tokens(name)) == len(prompts[name]) + count:
                done[name] = tokens
                batcher.free(name)
                active -= 1
    return done


@pytest.mark.parametrize("scales", [0, 1])
@pytest.mark.parametrize(("blocks", "budget"), [(200, 256), (30, 9), (14, 3), (10, 40)])
def test_every_request_gets_what_it_gets_alone(blocks: int, budget: int, scales: int) -> None:
    rng = np.random.default_rng(blocks)
    print(f"seed {blocks}")
    prompts: dict[Any, list[int]] = {k: rng.integers(0, VOCABULARY, rng.integers(1, 25)).tolist() for k in range(20)}
    for k in range(0, 20, 3):  # some begin like another prompt
        prompts[k] = prompts[(k + 7) % 20][:9] + prompts[k][:8]
    model = Recorder(scales=scales)
    batcher = Batcher(model, blocks, budget)
    assert generate_together(batcher, prompts, 12, 6) == {
        k: generate_alone(prompt, 12) for k, prompt in prompts.items()
    }
    assert model.max_tokens <= budget
    assert batcher.usage().used == 0 and not batcher.waiting


def test_equal_beginnings_share_blocks() -> None:
    batcher = Batcher(Recorder(), 30)
    for name in "ab":
        batcher.add(name, list(range(17)))
        batcher.step()
    assert batcher.usage().shared == 4


@pytest.mark.parametrize(("blocks", "slots"), [(200, None), (30, 4), (14, 6), (None, 2), (None, None), (None, 6)])
def test_states_are_those_of_their_request(blocks: int | None, slots: int | None) -> None:
    """The number of slots and their previous owners have no effect; equal beginnings share nothing."""
    rng = np.random.default_rng(11)
    prompts: dict[Any, list[int]] = {k: rng.integers(0, VOCABULARY, rng.integers(1, 25)).tolist() for k in range(20)}
    for k in range(0, 20, 3):
        prompts[k] = prompts[(k + 7) % 20][:9] + prompts[k][:8]
    model = Carrier(has_cache=blocks is not None)
    batcher = Batcher(model, blocks, 9, slots)
    assert batcher.usage().state_slots == batcher.usage().free_state_slots == (slots or 9)
    assert generate_together(batcher, prompts, 12, 6) == {
        k: generate_alone(prompt, 12) for k, prompt in prompts.items()
    }
    assert model.max_tokens <= 9 and max(model.slots) < (slots or 9)
    usage = batcher.usage()
    assert (usage.used, usage.free_state_slots) == (0, slots or 9) and not batcher.waiting


def test_states_after_a_failed_call_are_computed_again() -> None:
    """The failed call's writes to states are lost, and the tokens before are computed again."""
    model = Carrier(has_cache=False)
    batcher = Batcher(model)
    batcher.add("a", [5, 6])
    batcher.extend("a", int(batcher.step()["a"].argmax()))
    run = model.run

    def broken(inputs: Any) -> Any:
        run(inputs)
        raise ZeroDivisionError

    model.run = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        batcher.step()
    model.run = run  # type: ignore[method-assign]
    assert batcher.step()["a"].argmax() == compute_digest(batcher.tokens("a"))


def test_slots_of_idle_requests() -> None:
    batcher = Batcher(Carrier(has_cache=False), state_slots=1)
    batcher.add("a", [1])
    assert list(batcher.step()) == ["a"]
    batcher.add("b", [2])
    with raises("batcher.state_slots_exhausted"):
        batcher.step()
    batcher.free("a")
    assert batcher.step()["b"].argmax() == compute_digest([2])


def test_states_stay_where_blocks_are_copied() -> None:
    """A block that another request shares is copied before it is written; its number is not a slot's."""
    batcher = Batcher(Carrier(has_cache=True), 9, state_slots=1)
    batcher.add("a", [5, 6])
    batcher.extend("a", int(batcher.step()["a"].argmax()))
    assert batcher.cache is not None
    batcher.cache.fork("a", "somebody else")
    assert batcher.step()["a"].argmax() == compute_digest(batcher.tokens("a"))


def test_pools_that_the_model_does_not_have() -> None:
    with raises("batcher.blocks_unused"):
        Batcher(Carrier(has_cache=False), 4)
    with raises("batcher.state_slots_unused"):
        Batcher(Recorder(), 4, state_slots=4)
    with raises("argument.integer_invalid"):
        Batcher(Carrier(has_cache=True))


def test_nothing_waits() -> None:
    batcher = Batcher(Recorder(), 4)
    assert batcher.step() == {} and batcher.waiting == []
    batcher.add("a", [1])
    assert batcher.waiting == ["a"]
    assert list(batcher.step()) == ["a"] and batcher.step() == {}


def test_a_pool_too_small_says_so_and_goes_on() -> None:
    batcher = Batcher(Recorder(), 3)
    batcher.add("a", list(range(20)))
    with raises("batcher.blocks_exhausted"):
        batcher.step()
    batcher.free("a")
    batcher.add("b", [1, 2, 3])
    assert list(batcher.step()) == ["b"]


def test_a_failed_call_is_repeated() -> None:
    model = Recorder()
    batcher = Batcher(model, 9)
    batcher.add("a", [5, 6])
    run, model.run = model.run, lambda inputs: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        batcher.step()
    model.run = run  # type: ignore[method-assign]
    assert batcher.step()["a"].argmax() == compute_digest([5, 6])


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize(("wrong", "index"), [(("b",), 3), (("a",), 0), (("c", "d"), 11), (("a", "b", "d"), 5)])
def test_a_failing_request_ends_without_the_others(has_states: bool, wrong: tuple[str, ...], index: int) -> None:
    """The failing token may be at any index of the prompt; other requests of the call are answered in the same step."""
    model = Carrier(has_cache=True) if has_states else Recorder()
    Picky(model, 50)
    prompts = {name: [k, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9][:12] for k, name in enumerate("abcd")}
    for name in wrong:
        prompts[name][index] = 50
    batcher = Batcher(model, 40, 30)
    for name, prompt in prompts.items():
        batcher.add(name, prompt)
    answers, failed = {}, {}
    while batcher.waiting:
        try:
            answers |= batcher.step()
        except RequestError as error:
            assert all("has no row" in str(request_error) for request_error in error.errors.values())
            failed |= error.errors
            answers |= error.answers
    assert failed.keys() == set(wrong)
    assert {n: a.argmax() for n, a in answers.items()} == {
        n: compute_digest(prompts[n]) for n in prompts if n not in wrong
    }
    for name in wrong:
        with raises("batcher.name_unknown"):
            batcher.free(name)
    for name in answers:
        batcher.free(str(name))
    assert batcher.usage().used == 0


@pytest.mark.parametrize("has_states", [False, True])
def test_no_answer_is_lost_where_the_rest_is_cut_short(has_states: bool) -> None:
    """Requests are tried one by one, the first is answered, and then the process is interrupted."""
    model = Carrier(has_cache=True) if has_states else Recorder()
    batcher, prompts = Batcher(model, 40, 30), {name: [k, 7, 8] for k, name in enumerate("abc")}
    for name, prompt in prompts.items():
        batcher.add(name, prompt)
    run, calls = model.run, [0]

    def failing(inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise InputError("run.check_failed", "a token has no row")
        if calls[0] == 3:
            raise KeyboardInterrupt
        return run(inputs)

    model.run = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        batcher.step()
    model.run = run  # type: ignore[method-assign]
    answers = batcher.step()
    assert {name: answer.argmax() for name, answer in answers.items()} == {
        n: compute_digest(p) for n, p in prompts.items()
    }


def test_a_fork_is_not_answered_for_what_its_parent_was() -> None:
    for has_states in (False, True):
        batcher = Batcher(Carrier(has_cache=True) if has_states else Recorder(), 9)
        batcher.add("a", [1, 2])
        assert list(batcher.step()) == ["a"]
        batcher.fork("a", "b")
        assert batcher.waiting == []
        batcher.extend("b", 3)
        assert batcher.step()["b"].argmax() == compute_digest([1, 2, 3])


def test_the_only_one_that_fails_ends() -> None:
    model = Recorder()
    Picky(model, 50)
    batcher = Batcher(model, 9)
    batcher.add("a", [1])
    assert list(batcher.step()) == ["a"]
    batcher.extend("a", 50)
    with raises("batcher.request_failed"):
        batcher.step()
    assert batcher.step() == {} and model.calls == 2


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_answered_twice(seed: int) -> None:
    """A request that was evicted after its answer has another answer only after it was extended."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    model = Carrier(has_cache=True) if seed % 2 else Recorder()
    batcher = Batcher(model, 11, 9, 3 if seed % 2 else None)
    answered: dict[Any, int] = {}
    for turn in range(300):
        if len(answered) < 4:
            batcher.add(turn, rng.integers(0, VOCABULARY, rng.integers(1, 12)).tolist())
            answered[turn] = 0
        try:
            logits_by_request = batcher.step()
        except PoolFullError:
            batcher.free(next(iter(answered)))
            del answered[next(iter(answered))]
            continue
        for name, logits in logits_by_request.items():
            tokens = batcher.tokens(name)
            assert len(tokens) > answered[name] and logits.argmax() == compute_digest(tokens)
            answered[name] = len(tokens)
        for name in list(answered):
            count = len(batcher.tokens(name))
            if count == answered[name] and rng.random() < 0.5:
                if count < 20:
                    batcher.extend(name, int(rng.integers(0, VOCABULARY)))
                else:
                    batcher.free(name)
                    del answered[name]
    assert len(answered) > 1


def test_ids_outside_the_vocabulary() -> None:
    model = Recorder()
    model.manifest.served = replace(model.manifest.served, vocabularies={"ids": 60})
    batcher = Batcher(model, 9)
    for token in (60, -1, 2**31, 2**70):
        with raises("batcher.token_id_out_of_range"):
            batcher.add("a", [1, token])
    batcher.add("a", [59])
    with raises("batcher.token_id_out_of_range"):
        batcher.extend("a", 60)
    assert list(batcher.step()) == ["a"]


def test_nobody_is_put_back_in_vain() -> None:
    """A fork whose blocks belong to an older request frees nothing; few blocks do not help where more are needed."""
    model = Recorder()
    batcher = Batcher(model, 6)
    batcher.add("old", list(range(16)))
    batcher.step()
    batcher.add("large", [9] * 12)
    batcher.fork("old", "fork")
    batcher.add("small", [8] * 2)
    assert list(batcher.step()) == ["small"]
    for token in range(2):
        batcher.extend("fork", token)
        batcher.extend("small", token)
        assert sorted(batcher.step()) == ["fork", "small"]  # each reads one token, and tokens are not read again
    with raises("batcher.blocks_exhausted"):
        batcher.step()
    batcher.free("old")
    assert batcher.usage().tokens == 16 + 2 + 4
    assert batcher.step()["large"].argmax() == compute_digest([9] * 12)
    assert not batcher.waiting and batcher.usage().tokens == 12 + 4  # "fork" is evicted: "small" frees too little
    batcher.extend("fork", 2)
    assert batcher.waiting == ["fork"]


def test_refusals() -> None:
    batcher = Batcher(Recorder(context=8), 9)
    batcher.add("a", range(8))
    for text, call in {
        "there is a request 'a' already": lambda: batcher.add("a", [1]),
        "has 0 tokens, and the model was compiled for 1 to 8": lambda: batcher.add("b", []),
        "has 9 tokens, and the model was compiled for 1 to 8": lambda: batcher.add("b", range(9)),
        "must be a sequence of integers": lambda: batcher.add("b", [1.5]),
        "as many as the model was compiled for: free": lambda: batcher.extend("a", 1),
        "there is no request 'c'": lambda: batcher.extend("c", 1),
        "there is no request 'd'": lambda: batcher.free("d"),
        r"the name of a request must be hashable, and \[\] is not": lambda: batcher.add([], [1]),  # type: ignore[arg-type]
        f"must be ids from 0 to {2**31 - 1}, as int32 'ids' takes them, and {2**70} is not": (
            lambda: batcher.add("b", [1, 2**70])
        ),
        "and -1 is not": lambda: batcher.add("b", [1, -1]),
        f"and {2**31} is not": lambda: batcher.extend("a", 2**31),
        "token must be an integer": lambda: batcher.extend("a", -1),
    }.items():
        with pytest.raises(InputError, match=text):
            call()  # type: ignore[no-untyped-call]
    with raises("batcher.serve_required"):
        Batcher(SimpleNamespace(manifest=SimpleNamespace(served=None)), 4)  # type: ignore[arg-type]
