"""Masks of all positions are matched by the keys that they hide and the biases that they add, or not at all."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from lowering.graph.caches.mask_patterns import (
    MaskPattern,
    convert_to_bias,
    find_left_windows,
    is_pattern_of,
    match_pattern,
)
from lowering.graph.caches.positions import Positions

TOKENS = 37
TOKEN, KEY = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]
CAUSAL = TOKEN >= KEY
SLOPES = np.array([0.5, 0.125], np.float32)[:, None, None]


def make_additive_mask(seen: np.ndarray, bias: np.ndarray | float = 0.0, dtype: str = "float32") -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.where(seen, np.broadcast_to(bias, np.broadcast_shapes(np.shape(bias), (1, TOKENS, TOKENS))),
                        np.finfo(dtype).min).astype(dtype)  # fmt: skip


WINDOW = CAUSAL & (TOKEN - KEY < 9)
CASES = {
    "causal, bool": (CAUSAL[None], MaskPattern(None)),
    "causal, added": (make_additive_mask(CAUSAL), MaskPattern(None)),
    "causal, in half precision": (make_additive_mask(CAUSAL, dtype="float16"), MaskPattern(None)),
    "window": (WINDOW[None], MaskPattern(8)),
    "window of one": ((TOKEN == KEY)[None], MaskPattern(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_windows(name: str) -> None:
    mask, expected = CASES[name]
    assert match_pattern(mask, 0) == expected
    for past in range(TOKENS):
        assert is_pattern_of(expected, mask[:, past:, :], past)


@pytest.mark.parametrize(
    ("bias", "by"), [(SLOPES * (KEY - TOKEN), "distance"), (SLOPES * KEY, "key"), (np.sin(TOKEN * KEY)[None], "pair")]
)
def test_biases(bias: np.ndarray, by: str) -> None:
    mask = make_additive_mask(CAUSAL, bias.astype(np.float32))
    pattern = match_pattern(mask, 0)
    assert pattern is not None and pattern.by == by and pattern.bias is not None
    np.testing.assert_allclose(np.exp(pattern.compute_bias(0, TOKENS)), np.exp(convert_to_bias(mask)), 1e-5)


def test_the_last_tokens_suffice() -> None:
    for mask, expected in CASES.values():
        assert match_pattern(mask[:, -4:], TOKENS - 4) == expected


@pytest.mark.parametrize(
    "seen", [np.ones_like(CAUSAL), TOKEN + 2 > KEY, TOKEN > KEY], ids=["all", "next", "not itself"]
)
def test_what_is_not_causal(seen: np.ndarray) -> None:
    assert match_pattern(seen[None], 0) is None


def test_one_bit_decides() -> None:
    mask = WINDOW.copy()
    mask[20, 14] = False
    assert not is_pattern_of(MaskPattern(8), mask[None], 0)
    pattern = match_pattern(mask[None], 0)
    assert pattern is not None and pattern.by == "pair"
    assert match_pattern(mask[None, 18:], 18) is None  # a table of all pairs uses all of them


def test_layers_of_one_mask_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder has dozens of masks, and a mask of a long context takes seconds."""
    layers = " ".join(f"y{k} = Attention (q, kv, kv, {('near', 'far', '')[k % 3]})" for k in range(30))
    proto = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        g (int64[1,S] ids, float[1,2,P,8] past, float[1,2,S,8] q, float[1,2,T,8] kv) => (float[1,2,S,8] y0)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 step = {{1}}, int64 first = {{0}}, int64 left = {{5}}> {{
            before = Shape <start = 2, end = 3> (past)
            new = Shape <start = 1, end = 2> (ids)
            total = Add (before, new)
            end = Squeeze (total)
            keys = Range (first, end, step)
            shifted = Range (first, end, step)
            row_keys = Slice (shifted, before, total, zero)
            rows = Unsqueeze (row_keys, one)
            distance = Sub (rows, keys)
            far = GreaterOrEqual (distance, first)
            inside = LessOrEqual (distance, left)
            near = And (far, inside)
            {layers}
        }}
    """)
    model = ir.from_proto(proto)
    inputs = {value.name: value for value in model.graph.inputs}
    positions = Positions(model, inputs["ids"], None, None, [inputs["past"]])
    calls: list[list[ir.Value]] = []
    compute = positions.at
    monkeypatch.setattr(positions, "at", lambda values, *where: calls.append(values) or compute(values, *where))
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    windows = find_left_windows(positions, attentions[:3], 100)
    once = len(calls)
    assert list(windows.values()) == [5, None, None]
    assert list(find_left_windows(positions, attentions, 100).values()) == [5, None, None] * 10
    assert len(calls) == 2 * once
