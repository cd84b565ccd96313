"""com.microsoft PagedAttention equals a float64 reference, and its caches bit for bit where nothing is rotated."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import lowering
from lowering.errors import NodeError
from tests.support.error_codes import raises

from ..expectations import value_info
from .comparison import import_node, opsets
from .paged_attention_reference import Arrays, paged_attention

INPUTS = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale",
    "attention_metadata",
)  # fmt: skip
# Configurations by their seeds, and the number of calls of each.
RUNS = {"CPU": (range(6), 4), "CPU, long": (range(100, 300), 10), "CUDA": ((1, 2, 10), 2),
        "CUDA, long": (range(100, 120), 2)}  # fmt: skip
CACHES = {"key_cache": "key_cache_out", "value_cache": "value_cache_out"}


@dataclass(frozen=True)
class Case:
    """A node and the inputs of its calls. poison: NaN in slots that are not read. hostile: any numbers in tables."""

    dtype: str
    heads: tuple[int, int]
    size: int
    block: int
    packed: bool
    codes: str
    k_quant: str
    v_quant: str
    angles: int
    interleaved: int
    offset: int
    mapped: bool
    sink: bool
    norms: bool
    window: int
    causal: int
    softcap: float
    latent: int
    unmapped: bool
    functional: bool
    symbolic: bool
    hostile: bool
    metadata: bool
    scale: float

    @property
    def attributes(self) -> dict[str, Any]:
        node_attributes: dict[str, Any] = {"num_heads": self.heads[0], "kv_num_heads": self.heads[1]}
        node_attributes |= {"do_rotary": 1, "rotary_interleaved": self.interleaved} if self.angles else {}
        node_attributes |= {"rotary_offset": self.offset} if self.offset else {}
        node_attributes |= {"local_window_size": self.window} if self.window > 0 else {}
        node_attributes |= {"is_causal": 0} if not self.causal else {}
        node_attributes |= {"softcap": self.softcap} if self.softcap else {}
        node_attributes |= {"scale": self.scale} if self.scale else {}
        node_attributes |= {"qk_norm_epsilon": 1e-3} if self.norms else {}
        node_attributes |= {"kv_cache_layout": "LATENT", "v_head_size": self.latent} if self.latent else {}
        if self.codes:
            node_attributes["k_quant_type"] = self.k_quant
            node_attributes |= {"v_quant_type": self.v_quant} if not self.latent else {}
            node_attributes["k_cache_dtype"] = self.codes.replace("_", "")
        return node_attributes


def drawn(rng: random.Random) -> Case:
    latent = rng.random() < 0.15
    kv_heads = 1 if latent else rng.choice([1, 2, 3])
    size = rng.choice([8, 16, 24, 40, 64])
    angles = rng.choice([0, 0, size // 2, 2, size // 4])
    return Case(
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        heads=(kv_heads * rng.choice([1, 2, 5]), kv_heads),
        size=size,
        block=rng.choice([1, 3, 16, 16, 32]),
        packed=not latent and rng.random() < 0.3,
        codes=rng.choice(["", "", "int8", "float8_e4m3fn"]),
        k_quant=rng.choice(["PER_TENSOR", "PER_CHANNEL"]),
        v_quant=rng.choice(["PER_TENSOR", "PER_CHANNEL"]),
        angles=angles,
        interleaved=rng.randrange(2),
        offset=rng.choice([0, size - 2 * angles]) if angles else 0,
        mapped=rng.random() < 0.25,
        sink=rng.random() < 0.3,
        norms=rng.random() < 0.25,
        window=rng.choice([-1, -1, 1, 5, 30]),
        causal=rng.choice([1, 1, 1, 0]),
        softcap=rng.choice([0.0, 0.0, 2.5]),
        latent=rng.choice([size, size // 2]) if latent else 0,
        unmapped=rng.random() < 0.3,
        functional=rng.random() < 0.5,
        symbolic=rng.random() < 0.7,
        hostile=rng.random() < 0.2,
        metadata=rng.random() < 0.2,
        scale=0.3 if latent else rng.choice([0.0, 0.4]),
    )


def arrays(case: Case, rng: np.random.Generator, sizes: tuple[int, int, int, int]) -> Arrays:
    """Draw inputs for (sequences, rows of the ragged batch, blocks, blocks of a sequence)."""
    batch, tokens, blocks, columns = sizes
    heads, kv_heads = case.heads
    kind = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    inputs: Arrays = {"query": normal(tokens, (heads + 2 * kv_heads * case.packed) * case.size)}
    if not case.packed:
        inputs["key"] = normal(tokens, kv_heads * case.size)
        if not case.latent:
            inputs["value"] = normal(tokens, kv_heads * case.size)
    gaps = int(rng.integers(0, 2))
    cuts = np.sort(rng.integers(0, tokens - gaps + 1, batch - 1)) if batch > 1 else np.zeros(0, int)
    ends = np.array([0, *cuts, tokens - gaps])
    counts = np.diff(ends)
    room = columns * case.block - counts
    past = np.array([rng.integers(0, max(n, 0) + 1) for n in room]) * (rng.random(batch) < 0.8)
    table = np.stack([rng.permutation(blocks)[:columns] for _ in range(batch)]) if batch * columns <= blocks else None
    if table is None or batch * columns <= blocks:
        order = rng.permutation(blocks)
        table = order[: batch * columns].reshape(batch, columns)
    if case.unmapped:
        table = np.where(rng.random(table.shape) < 0.25, rng.choice([-1, -7, blocks, 2**31 - 1], table.shape), table)
    if case.hostile:
        past = np.where(
            rng.random(batch) < 0.3, rng.choice([-1, -(2**31), 2**31 - 1, columns * case.block], batch), past
        )
        ends = np.where(rng.random(batch + 1) < 0.1, rng.choice([-5, 2**31 - 1, 0], batch + 1), ends)
        ends = np.maximum.accumulate(ends)
    inputs |= {"cumulative_sequence_length": ends, "past_seqlens": past, "block_table": table}
    if case.mapped:
        # Two rows never have one slot: which of them stays is undefined.
        slots = rng.permutation(blocks * case.block)[:tokens]
        slots = np.where(
            rng.random(tokens) < 0.2, rng.choice([-1, blocks * case.block, -(2**31), 2**31 - 1], tokens), slots
        )
        inputs["slot_mapping"] = slots
    inputs = {name: x.astype(np.int32) if x.dtype.kind == "i" else x for name, x in inputs.items()}
    shape = (blocks, case.block, kv_heads, case.size)
    for name, letter in (("key_cache", "k"), ("value_cache", "v")):
        if letter == "v" and case.latent:
            continue
        if not case.codes:
            inputs[name] = normal(*shape)
            continue
        values = rng.integers(-128, 128, shape) if case.codes == "int8" else rng.standard_normal(shape) * 30
        inputs[name] = values.astype(getattr(ml_dtypes, case.codes, case.codes))
        per_channel = (case.k_quant if letter == "k" else case.v_quant) == "PER_CHANNEL"
        scales = (kv_heads, 1, case.size) if per_channel else (1,)
        inputs[f"{letter}_scale"] = (rng.uniform(0.005, 0.03, scales) * (rng.random(scales) < 0.95)).astype(np.float32)
    if case.angles:
        angle = rng.uniform(-9, 9, (columns * case.block + 2, case.angles))
        inputs |= {"cos_cache": np.cos(angle).astype(kind), "sin_cache": np.sin(angle).astype(kind)}
    if case.sink:
        inputs["head_sink"] = normal(heads)
    if case.norms:
        inputs |= {"q_norm_weight": normal(case.size), "k_norm_weight": normal(case.size)}
    if case.metadata:
        inputs["attention_metadata"] = np.array([3, 4], np.int32)
    if not case.codes:
        poison_unseen(case, inputs)
    return inputs


def poison_unseen(case: Case, inputs: Arrays) -> None:
    """Write NaN to slots that the sequences of the call do not read."""
    seen = np.zeros(inputs["key_cache"].shape[:2], bool)
    for b, past in enumerate(inputs["past_seqlens"].tolist()):
        for t in range(max(min(past, inputs["block_table"].shape[1] * case.block), 0)):
            page = int(inputs["block_table"][b, t // case.block])
            if 0 <= page < len(seen):
                seen[page, t % case.block] = True
        if case.mapped or case.hostile:
            seen[:] = True
    for name in CACHES:
        if name in inputs:
            inputs[name][~seen] = np.nan


def model(case: Case, inputs: Arrays) -> onnx.ModelProto:
    names = [name if name in inputs else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    named = {"query": ("n",), "key": ("n",), "value": ("n",), "slot_mapping": ("n",), "past_seqlens": ("b",),
             "block_table": ("b", "columns"), "cumulative_sequence_length": ("b_1",),
             "cos_cache": ("positions",), "sin_cache": ("positions",)} | dict.fromkeys(CACHES, ("blocks",))  # fmt: skip

    def dims(name: str) -> tuple[int | str, ...]:
        shape = inputs[name].shape
        front = named.get(name, ()) if case.symbolic else ()
        return (*front, *shape[len(front) :])

    infos = [value_info(name, inputs[name].dtype.name, dims(name)) for name in names if name]
    width = case.heads[0] * (case.latent or case.size)
    outputs = {"output": (case.dtype, ("n" if case.symbolic else inputs["query"].shape[0], width))}
    if case.functional:
        outputs |= {new: (inputs[old].dtype.name, dims(old)) for old, new in CACHES.items() if old in inputs}
    output_infos = [value_info(name, *about) for name, about in outputs.items()]
    node = helper.make_node("PagedAttention", names, list(outputs), domain="com.microsoft", **case.attributes)
    graph = helper.make_graph([node], "g", infos, output_infos)
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


def check(number: int, calls: int, target: str = "cpu") -> None:
    rng, data = random.Random(number), np.random.default_rng(number)
    case = drawn(rng)
    compiled, donate = None, case.functional and number % 3 == 0
    for _ in range(calls):
        if compiled is None or case.symbolic:
            batch, columns = int(data.integers(1, 5)), int(data.integers(1, 5))
            sizes = batch, int(data.integers(1, 1 + min(20, columns * case.block))), batch * columns + 1, columns
        inputs = arrays(case, data, sizes)
        donated = [name for name in CACHES if name in inputs] if donate else []
        compiled = compiled or lowering.compile(model(case, inputs), target, donate=donated)
        before = {name: x.copy() for name, x in inputs.items()}
        want, *caches = paged_attention(before, case.attributes)
        got = compiled.run(inputs)
        there = ~np.isnan(want[:, 0])
        tolerance = {"float32": 3e-5, "float16": 6e-3, "bfloat16": 5e-2}[case.dtype]
        label = f"{number}: {case}"
        actual = got["output"].astype(np.float64)[there]
        np.testing.assert_allclose(actual, want[there], tolerance, tolerance, err_msg=label)
        for (old, new), cache in zip(CACHES.items(), caches):
            if cache is None:
                continue
            after = got[new] if case.functional else inputs[old]
            if case.functional and donate:
                assert after is inputs[old], f"{old} was copied, {label}"
            elif case.functional:
                assert inputs[old].tobytes() == before[old].tobytes(), f"{old} was written, {label}"
            if not (case.angles or case.norms):
                assert after.tobytes() == cache.tobytes(), f"{old}, {label}"
                continue
            close = np.isclose(
                *(x.astype(np.float64) for x in (after, cache)), 2e-2, 2e-2 + bool(case.codes), equal_nan=True
            )
            assert close.all(), f"{old}, {label}"


@pytest.mark.parametrize("number", RUNS["CPU"][0])
def test_equals_the_reference(number: int) -> None:
    check(number, RUNS["CPU"][1])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", RUNS["CPU, long"][0])
def test_equals_the_reference_at_length(number: int) -> None:
    check(number, RUNS["CPU, long"][1])


@pytest.mark.parametrize(("tokens", "batch"), [(0, 2), (1, 1), (5, 5)])
def test_sequences_without_rows(tokens: int, batch: int) -> None:
    plain = {
        "packed": False,
        "latent": 0,
        "unmapped": False,
        "codes": "",
        "hostile": False,
        "sink": False,
        "window": -1,
    }
    more = {"symbolic": True, "dtype": "float32", "mapped": True, "angles": 2, "offset": 0, "norms": True}
    case = replace(drawn(random.Random(3)), functional=True, **plain, **more)
    rng = np.random.default_rng(0)
    compiled = lowering.compile(model(case, arrays(case, rng, (2, 4, 5, 2))))
    inputs = arrays(case, rng, (batch, max(tokens, 1), 2 * batch + 1, 2))
    inputs["cumulative_sequence_length"] = np.array([0] * batch + [tokens], np.int32)
    for name in ("query", "key", "value", "slot_mapping"):
        inputs[name] = inputs[name][:tokens]
    want, keys, _ = paged_attention(inputs, case.attributes)
    got = compiled.run(inputs)
    np.testing.assert_allclose(got["output"], want, 1e-4, 1e-4)
    np.testing.assert_allclose(got["key_cache_out"], keys, 1e-4, 1e-4)


def test_a_past_length_whose_end_overflows() -> None:
    plain = {"packed": False, "latent": 0, "codes": "", "hostile": False, "unmapped": False, "norms": False}
    more = {"angles": 2, "offset": 0, "mapped": False, "functional": True, "symbolic": True, "dtype": "float32"}
    case = replace(drawn(random.Random(3)), **plain, **more)
    inputs = arrays(case, np.random.default_rng(0), (2, 4, 5, 2))
    inputs["past_seqlens"] = np.array([0, 2**63 - 1])
    inputs["cumulative_sequence_length"][:] = (0, 2, 4)
    want, keys, _ = paged_attention(inputs, case.attributes)
    got = lowering.compile(model(case, inputs)).run(inputs)
    np.testing.assert_allclose(got["output"], want, 1e-4, 1e-4)
    np.testing.assert_allclose(got["key_cache_out"], keys, 1e-4, 1e-4)


F, I = "float32", "int32"
SEPARATE: dict[str, Any] = {
    "query": (F, ("n", 64)), "key": (F, ("n", 32)), "value": (F, ("n", 32)), "key_cache": (F, ("p", 16, 2, 16)),
    "value_cache": (F, ("p", 16, 2, 16)), "cumulative_sequence_length": (I, ("c",)), "past_seqlens": (I, ("b",)),
    "block_table": (I, ("b", "m")),
}  # fmt: skip
HEADS = {"num_heads": 4, "kv_num_heads": 2}


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ({"query": (F, ("n", 1, 64))}, {}, "query has rank 3"),
        ({"query": ("float64", ("n", 64))}, {}, "key is float32 and query is float64"),
        ({"key": None}, {}, "one of key and value"),
        ({"key": (F, ("n", 48))}, {}, "last dimension of input 'x1' differs between the inputs: 32 and 48"),
        ({}, {"kv_num_heads": 3}, "4 query heads do not divide into 3"),
        ({}, {"num_heads": 6}, "6 heads do not divide"),
        ({"key_cache": (F, ("p", "s", 2, 16)), "value_cache": (F, ("p", "s", 2, 16))}, {}, "block size"),
        ({"key_cache": (F, ("p", 16, 32))}, {}, "rank 3"),
        ({"value_cache": (F, ("p", 8, 2, 16))}, {}, "block size differs between the inputs: 8 and 16"),
        ({"value_cache": None}, {}, "value_cache is missing"),
        ({"key_cache": (F, ("p", 16, 2, 8))}, {}, "dimension 3 of input 'x3' is 8, and must be 16"),
        ({"key_cache": ("int8", ("p", 16, 2, 16))}, {}, "int8"),
        ({"block_table": (F, ("b", "m"))}, {}, "block_table is float32"),
        ({"past_seqlens": (I, ("b", 1))}, {}, "past_seqlens is int32 of rank 2"),
        ({"slot_mapping": (I, ("n", 1))}, {}, "slot_mapping is int32 of rank 2"),
        ({"q_norm_weight": (F, (16,))}, {}, "one of q_norm_weight and k_norm_weight"),
        ({"head_sink": (F, (3,))}, {}, "head_sink differs between the inputs: 3 and 4"),
        ({}, {"do_rotary": 1}, "cos_cache is missing"),
        ({"cos_cache": (F, ("t", 9)), "sin_cache": (F, ("t", 9))}, {"do_rotary": 1}, "9 angles"),
        ({}, {"local_window_size": 0}, "local_window_size is 0"),
        ({}, {"kv_cache_layout": "RING"}, "kv_cache_layout is 'RING'"),
        ({}, {"kv_cache_layout": "LATENT"}, "kv_num_heads is 2"),
        ({}, {"v_head_size": 8}, "v_head_size is 8"),
        ({}, {"k_cache_dtype": "int8"}, "k_cache_dtype is 'int8'"),
        (dict.fromkeys(CACHES, ("uint8", ("p", 16, 2, 8))), {"k_cache_dtype": "int4"}, "k_cache_dtype is 'int4'"),
        ({"k_scale": (F, (1,))}, {}, "k_scale is given"),
    ],
)
def test_refusals(inputs: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    input_types = SEPARATE | inputs
    listed = [input_types.get(name) for name in INPUTS]
    with pytest.raises(NodeError, match=message):
        import_node("PagedAttention", listed, **(HEADS | attributes))


def test_a_latent_cache_needs_a_scale() -> None:
    input_types = {name: SEPARATE[name] for name in SEPARATE if not name.startswith("value")}
    input_types |= {"key": (F, ("n", 16)), "key_cache": (F, ("p", 16, 1, 16))}
    listed = [input_types.get(name) for name in INPUTS]
    more = {"num_heads": 4, "kv_num_heads": 1, "kv_cache_layout": "LATENT", "v_head_size": 8}
    with raises("paged_attention.scale_missing"):
        import_node("PagedAttention", listed, **more)
