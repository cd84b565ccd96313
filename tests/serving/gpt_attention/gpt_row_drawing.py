"""Rows, lengths, masks and tables of one random call of gpt_attention; gpt_call_drawing adds the caches.

Elements that must not be read are poison: NaN, or integers that change the result or are out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from tests.serving.gpt_attention.gpt_attention_reference import Attention
from tests.serving.gpt_attention.gpt_cache_reference import E4M3, Call
from tests.serving.gpt_attention.gpt_call_attributes import MAX_POSITIONS, make_attributes
from tests.serving.gpt_attention.gpt_case_features import ALIBI, Features

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
NONSENSE = (-1, -7, -(2**31), 2**31 - 1, 10**9, 99_991)

Arguments = dict[str, Any]
Item = TypeVar("Item")


def make_poison(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Return an array that must not be read: NaN, or extreme integers."""
    if dtype == np.dtype(np.int8):
        return rng.choice(np.array([-128, 127, 101], np.int8), shape)
    if dtype == E4M3:
        return np.full(shape, 0x7F, np.uint8).view(E4M3)
    return np.full(shape, np.nan).astype(dtype)


def surround_with_nan(values: list[float]) -> np.ndarray:
    """Return float32 (len(values)), inside a buffer that is NaN before and after it."""
    return np.array([np.nan, *values, np.nan, np.nan], np.float32)[1 : 1 + len(values)]


@dataclass(frozen=True)
class Lengths:
    """The requests of a call, lists of B numbers each, and the window of all of them."""

    generation: list[bool]
    past: list[int]
    count: list[int]  # rows of a context request, 1 in generation
    prompt: list[int]  # context_lengths
    encoder: list[int]
    window: int | None
    sinks: int

    @property
    def total(self) -> list[int]:
        return [past + count for past, count in zip(self.past, self.count)]


