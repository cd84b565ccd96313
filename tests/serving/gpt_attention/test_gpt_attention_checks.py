"""Legal calls of gpt_attention pass its checks; illegal ones are refused, by name and request, and change nothing."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lowering.errors import InputError
from lowering.functions.gpt_attention import gpt_attention
from lowering.functions.gpt_checks import ArgumentError, check_call, refuse_unknown
from tests.serving.gpt_attention.gpt_attention_cases import cases, malformed
from tests.serving.gpt_attention.gpt_attention_reference import Attention
from tests.serving.gpt_attention.gpt_cache_reference import Call
from tests.serving.gpt_attention.gpt_call_attributes import MAX_POSITIONS
from tests.serving.gpt_attention.gpt_call_drawing import Drawing
from tests.serving.gpt_attention.gpt_case_features import complete
from tests.serving.gpt_attention.gpt_malformed_calls import DEFECTS
from tests.serving.gpt_attention.gpt_malformed_types import Malformed, list_needed_blocks
from tests.support.error_codes import raises

LEGAL = 300
ROUND = sum(defect.times for defect in DEFECTS)
DEFAULTS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(gpt_attention).parameters.values()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}

Arguments = dict[str, Any]


def check_arguments(arguments: Arguments, contents: bool = True) -> None:
    """Check arguments as the function does."""
    options = dict(arguments)
    qkv = options.pop("qkv")
    refuse_unknown({name: value for name, value in options.items() if name not in DEFAULTS})
    check_call(qkv, DEFAULTS | options, contents)


def iterate_arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from iterate_arrays(element)


def list_bytes(arguments: Arguments) -> list[bytes]:
    return [array.tobytes() for array in iterate_arrays(list(arguments.values()))]


def draw_call(seed: int, **features: Any) -> Drawing:
    completed = complete(features, random.Random(seed), 500)
    assert completed is not None
    return Drawing(completed, np.random.default_rng(seed))


def test_legal_calls_pass() -> None:
    rng = np.random.default_rng(0)
    for case in cases(0, LEGAL):
        arguments = case.arrays(rng)
        before = list_bytes(arguments)
        check_arguments(arguments)
        check_arguments(arguments, contents=False)
        assert list_bytes(arguments) == before, case


def check_refusal(call: Malformed) -> None:
    before = list_bytes(call.arguments)
    with pytest.raises(call.error) as caught:
        check_arguments(call.arguments)
    text = str(caught.value)
    assert any(name in text for name in call.names), (call.name, text)
    named = {int(number) for number in re.findall(r"request (\d+)", text)}
    assert not call.requests or named & set(call.requests), (call.name, call.requests, text)
    assert list_bytes(call.arguments) == before, call.name
    if isinstance(caught.value, ValueError):
        assert isinstance(caught.value, InputError), call.name
        assert re.search(r"[^:]: [^:]+(: [^:]+)?\.$", text), text  # the remedy follows the problem


def test_illegal_calls_are_refused() -> None:
    names = set()
    for call in malformed(0, 2 * ROUND):
        check_refusal(call)
        names.add(call.name)
    assert names == {defect.name for defect in DEFECTS}


def test_contents_are_read_on_request_only() -> None:
    content_defects = {"an entry outside", "sequence_length", "two requests", "a beam outside", "too few columns"}
    calls = [call for call in malformed(1, ROUND) if call.name in content_defects]
    assert {call.name for call in calls} == content_defects
    for call in calls:
        check_arguments(call.arguments, contents=False)


# features for which the needed slots are not simply all after the first
_RING = {"window": "narrow", "one_more_block": True, "tokens_per_block": 2, "phase": "generation", "cross": "none"}
ADDRESSED: list[dict[str, Any]] = [
    {},
    _RING | {"compat": True},
    _RING | {"compat": False},
    {"window": "narrow", "sinks": "bubble", "chunks": "later"},
    {"beams": 3, "phase": "generation", "tokens_per_block": 2, "entries": "manager", "cross": "none"},
    {"beams": 2, "cross": "wide", "phase": "mixed"},
]


@pytest.mark.parametrize("seed", range(36))
def test_only_needed_entries_are_checked(seed: int) -> None:
    drawing = draw_call(seed, cache="paged", **ADDRESSED[seed % len(ADDRESSED)])
    offsets, needed = drawing.offsets(), list_needed_blocks(drawing)
    indices = list(itertools.product(*(range(size) for size in offsets.shape)))
    for b, beam, kind, column in random.Random(seed).sample(indices, min(len(indices), 100)):
        original = offsets[b, beam, kind, column]
        offsets[b, beam, kind, column] = -1
        if (b, beam, column) in needed:
            with raises("gpt_attention.block_out_of_range"):
                check_arguments(drawing.arguments)
        else:
            check_arguments(drawing.arguments)
        offsets[b, beam, kind, column] = original


@pytest.mark.parametrize("seed", range(12))
def test_only_needed_beams_are_checked(seed: int) -> None:
    window: dict[str, Any] = (
        {"beams": 1, "window": "narrow", "compat": seed % 4 == 0} if seed % 2 == 0 else {"beams": 3}
    )
    drawing = draw_call(seed, phase="generation", cross="none", **window)
    table, lengths = drawing.arguments["cache_indirection"], drawing.lengths
    read = {(b, token) for b, _, token in drawing.read if token >= lengths.prompt[b]}
    for b, token in itertools.product(range(len(table)), range(table.shape[2])):
        original = table[b, -1, token]
        table[b, -1, token] = table.shape[1]
        if (b, token) in read:
            with raises("gpt_attention.beam_out_of_range"):
                check_arguments(drawing.arguments)
        else:
            check_arguments(drawing.arguments)
        table[b, -1, token] = original


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tables_end_after_the_last_position(seed: int, compat: bool) -> None:
    features = {
        "streamingllm": True,
        "window": "narrow",
        "phase": "generation",
        "relative_bias": "none",
        "mask": "causal",
    }
    drawing = draw_call(seed, **features, logn=True, compat=compat, position="learned_absolute")
    queries, _ = drawing.positions(Attention(Call(**drawing.arguments)))
    table = drawing.arguments["logn_scaling"]
    drawing.arguments["logn_scaling"] = table[: max(queries) + 1]
    check_arguments(drawing.arguments)
    drawing.arguments["logn_scaling"] = table[: max(queries)]
    with raises("gpt_attention.table_too_small"):
        check_arguments(drawing.arguments)


@pytest.mark.parametrize("seed", range(12))
def test_longrope_has_a_table_for_each_length(seed: int) -> None:
    drawing = draw_call(seed, scaling="longrope", table="cos_sin", streamingllm=False)
    lengths = drawing.lengths.total
    for name, users in (
        ("rotary_cos_sin", [length for length in lengths if length <= MAX_POSITIONS]),
        ("long_rope_rotary_cos_sin", [length for length in lengths if length > MAX_POSITIONS]),
    ):
        table, longest = drawing.arguments[name], max(users, default=0)
        drawing.arguments[name] = table[:longest]
        check_arguments(drawing.arguments)
        drawing.arguments[name] = table[: max(longest - 1, 0)]
        if users:
            with raises("gpt_attention.table_too_small"):
                check_arguments(drawing.arguments)
        drawing.arguments[name] = table


@pytest.mark.parametrize("seed", range(8))
def test_masks_agree_where_there_are_keys(seed: int) -> None:
    drawing = draw_call(seed, mask_form="both")
    attention, mask = Attention(Call(**drawing.arguments)), drawing.arguments["attention_mask"]
    unread = np.ones(mask.shape, bool)
    for request in attention.requests:
        for row in request.rows:
            unread[row, : len(attention.keys(request))] = False
    mask[unread] = ~mask[unread]
    check_arguments(drawing.arguments)


def change(name: str, value: Callable[[Any], Any]) -> Callable[[Drawing], None]:
    def changed(drawing: Drawing) -> None:
        drawing.arguments[name] = value(drawing.arguments.get(name))

    return changed


def read_only(drawing: Drawing) -> None:
    drawing.pool().setflags(write=False)


def same_block_for_k_and_v(drawing: Drawing) -> None:
    b, beam, column = min(drawing.blocks_written)
    drawing.offsets()[b, beam, 0, column] = drawing.offsets()[b, beam, 1, column]


def lengths_that_overflow(drawing: Drawing) -> None:
    drawing.arguments["host_past_key_value_lengths"][0] = 2**63 - 1
    drawing.arguments["sequence_length"][0] = -(2**63)


def rows_that_overflow(drawing: Drawing) -> None:
    drawing.arguments["context_lengths"][:] = 2**62
    drawing.arguments["sequence_length"][:] = drawing.arguments["host_past_key_value_lengths"] + 2**62


CONTIGUOUS = {"cache": "contiguous", "cross": "none"}
PAGED = {"cache": "paged", "cross": "none"}
WIDE = {"phase": "context", "lengths_dtype": "int64", "window": "none", "mask": "causal", "redundant": False}
OTHERS: list[tuple[str, dict[str, Any], Callable[[Drawing], None]]] = [
    ("past_key_value is read-only", CONTIGUOUS, read_only),
    ("host_kv_cache_pool_pointers.* is read-only", PAGED | {"holder": "list"}, read_only),
    ("past_key_value is of type list", CONTIGUOUS, change("past_key_value", lambda x: x.tolist())),
    ("host_kv_cache_pool_pointers is of type ndarray", PAGED | {"holder": "list"},
     change("host_kv_cache_pool_pointers", lambda x: x[0])),
    ("kv_cache_block_offsets .* request 0", PAGED, same_block_for_k_and_v),
    ("context_lengths is of type list", {}, change("context_lengths", lambda x: x.tolist())),
    ("context_lengths is an array of >i4", {}, change("context_lengths", lambda x: x.astype(">i4"))),
    ("host_past_key_value_lengths of request 0", CONTIGUOUS | WIDE, lengths_that_overflow),
    ("context_lengths of request 0", CONTIGUOUS | WIDE, rows_that_overflow),
    ("host_request_types of request 0", CONTIGUOUS, change("host_request_types", lambda x: x + 2)),
    ("q_scaling is nan", {}, change("q_scaling", lambda x: float("nan"))),
    ("attn_logit_softcapping_scale is inf", {}, change("attn_logit_softcapping_scale", lambda x: float("inf"))),
    ("tp_rank is 2", {}, change("tp_rank", lambda x: 2)),
    ("use_cache is 'no'", {}, change("use_cache", lambda x: "no")),
    ("layer_idx is -1", {}, change("layer_idx", lambda x: -1)),
    ("num_heads is missing", {}, change("num_heads", lambda x: None)),
    ("multi_block_mode is -1", {}, change("multi_block_mode", lambda x: -1)),
    ("max_distance is 9, and relative_attention_bias is missing", {"relative_bias": "none", "cross": "none"},
     change("max_distance", lambda x: 9)),
    ("rope_scaling_config is 'llama3'", {"scaling": "llama3", "table": "none"},
     change("rope_scaling_config", lambda x: "llama3")),
    ("rotary_embedding_scale is 0", {"scaling": "linear", "table": "none", "rotary_dim": "all"},
     change("rotary_embedding_scale", lambda x: 0)),
    ("block_sparse_vertical_stride is 0", {"mask": "blocksparse"}, change("block_sparse_vertical_stride", lambda x: 0)),
]  # fmt: skip


@pytest.mark.parametrize("text, features, corrupt", OTHERS, ids=[text for text, _, _ in OTHERS])
def test_other_illegal_calls_are_refused(
    text: str, features: dict[str, Any], corrupt: Callable[[Drawing], None]
) -> None:
    drawing = draw_call(0, **features)
    corrupt(drawing)
    with pytest.raises(ArgumentError, match=text):
        check_arguments(drawing.arguments)


def test_a_call_without_requests_passes() -> None:
    none = np.zeros(0, np.int32)
    lengths = dict.fromkeys(("context_lengths", "host_request_types", "host_past_key_value_lengths"), none)
    cache = np.zeros((4, 2, 2, 8, 16), np.float32)
    call = {"qkv": np.zeros((0, 128), np.float32), "num_heads": 4, "num_kv_heads": 2, "hidden_size_per_head": 16}
    check_arguments({**call, **lengths, "sequence_length": none, "past_key_value": cache})


def test_settings_of_tensorrt_llm_that_ask_for_nothing_pass() -> None:
    refuse_unknown({"cp_size": 1, "is_mla_enabled_flag": False, "spec_decoding_use": None, "vision_start": -1})
    with pytest.raises(NotImplementedError, match="cp_size"):
        refuse_unknown({"cp_size": True})
