"""com.microsoft GroupQueryAttention and RotaryEmbedding against onnxruntime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import lowering

from .comparison import Comparison, import_node

RNG = np.random.default_rng(0)
HEADS, KV_HEADS, SIZE, POSITIONS = 4, 2, 16, 40


def draw_normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def add_call(
    case: Comparison,
    batch: int,
    rows: int,
    ends: list[int],
    past: int | None = None,
    *,
    dtype: str = "float32",
    packed: bool = False,
    angles: int = 0,
    size: int = SIZE,
    positions: np.ndarray | None = None,
    bias: tuple[int, int] | None = None,
    sink: bool = False,
    declared: int | str | None = None,
    is_total_constant: bool = False,
    symbolic: bool = True,
    **attributes: Any,
) -> None:
    """Add a node for `rows` new tokens, after which batch b has ends[b] tokens. past is the length of the cache.

    angles > 0 rotates. bias gives the batches and heads of attention_bias. declared is the length that the model
    declares for the cache and its update. Rows and slots after the end of a batch are undefined, so they are cleared.
    """
    total = max(ends)
    widths = [KV_HEADS * size, KV_HEADS * size]
    projections = [draw_normal(batch, rows, width, dtype=dtype) for width in (HEADS * size, *widths)]
    if packed:
        projections = [np.concatenate(projections, axis=2), None, None]
    caches = [None, None] if past is None else [draw_normal(batch, KV_HEADS, past, size, dtype=dtype) for _ in range(2)]
    cache = [draw_normal(POSITIONS, angles, dtype=dtype) for _ in range(2)] if angles else [None, None]
    inputs = [
        *projections,
        *caches,
        np.array(ends, np.int32) - 1,
        np.array(total, np.int32),
        *cache,
        positions,
        None if bias is None else draw_normal(*bias, rows, total, dtype=dtype),
        draw_normal(HEADS, dtype=dtype) if sink else None,
    ]
    dims: dict[int, Any] = {0: ("b", "s", projections[0].shape[2]), 5: ("b",), 9: ("b", "s")}
    dims |= {} if packed else {1: ("b", "s", widths[0]), 2: ("b", "s", widths[1])}
    cache_dims = ("b", KV_HEADS, "p" if declared is None else declared, size)
    dims |= {3: cache_dims, 4: cache_dims} if past is not None else {}
    if bias is not None:
        dims[10] = ("b" if bias[0] > 1 else 1, bias[1], "s", "t")

    def clear_undefined(results: list[np.ndarray]) -> list[np.ndarray]:
        y, *present = (x.copy() for x in results)
        for b, end in enumerate(ends):
            y[b, min(rows, end) :] = 0
            for x in present:
                x[b, :, end:] = 0
        return [y, *present]

    case.add(
        "GroupQueryAttention",
        inputs,
        ("", "", ""),
        dims=dims if symbolic else None,
        constant=[6] if is_total_constant else [],
        select=clear_undefined,
        output_dims=None if declared is None else {1: cache_dims, 2: cache_dims},
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=int(angles > 0),
        **attributes,
    )


def test_prompts() -> None:
    case, dtypes = Comparison(), itertools.cycle(("float32", "float16"))
    add_call(case, 1, 37, [37], dtype=next(dtypes))
    add_call(case, 3, 9, [9, 1, 5], dtype=next(dtypes), symbolic=False)
    add_call(case, 2, 9, [9, 4], dtype=next(dtypes), packed=True, scale=0.4, softcap=0.7)
    add_call(case, 2, 9, [9, 4], dtype=next(dtypes), causal=0, symbolic=False)
    add_call(case, 2, 9, [9, 4], 0, dtype=next(dtypes), local_window_size=3)
    add_call(case, 2, 9, [9, 4], 12, dtype=next(dtypes), local_window_size=1, smooth_softmax=1, symbolic=False)
    add_call(case, 2, 9, [9, 4], dtype=next(dtypes), sink=True, softcap=2.0, bias=(2, HEADS))
    add_call(
        case,
        2,
        9,
        [9, 9],
        dtype=next(dtypes),
        sink=True,
        smooth_softmax=1,
        local_window_size=30,
        bias=(1, 1),
        symbolic=False,
    )
    case.check()


def test_caches() -> None:
    """Growing caches, caches with room, and declared lengths of caches."""
    case, dtypes = Comparison(), itertools.cycle(("float32", "float16"))
    add_call(case, 1, 1, [8], 7, dtype=next(dtypes), symbolic=False)
    add_call(case, 2, 1, [8, 3], 7, dtype=next(dtypes), packed=True)
    add_call(case, 2, 1, [8, 3], 20, dtype=next(dtypes), local_window_size=4, bias=(2, 1), symbolic=False)
    add_call(case, 2, 1, [8, 3], 20, dtype=next(dtypes), declared="p", sink=True)
    add_call(case, 2, 1, [8, 3], 20, dtype=next(dtypes), declared=20, smooth_softmax=1)
    add_call(case, 2, 1, [8, 3], 20, dtype=next(dtypes), is_total_constant=True)
    add_call(case, 1, 5, [12], 7, dtype=next(dtypes), local_window_size=6, symbolic=False)
    add_call(case, 1, 5, [12], 20, dtype=next(dtypes), bias=(1, HEADS), softcap=1.0)
    add_call(case, 1, 5, [12], 20, dtype=next(dtypes), causal=0, symbolic=False)
    add_call(case, 2, 5, [5, 3], 20, dtype=next(dtypes), declared=20)
    case.check()


def test_rotary_inside() -> None:
    case, dtypes = Comparison(), itertools.cycle(("float32", "float16"))
    add_call(case, 2, 9, [9, 4], dtype=next(dtypes), angles=8)
    add_call(case, 2, 9, [9, 4], 12, dtype=next(dtypes), angles=8, packed=True, rotary_interleaved=1, symbolic=False)
    add_call(case, 2, 1, [8, 3], 7, dtype=next(dtypes), angles=8, size=32)
    add_call(
        case, 2, 1, [8, 3], 20, dtype=next(dtypes), angles=8, rotary_interleaved=1, local_window_size=3, symbolic=False
    )
    add_call(case, 1, 5, [12], 20, dtype=next(dtypes), angles=8, packed=True)
    # A first prompt starts at the first position and counts up; later calls take the positions as they are.
    for rows, ends, past in ((6, [6, 6], None), (6, [6, 4], 9), (1, [8, 3], 7), (3, [11], 20)):
        positions = RNG.integers(0, POSITIONS - 6, (len(ends), rows))
        add_call(case, len(ends), rows, ends, past, dtype=next(dtypes), angles=8, positions=positions, symbolic=False)
    case.check()


def test_norms_of_heads() -> None:
    """Compared with the same node after explicit norms: onnxruntime lacks a kernel for a CPU."""
    import onnx
    from onnx import helper

    from .comparison import assert_close, opsets

    x, k = draw_normal(2, 5, HEADS * SIZE), draw_normal(2, 5, KV_HEADS * SIZE)
    feeds = {"q": x, "k": k, "v": draw_normal(2, 5, KV_HEADS * SIZE), "wq": draw_normal(SIZE), "wk": draw_normal(SIZE)}
    feeds |= {"ends": np.array([4, 2], np.int32), "total": np.array(5, np.int32)}
    shared = {"domain": "com.microsoft", "num_heads": HEADS, "kv_num_heads": KV_HEADS}
    holes = ["", "", "ends", "total"] + [""] * 7
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", *holes, "wq", "wk"], ["y"], qk_norm_epsilon=0.1, **shared
    )
    wide = feeds["q"].astype(np.float64).reshape(2, 5, HEADS, SIZE), k.astype(np.float64).reshape(2, 5, KV_HEADS, SIZE)
    normalized = [
        (a / np.sqrt((a**2).mean(-1, keepdims=True) + 0.1) * feeds[w]).reshape(2, 5, -1).astype(np.float32)
        for a, w in zip(wide, ("wq", "wk"))
    ]
    bare = helper.make_node("GroupQueryAttention", ["nq", "nk", "v", *holes[:4]], ["z"], **shared)
    feeds |= {"nq": normalized[0], "nk": normalized[1]}
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["a", "b", "c"]) for n in "yz"]
    graph = helper.make_graph([node, bare], "g", values, outputs)
    results = lowering.compile(helper.make_model(graph, opset_imports=opsets(21), ir_version=10)).run(feeds)
    assert_close(results["y"], results["z"], "norms of heads")


def test_rotary_embedding() -> None:
    case = Comparison()
    for dtype in ("float32", "float16"):
        cos, sin = draw_normal(POSITIONS, 8, dtype=dtype), draw_normal(POSITIONS, 8, dtype=dtype)
        half = cos[:, :4].copy(), sin[:, :4].copy()
        flat, split = draw_normal(2, 5, HEADS * SIZE, dtype=dtype), draw_normal(2, HEADS, 5, SIZE, dtype=dtype)
        for positions in (RNG.integers(0, POSITIONS, (2, 5)), np.array([7])):
            by_row = {1: ("b", "s")} if positions.ndim == 2 else {}
            for interleaved in (0, 1):
                case.add(
                    "RotaryEmbedding",
                    [flat, positions, cos, sin],
                    dims={0: ("b", "s", HEADS * SIZE), **by_row},
                    interleaved=interleaved,
                )
            dims = {0: ("b", HEADS, "s", SIZE), **by_row}
            case.add("RotaryEmbedding", [split, positions, cos, sin], dims=dims)
            partial = {"num_heads": HEADS, "rotary_embedding_dim": 8}
            case.add("RotaryEmbedding", [flat, positions, *half], **partial)
            case.add("RotaryEmbedding", [split, positions, *half], dims=dims, interleaved=1, **partial)
    case.check()


F, I = "float32", "int32"
PLAIN: list[Any] = [(F, ("b", "s", 64)), (F, ("b", "s", 32)), (F, ("b", "s", 32)), None, None, (I, ("b",)), (I, ())]
GQA = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}


def with_input(k: int, dtype: str, dims: tuple[int | str, ...]) -> list[Any]:
    return (
        [*PLAIN, *[None] * (k - len(PLAIN)), (dtype, dims)]
        if k >= len(PLAIN)
        else [*PLAIN[:k], (dtype, dims), *PLAIN[k + 1 :]]
    )


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        (PLAIN, {"k_quant_type": "PER_TENSOR"}, "k_quant_type is 'PER_TENSOR'"),
        (PLAIN, {"v_quant_type": "PER_CHANNEL"}, "v_quant_type is 'PER_CHANNEL'"),
        (PLAIN, {"kv_cache_bit_width": 8}, "kv_cache_bit_width is 8"),
        (PLAIN, {"sliding_window_cache": 1, "local_window_size": 4}, "sliding_window_cache is 1"),
        (PLAIN, {"qk_output": 1}, "qk_output is 1"),
        (PLAIN, {"local_window_size": 0}, "local_window_size is 0"),
        (PLAIN, {"local_window_size": 4, "causal": 0}, "local_window_size is 4"),
        (PLAIN, {"do_rotary": 1}, "cos_cache is missing"),
        (PLAIN, {"kv_num_heads": 3}, "4 query heads do not divide"),
        (PLAIN, {"num_heads": 6, "kv_num_heads": 2}, "6 heads do not divide"),
        (with_input(12, F, (1,)), {}, "k_scale"),
        (with_input(11, F, (3,)), {}, "head_sink differs between the inputs: 3 and 4"),
        (with_input(10, F, (1, 1, 5)), {}, "attention_bias has rank 3"),
        (with_input(10, F, (1, 3, "s", "t")), {}, "attention_bias differs between the inputs: 3 and 4"),
        (with_input(3, F, ("b", 2, "p", 16)), {}, "one of past_key and past_value"),
        (with_input(2, F, ("b", "s", 16)), {}, "last dimension of value differs between the inputs: 16 and 32"),
        ([*PLAIN[:3], *[(F, ("b", 4, "p", 16))] * 2, *PLAIN[5:]], {}, "heads of the caches differs between"),
        (
            [*PLAIN[:3], *[(F, ("b", 2, n, 16)) for n in (7, 8)], *PLAIN[5:]],
            {},
            "length of past_key and past_value differs between the inputs: 7",
        ),
        ([*PLAIN[:3], *[(F, ("b", 2, 16))] * 2, *PLAIN[5:]], {}, "past_key has rank 3"),
        (with_input(2, "float16", ("b", "s", 32)), {}, "value is float16 and query is float32"),
        (with_input(0, F, ("b", "s", "d")), {}, "symbolic"),
    ],
)
def test_refusals(inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node("GroupQueryAttention", inputs, **{**GQA, **attributes})


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ([(1, 3, 8), (1, 3, 1), (9, 4), (9, 4)], {}, "position_ids has rank 3"),
        ([(1, 3), (1, 3), (9, 4), (9, 4)], {}, "input has rank 2"),
        ([(1, 3, 8), (1, 3), (1, 9, 4), (9, 4)], {}, "cos_cache has rank 3"),
        ([(1, 3, 8), (1, 3), (9, 2), (9, 2)], {"rotary_embedding_dim": 4}, "without num_heads"),
        ([(1, 3, 8), (1, 3), (9, 3), (9, 3)], {}, "heads of 6"),
        ([(1, 3, 8), (1, 3), (9, 4), (9, 4)], {"scale": 2.0}, "scale is 2"),
        ([(1, 2, 3, 8), (1, 3), (9, 3), (9, 3)], {}, "number of angles differs between the inputs: 3 and 4"),
    ],
)
def test_rotary_refusals(shapes: list[tuple[int, ...]], attributes: dict[str, Any], message: str) -> None:
    inputs = [(dtype, shape) for dtype, shape in zip((F, "int64", F, F), shapes)]
    with pytest.raises(lowering.NodeError, match=message):
        import_node("RotaryEmbedding", inputs, **attributes)