class RowDrawing:
    """The arguments of one call, collected in `arguments`."""

    def __init__(self, case: Features, rng: np.random.Generator) -> None:
        self.case, self.rng = case, rng
        self.T = DTYPES[case.dtype]
        self.ints = np.dtype(case.lengths_dtype)
        self.beams = 1 if case.beams == "none" else int(case.beams)
        self.heads, self.kv_heads = case.heads
        self.cross = case.cross != "none"
        self.lengths = self.draw_lengths()
        self.arguments: Arguments = make_attributes(case)

    def number(self, low: int, high: int) -> int:
        """Draw a number of low..high, both included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, values: Sequence[Item]) -> Item:
        return values[self.number(0, len(values) - 1)]

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32).astype(self.T)

    def nonsense(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw integers that are not a block and not a beam."""
        wide = (2**40, -(2**62)) if self.ints == np.dtype(np.int64) else ()
        return self.rng.choice(np.array([*NONSENSE, *wide], self.ints), shape)

    def array(self, values: Any) -> np.ndarray:
        return np.asarray(values).astype(self.ints)

    def at_border(self) -> bool:
        return self.case.scaling in ("dynamic", "longrope") and self.rng.random() < 0.4

    def draw_lengths(self) -> Lengths:
        case = self.case
        contexts = 0 if case.phase == "generation" else self.number(1, 3 if case.phase == "context" else 2)
        steps = 0 if case.phase == "context" else self.number(1, 3 if case.phase == "generation" else 2)
        if case.chunks == "later" and self.cross:
            contexts = max(contexts, 2)  # one that writes the encoder's tokens and one that finds them
        past = [0] * contexts
        if case.chunks == "later":
            past = [self.number(1, 40) if n == 0 or self.rng.random() < 0.6 else 0 for n in range(contexts)]
            if self.cross:
                past[-1] = 0
            self.rng.shuffle(past)
        count = [self.number(1, 20) if self.rng.random() < 0.85 else 1 for _ in range(contexts)]
        if self.at_border() and contexts:  # exactly at the border of dynamic and longrope, or one longer
            past[0] = self.number(1, 12) if past[0] else 0
            count[0] = MAX_POSITIONS + self.number(0, 1) - past[0]
        prompt = count.copy()
        for _ in range(steps):
            past.append(MAX_POSITIONS - self.number(0, 1) if self.at_border() else self.number(1, 40))
            count.append(1)
            prompt.append(self.number(1, past[-1]))
        size = case.tokens_per_block if case.cache == "paged" else 1
        sinks = {"none": 0, "zero": 0, "whole blocks": size * self.number(1, 2)}.get(case.sinks, 0)
        if case.sinks == "bubble":
            sinks = size * self.number(0, 2) + self.number(1, max(1, size - 1))
        window = None
        if case.window == "wide":
            window = max(sinks + 1, max(p + c for p, c in zip(past, count)) + self.number(0, 3))
        if case.window == "narrow":
            window = sinks + self.number(1, 10)
        encoder = [self.number(1, 30) if self.cross else 0 for _ in past]
        generation = [False] * contexts + [True] * steps
        return Lengths(generation, past, count, prompt, encoder, window, sinks)

    # rows

    def add_rows(self) -> None:
        """Add qkv and qkv_bias; rows beyond a length and columns that cross attention never reads are NaN."""
        case, lengths = self.case, self.lengths
        size = case.head_size
        counts = [self.beams if g else c for g, c in zip(lengths.generation, lengths.count)]
        used = self.heads * size if self.cross else (self.heads + 2 * self.kv_heads) * size
        columns = self.heads * size if case.cross == "narrow" else (self.heads + 2 * self.kv_heads) * size
        if case.rows == "packed":
            self.lead: tuple[int, ...] = (sum(counts),)
            rows = np.arange(sum(counts))
        elif case.phase == "generation":
            self.lead = (sum(counts), 1)
            rows = np.arange(sum(counts))
        else:
            longest = max(counts) + self.number(0, 3)
            self.lead = (len(counts), longest)
            rows = np.concatenate([b * longest + np.arange(c) for b, c in enumerate(counts)])
        flat = make_poison((int(np.prod(self.lead)), columns), self.T, self.rng)
        flat[rows, :used] = self.normal(len(rows), used)
        qkv = flat.reshape(*self.lead, columns)
        cuts = np.cumsum([self.heads * size, self.kv_heads * size])
        if case.parts == "three":
            self.arguments["qkv"] = [np.ascontiguousarray(array) for array in np.split(qkv, cuts, axis=-1)]
        else:
            self.arguments["qkv"] = qkv
        if case.qkv_bias:
            bias = make_poison((columns,), self.T, self.rng)
            bias[:used] = self.normal(used)
            self.arguments["qkv_bias"] = bias

    def add_lengths(self) -> None:
        case, lengths, arguments = self.case, self.lengths, self.arguments
        arguments["context_lengths"] = self.array(lengths.prompt)
        if case.cache != "none":
            arguments["host_request_types"] = self.array(lengths.generation)
            arguments["host_past_key_value_lengths"] = self.array(lengths.past)
            repeats = self.beams if case.long_lengths else 1
            arguments["sequence_length"] = self.array(np.repeat(lengths.total, repeats))
        if case.redundant:
            arguments["host_context_lengths"] = self.array(lengths.prompt)
        if lengths.window is not None:
            sizes = [lengths.window]
            if case.windows_per_layer:
                sizes = [lengths.sinks + self.number(1, 50) for _ in range(self.number(2, 3))]
                sizes[case.layer % len(sizes)] = lengths.window
            arguments["host_max_attention_window_sizes"] = self.array(sizes)
        if case.sinks != "none":
            arguments["host_sink_token_length"] = (
                lengths.sinks if case.sink_form == "int" else self.array([lengths.sinks])
            )
        if self.cross:
            arguments["encoder_input_lengths"] = self.array(lengths.encoder)
            self.add_cross_kv()

    def add_cross_kv(self) -> None:
        case, lengths = self.case, self.lengths
        writers = [
            encoder
            for generation, past, encoder in zip(lengths.generation, lengths.past, lengths.encoder)
            if not generation and past == 0
        ]
        columns = 2 * self.kv_heads * case.head_size
        if case.cross_rows == "packed":
            self.arguments["cross_kv"] = self.normal(sum(writers), columns)
        if case.cross_rows == "padded":
            padded = make_poison((len(writers), max(writers) + self.number(0, 3), columns), self.T, self.rng)
            for n, encoder in enumerate(writers):
                padded[n, :encoder] = self.normal(encoder, columns)
            self.arguments["cross_kv"] = padded
        if case.redundant:
            self.arguments["cross_kv_length"] = max(lengths.encoder)

    def add_indirection(self) -> None:
        """Add cache_indirection; entries that are not read are out of range."""
        if self.case.beams == "none":
            return
        lengths = self.lengths
        longest = max(p if g else 1 for p, g in zip(lengths.past, lengths.generation)) + self.number(0, 3)
        table = self.nonsense((len(lengths.past), self.beams, longest))
        for b, (generation, past, prompt) in enumerate(zip(lengths.generation, lengths.past, lengths.prompt)):
            if generation and prompt < past:
                shape = (self.beams, past - prompt)
                table[b, :, prompt:past] = self.rng.integers(0, self.beams, shape)
        self.arguments["cache_indirection"] = table

    # masks and biases

    def add_mask(self) -> None:
        """Add the mask; columns after the last key and rows after a length are noise."""
        case, lengths = self.case, self.lengths
        if case.mask != "custom_mask":
            return
        longest = max(lengths.encoder if self.cross else lengths.total)
        rows = int(np.prod(self.lead))
        columns = longest + self.number(0, 5)
        mask = self.rng.random((rows, columns)) < self.rng.choice([0.2, 0.6, 0.95], (rows, 1))
        mask[self.rng.random(rows) < 0.1] = False  # a row without visible keys
        if case.mask_form in ("bool", "both"):
            self.arguments["attention_mask"] = mask
        if case.mask_form != "bool":
            lanes = -(-columns // 32) + self.number(0, 1)
            bits = self.rng.random((rows, lanes * 32)) < 0.5
            bits[:, :columns] = mask
            packed = np.packbits(bits, axis=-1, bitorder="little").view("<u4").astype(np.uint32)
            if case.mask_form == "bits int32":
                packed = packed.view(np.int32)
            self.arguments["attention_packed_mask"] = packed

    def add_slopes(self) -> None:
        if self.case.position in ALIBI and self.case.slopes == "given":
            self.arguments["alibi_slopes"] = self.rng.uniform(0.02, 0.8, self.heads).astype(np.float32)

    def add_tables(self) -> None:
        """Add rotary tables, logn and explicit biases, whose entries for unused positions are NaN."""
        case, rng = self.case, self.rng
        attention = Attention(Call(**self.arguments))
        queries, keys = self.positions(attention)
        longest = max(queries | keys)
        if case.logn:
            table = make_poison((longest + 1 + self.number(0, 3),), np.dtype(np.float32), rng)
            for p in queries:
                table[p] = rng.uniform(0.6, 1.6)
            self.arguments["logn_scaling"] = table
        half = int(self.arguments.get("rotary_embedding_dim", 0)) // 2
        prefixes = ("", "long_rope_") if case.scaling == "longrope" else ("",)
        for prefix in prefixes:
            if case.table == "inv_freq":
                self.arguments[prefix + "rotary_inv_freq"] = rng.uniform(0.0, 1.0, half).astype(np.float32)
            elif case.table in ("cos_sin", "cos_sin flat"):
                table = make_poison((longest + 1 + self.number(0, 3), half, 2), np.dtype(np.float32), rng)
                for p in queries | keys:
                    table[p] = rng.uniform(-1.2, 1.2, (half, 2))
                self.arguments[prefix + "rotary_cos_sin"] = table.reshape(-1) if "flat" in case.table else table
        self.add_relative_bias(attention)

    def positions(self, attention: Attention) -> tuple[set[int], set[int]]:
        """Return the positions of queries and, for keys that are rotated when they are read, of keys."""
        queries, keys = set(), {0}
        for request in attention.requests:
            for i in range(len(request.rows)):
                if self.case.streamingllm and request.generation:
                    queries.add(attention.streaming_position(request))
                    keys |= set(range(attention.streaming_position(request) + 1))
                else:
                    queries.add(request.position(i))
        return queries, keys

    def add_relative_bias(self, attention: Attention) -> None:
        case, rng = self.case, self.rng
        if case.relative_bias == "none":
            return
        dtype = self.T if case.relative_dtype == "T" else np.dtype(np.float32)
        if case.relative_bias != "explicit":
            buckets = 4 + 2 * (
                (self.heads + case.head_size) % 7
            )  # a property of the model, and so the same in all of its calls
            self.arguments["relative_attention_bias"] = rng.standard_normal((self.heads, buckets)).astype(dtype)
            return
        longest = max(self.lengths.total)
        shape = (self.heads, longest + self.number(0, 3), longest + self.number(0, 3))
        table = make_poison(shape, dtype, rng)
        for request in attention.requests:
            for i in range(len(request.rows)):
                p = request.position(i)
                positions = {j: j for j in range(request.length)}
                if case.streamingllm and request.generation:
                    inside = [j for j in positions if attention.in_window(request, p, j)]
                    positions = {j: n for n, j in enumerate(inside)}
                    p = len(inside) - 1
                for head in range(self.heads):
                    seen = attention.visible(request, i, head) if case.poison_invisible else list(positions)
                    for j in seen:
                        table[head, p, positions[j]] = np.asarray(rng.standard_normal()).astype(dtype)
        self.arguments["relative_attention_bias"] = table
