"""Decoding on GPUs: split-KV on tensor cores against the float64 reference, at odd sizes and numbers of splits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx

from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from lowering.attention.reference import compute_reference
from schedules.cuda.attention.attention import attention_kernel
from schedules.cuda.attention.attention_tiles import MmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.primitives.device import DEVICES, Device
from tests import cuda_emulation as emulated

GPU = DEVICES["sm_80"]
BLOCKS = 14
"""With two key/value heads and M <= 16, 7 splits for a batch of 1, 2 for one of 3, and 1 for one of 7."""
LOWEST = float(np.finfo(np.float32).min)
Arrays = dict[str, Any]


def problem(**changes: Any) -> AttentionProblem:
    """Return a problem of two query heads on each of two key/value heads, every size symbolic, float16."""
    defaults: dict[str, Any] = {
        **{"batch": None, "q_len": None, "kv_len": None, "q_heads": 4, "kv_heads": 2},
        **{"head_dim": 64, "v_head_dim": 64, "dtype": "float16", "v_dtype": "float16", "acc_dtype": "float32"},
    }
    values = defaults | changes
    return AttentionProblem(**{"scale": values["head_dim"] ** -0.5, **values})


def formula(dtype: str) -> Formula:
    """Return a formula: row i sees key j where j <= i + size_0 and table_0[j] is not 0; else it adds LOWEST."""
    b, h, i, j, size = (tirx.Var(name, "int64") for name in ("b", "h", "i", "j", "size"))
    table = tirx.decl_buffer((tirx.Var("n", "int64"),), "int64", "table")
    shown = tirx.all(j <= i + size, table[j] != 0)
    value = shown if dtype == "bool" else tirx.Select(shown, tirx.const(0, dtype), tirx.const(LOWEST, dtype))
    return Formula.from_tir(value, (b, h, i, j), [size], [table], short=False)[0]


BF16 = {"dtype": "bfloat16", "v_dtype": "bfloat16"}
PROBLEMS = {
    "full": problem(lse=True),
    "ragged, 3-D, odd dims": problem(
        **{"window": Window(right=0, offset="lengths"), "lengths": True, "head_dim": 80, "v_head_dim": 40},
        **{"row_axes": "bte", "layout": CacheLayout("bte"), "scale": -0.2},
    ),
    "added mask, soft cap, sink": problem(
        **BF16,
        mask=Mask("float32", (None, 1, None, None)),
        softcap=5.0,
        sink=True,
        lse=True,
        head_dim=72,
        v_head_dim=96,
    ),
    "many heads share keys": problem(
        q_heads=24, kv_heads=1, head_dim=128, v_head_dim=128, mask=Mask("bool", (None, None, 1, None)), lse=True
    ),
    "window, one token": problem(
        q_len=1,
        head_dim=256,
        v_head_dim=256,
        q_heads=2,
        window=Window(100, 0, "past"),
        layout=CacheLayout("bte"),
        lse=True,
    ),
    "formula that adds": problem(mask=formula("float32"), head_dim=32, v_head_dim=32),
    "formula that selects": problem(**BF16, mask=formula("bool"), head_dim=16, v_head_dim=24, lse=True),
}
SIZES = [(1, 2, 300), (3, 1, 133), (7, 3, 40)]


@functools.cache
def kernels() -> emulated.Module:
    functions: dict[str, tirx.PrimFunc] = {}
    for number, p in enumerate(PROBLEMS.values()):
        tiles = dataclasses.replace(DecodeTiles.default(p, GPU), blocks=BLOCKS, split=16, rows=72)
        functions[f"attention_{number}"] = attention_kernel(p, GPU, MmaTiles.default(p, GPU), tiles)
    return emulated.module(functions, arch=GPU.arch)


def draw(p: AttentionProblem, batch: int, q_len: int, kv_len: int) -> Arrays:
    """Draw inputs by parameter name. Masks hide a third of the pairs, all of some keys, and all keys of some rows."""
    rng = np.random.default_rng(kv_len)
    inputs: Arrays = {
        "q": rng.standard_normal((batch, p.q_heads, q_len, p.head_dim)),
        "k": rng.standard_normal((batch, p.kv_heads, kv_len, p.head_dim)),
        "v": rng.standard_normal((batch, p.kv_heads, kv_len, p.v_head_dim)),
    }
    if isinstance(p.mask, Mask):
        shape = tuple(n if d is None else d for n, d in zip((batch, p.q_heads, q_len, kv_len), p.mask.dims))
        hidden = rng.random(shape) < 0.3
        hidden[:, -1:, -1:] |= shape[1] * shape[2] > 1
        hidden[..., 20:23] = True
        values = rng.standard_normal(shape)
        values[:1, :, :1] = LOWEST  # finite: all keys of these rows weigh the same
        values = np.where(hidden, -np.inf, values)
        inputs["mask"] = ~hidden if p.mask.dtype == "bool" else values.astype(p.mask.dtype)
    if isinstance(p.mask, Formula):
        inputs |= {"size_0": kv_len // 3, "table_0": (np.arange(kv_len) % 5 != 2).astype(np.int64)}
    if p.sink:
        inputs["sink"] = rng.standard_normal(p.q_heads).astype(p.dtype)
    if p.lengths:
        inputs["lengths"] = rng.permutation([kv_len // 2, 0, kv_len + 2, 1, -3, kv_len - 1, 17])[:batch]
    if "past" in p.parameters():
        inputs["past"] = kv_len - 2
    return inputs


def with_formula(p: AttentionProblem, inputs: Arrays, q_len: int, kv_len: int) -> Arrays:
    """Return the inputs of the reference: the mask in place of the operands of a formula."""
    if not isinstance(p.mask, Formula):
        return inputs
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    shown = ((j <= i + inputs["size_0"]) & (inputs["table_0"] != 0))[None, None]
    rest = {name: x for name, x in inputs.items() if name not in ("size_0", "table_0")}
    return {**rest, "mask": shown if p.mask.dtype == "bool" else np.where(shown, 0, LOWEST)}


def stored(p: AttentionProblem, name: str, x: np.ndarray) -> np.ndarray:
    """Return an array [B, H, L, D] in the layout and type of q, k, v or y."""
    if (p.row_axes if name in "qy" else p.layout.axes) == "bte":
        x = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
    return np.ascontiguousarray(x).astype(p.v_dtype if name == "v" else p.dtype)


def check(name: str, inputs: Arrays, **how: Any) -> None:
    p, number = PROBLEMS[name], list(PROBLEMS).index(name)
    (batch, _, q_len, _), kv_len = inputs["q"].shape, inputs["k"].shape[2]
    inputs = inputs | {x: stored(p, x, inputs[x]) for x in "qkv"}
    outputs = {
        "y": stored(p, "y", np.full((batch, p.q_heads, q_len, p.v_head_dim), np.nan)),
        "lse": np.full((batch, p.q_heads, q_len), np.nan, np.float32),
    }
    names = p.parameters()
    after = kernels().call(f"attention_{number}", [(inputs | outputs)[x] for x in names], **how)
    got = dict(zip(names, after))
    reference_inputs = with_formula(p, inputs, q_len, kv_len)
    reference = compute_reference(p, **reference_inputs)
    want = reference["y"]
    seen = np.isfinite(want)
    assert seen.any() or not want.size
    # P is rounded to half precision, and so is Y.
    epsilon = float(ml_dtypes.finfo(p.dtype).eps)
    np.testing.assert_allclose(got["y"].astype(np.float64)[seen], want[seen], rtol=epsilon, atol=epsilon)
    if p.lse:
        lse = reference["lse"]
        np.testing.assert_allclose(got["lse"][np.isfinite(lse)], lse[np.isfinite(lse)], rtol=1e-6, atol=3e-6)
        assert (got["lse"][lse == -np.inf] == -np.inf).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_reference(name: str) -> None:
    p = PROBLEMS[name]
    for batch, q_len, kv_len in SIZES:
        inputs = draw(p, batch, q_len if p.q_len is None else p.q_len, kv_len)
        check(name, inputs, order="ascending", arrivals="late")
        check(name, inputs, order="descending", arrivals="last first")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ragged, 3-D, odd dims", ()),
        ("added mask, soft cap, sink", (21, 22)),
        ("many heads share keys", (22, 21)),
        ("window, one token", (3, -1)),
        ("formula that selects", (22, 52)),
    ],
)
def test_hidden_values_do_not_leak(name: str, keys: tuple[int, ...]) -> None:
    """Keys and values of NaN and infinity do not change rows that do not see them."""
    p = PROBLEMS[name]
    for batch, q_len, kv_len in ((1, 2, 300), (3, 3, 133)):
        inputs = draw(p, batch, q_len if p.q_len is None else 1, kv_len)
        for array, poison in (("k", (np.nan, np.inf)), ("v", (np.inf, np.nan))):
            for key, value in zip(keys, poison):
                inputs[array][:, :, key] = value
            for b, length in enumerate(inputs.get("lengths", [])):
                inputs[array][b, :, max(length - 1, 0) :] = np.nan  # the last query row sees one of them
        check(name, inputs)


def test_empty_sizes_are_no_work() -> None:
    for sizes in [(0, 1, 5), (2, 0, 5), (2, 1, 0)]:
        check("full", draw(PROBLEMS["full"], *sizes))


def test_a_formula_that_hides_all_keys_by_a_finite_number_gives_their_mean() -> None:
    inputs = draw(PROBLEMS["formula that adds"], 1, 2, 140) | {"size_0": -2}
    check("formula that adds", inputs)
    inputs["size_0"] = -1  # the second row sees one key
    check("formula that adds", inputs)


@pytest.mark.parametrize("name", ["full", "ragged, 3-D, odd dims"])
def test_more_rows_than_the_kernel_is_for_go_elsewhere(name: str) -> None:
    check(name, draw(PROBLEMS[name], 1, 40, 50))


@pytest.mark.no_gpu
@pytest.mark.parametrize("gpu", DEVICES.values(), ids=DEVICES)
def test_default_tiles_are_legal(gpu: Device) -> None:
    for dim, v_dim in ((8, 8), (64, 64), (80, 40), (128, 128), (256, 256), (256, 64)):
        p = problem(head_dim=dim, v_head_dim=v_dim)
        DecodeTiles.default(p, gpu).check(p, gpu)


@pytest.mark.no_gpu
def test_illegal_tiles_say_why() -> None:
    tiles = DecodeTiles.default(problem(), GPU)
    with pytest.raises(ValueError, match="keys = 24 must be a multiple of 16"):
        dataclasses.replace(tiles, keys=24).check(problem(), GPU)
    with pytest.raises(ValueError, match="bytes of shared memory must fit 166912"):
        dataclasses.replace(tiles, stages=40).check(problem(), GPU)
