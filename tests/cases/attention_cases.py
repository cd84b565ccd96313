"""Random attention problems with data for them, which the property tests draw, run and compare."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import tvm
from hypothesis import strategies as st

from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem, Mask, Window, WindowOffset
from lowering.attention.reference import (
    DenseInputs,
    compute_reference,
    compute_scores,
    read_dense_inputs,
    split_batches,
)
from lowering.passes.tvm_workarounds.guard_divisions import guard_divisions
from tests.cases import cache_layout_cases, formula_cases
from tests.support.placed_arrays import borrow, guarded

FLOATS = ("float32", "float16", "bfloat16", "float64")
Results: TypeAlias = dict[str, np.ndarray]
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


@dataclass(frozen=True)
class Case:
    """A problem, the sizes of one call, and how its data are drawn. poisoned puts NaN and inf into K, V and mask.

    In a ragged batch, q_len is the largest of the batch; with mapped slots, kv_len is.
    """

    problem: AttentionProblem
    batch: int
    q_len: int
    kv_len: int
    mask_len: int
    past: int
    seed: int
    poisoned: bool


BATCHES = (1, 1, 1, 2, 2, 3, 3, 17, 0)
Q_LENGTHS = (1, 1, 1, 2, 3, 5, 8, 19, 33, 0)
KV_LENGTHS = (1, 2, 5, 5, 8, 8, 16, 33, 70, 0)


def cases(calls: int) -> st.SearchStrategy[list[Case]]:
    """Draw cases for any seed. If hypothesis drew each field, it would mostly vary the fields that it drew before."""
    return st.integers(0, 2**48).map(lambda seed: draw_cases(seed, calls))


def draw_cases(seed: int, calls: int, tensor_cores: bool = False) -> list[Case]:
    """Draw a problem and `calls` calls of it from the seed: one compiled kernel serves all. tensor_cores asks for a
    problem that tensor cores support."""
    rng = random.Random(seed)
    problem = _for_tensor_cores(rng) if tensor_cores else _problem(rng)
    problem = _make_dynamic(random.Random(f"{seed} given"), problem)
    return [_call(rng, problem) for _ in range(calls)]


def _make_dynamic(rng: random.Random, p: AttentionProblem) -> AttentionProblem:
    """Return the problem with some of its numbers passed at each call."""
    window = p.window
    if window is not None and rng.random() < 0.3:
        dynamic: dict[str, Any] = {"left": "given"} if window.left is not None else {}
        dynamic |= {"sinks": "given"} if window.left is not None and rng.random() < 0.5 else {}
        dynamic |= {"offset": "behind"} if p.lengths and rng.random() < 0.5 else {}
        window = dataclasses.replace(window, **dynamic)
    splits = rng.choice([1, 2, 3, 7]) if rng.random() < 0.2 else None
    return dataclasses.replace(p, window=window, layout=cache_layout_cases.make_dynamic(rng, p.layout), splits=splits)


def _for_tensor_cores(rng: random.Random) -> AttentionProblem:
    while True:
        p = _problem(rng)
        dtype, dims = rng.choice(["float16", "bfloat16"]), (rng.choice([8, 16, 40, 64]), rng.choice([8, 32, 64]))
        if p.qk_mode is None and "float64" not in (p.mask.dtype if p.mask else ""):
            types: dict[str, Any] = {"dtype": dtype, "v_dtype": dtype, "acc_dtype": "float32"}
            if p.layout.quantization is not None:  # quantized values and their groups fill whole chunks
                dims = rng.choice([16, 64]), rng.choice([16, 32, 64])
                quantization = dataclasses.replace(p.layout.quantization, group=8 if p.layout.quantization.group else 0)
                types["layout"] = dataclasses.replace(p.layout, quantization=quantization)
            head_dim, v_head_dim = dims if not p.layout.is_joint else dims[:1] * 2
            score = formula_cases.change(rng, "float32") if p.score is not None else None
            return dataclasses.replace(p, **types, score=score, head_dim=head_dim, v_head_dim=v_head_dim)


def _problem(rng: random.Random) -> AttentionProblem:
    """Draw from the cross product of sizes, rows, layouts, types, masks, windows, lengths, soft caps and outputs."""
    dtype = rng.choice(FLOATS)
    v_dtype = rng.choice([dtype, dtype, rng.choice(FLOATS)])
    batch, q_len, kv_len = (rng.choice([None, rng.choice(sizes)]) for sizes in (BATCHES, Q_LENGTHS, KV_LENGTHS))
    kv_heads = rng.randint(1, 3)
    q_heads = kv_heads * rng.randint(1, 3)
    layout = cache_layout_cases.layout(rng)
    rows = rng.choice(["bhtd", "bhtd", "bte", "thd", "te", "htd"])
    packed = "b" not in rows
    q_len, kv_len = None if packed and not q_len else q_len, None if layout.is_mapped and not kv_len else kv_len
    lengths = rng.choice([False, True]) or (packed and layout.has_lookup)
    full = (1 if packed else batch, q_heads, None if packed else q_len, kv_len)  # of a mask
    mask = rng.choice([None, _mask(rng, full, dtype), formula_cases.formula(rng)])
    if isinstance(mask, Mask) and mask.pad and mask.dims[0] == 1 and mask.dims[3] is None and rng.random() < 0.3:
        mask = dataclasses.replace(mask, starts=True)
    dims = [1, 2, 5, 7, 8, 9, 16, 17, 32, 40, 64]
    whole = layout.quantization is not None and (layout.quantization.group or layout.packing > 1)
    head_dim = rng.choice([16, 40, 64] if whole else dims)
    v_head_dim = rng.choice([head_dim, rng.choice([8, 32, 64] if whole else dims)])
    sides = [None, None, 0, 1, 2, 5, 100]
    offsets: list[WindowOffset] = ["zero", "past", "lengths"] if lengths else ["zero", "past"]
    sinks, free = rng.choice([0, 0, 1, 3, 20]), rng.random() < 0.2
    window = Window(rng.choice(sides), rng.choice([*sides, 0]), rng.choice(offsets), sinks, free)
    window = rng.choice([None, window])
    double = "float64" in (dtype, v_dtype, mask.dtype if mask else "") or rng.random() < 0.1
    acc_dtype = "float64" if double else "float32"
    return AttentionProblem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if layout.is_joint else v_head_dim,
        dtype=dtype,
        v_dtype=dtype if layout.is_joint else v_dtype,
        acc_dtype=acc_dtype,
        scale=rng.choice([head_dim**-0.5, 0.0, 0.3, 2.0, None]),
        score=formula_cases.change(rng, acc_dtype) if rng.random() < 0.2 else None,
        row_axes=rows,
        layout=layout,
        softcap=rng.choice([0.0, 0.0, 0.5, 30.0, 1e4]),
        window=window,
        lengths=lengths,
        mask=mask,
        sink=rng.choice([False, False, True]),
        qk_mode=None if packed else rng.choice([None, None, None, 0, 1, 2, 3]),
        lse=rng.choice([False, True]),
        max=rng.choice([False, True]),
    )


def _mask(rng: random.Random, full: tuple[int | None, ...], dtype: str) -> Mask:
    pad = rng.choice([False, True])
    batch, heads, rows = (rng.choice([1, size]) for size in full[:3])
    keys = rng.choice([full[3], 1, 6, None] if pad else [full[3], full[3], 1])
    dims = [batch, heads, rows, keys]
    axes = range(full[0] == 1, 3 if pad else 4)
    broadcasts = tuple(axis for axis in axes if dims[axis] == full[axis] and rng.random() < 0.1)
    for axis in broadcasts:
        dims[axis] = None
    kind = rng.choice(["bool", "bool", dtype, rng.choice(FLOATS)])
    return Mask(kind, (dims[0], dims[1], dims[2], dims[3]), pad, broadcasts)


def _call(rng: random.Random, problem: AttentionProblem) -> Case:
    sizes = ((problem.batch, BATCHES), (problem.q_len, Q_LENGTHS), (problem.kv_len, KV_LENGTHS))
    batch, q_len, kv_len = (rng.choice(drawn) if static is None else static for static, drawn in sizes)
    mask_len = kv_len
    if isinstance(problem.mask, Mask) and problem.mask.dims[3] is not None:
        mask_len = problem.mask.dims[3]
    elif isinstance(problem.mask, Mask) and problem.mask.pad:
        mask_len = rng.choice([kv_len, 1, max(0, kv_len - 3)])
    past = rng.randint(0, kv_len)
    return Case(problem, batch, q_len, kv_len, mask_len, past, rng.getrandbits(32), rng.choice([False, True]))


def arrays(case: Case) -> dict[str, Any]:
    """Return the inputs by parameter name: arrays and numbers."""
    p, rng = case.problem, np.random.default_rng(case.seed)
    result: dict[str, Any] = {}
    tokens = case.q_len
    if p.is_ragged:
        result["row_starts"] = starts = cache_layout_cases.row_starts(rng, case.batch, case.q_len)
        tokens = int(starts[-1]) + int(rng.integers(0, 3))
        if p.q_len is None:
            result["most_rows"] = case.q_len
    sizes = {"b": case.batch, "h": p.q_heads, "t": tokens, "d": p.head_dim, "e": p.q_heads * p.head_dim}
    result["q"] = rng.standard_normal([sizes[axis] for axis in p.row_axes]).astype(p.dtype)
    result |= cache_layout_cases.arrays(p, case.batch, case.kv_len, rng)
    if isinstance(p.mask, Formula):
        result |= formula_cases.parameters(p.mask, case.kv_len, rng)
    elif p.mask is not None:
        full = (case.batch, p.q_heads, tokens, case.mask_len)
        if p.mask.starts:
            result["key_starts"] = first = rng.integers(-1, 9, case.batch)
            full = (*full[:3], case.mask_len + int(first.max(initial=0)))
        ones = {axis for axis in p.mask.broadcasts if rng.random() < 0.5}
        shape = tuple(1 if axis in ones else full[axis] if d is None else d for axis, d in enumerate(p.mask.dims))
        hidden = rng.random(shape) < rng.choice([0.0, 0.3, 0.9])
        hidden |= rng.random((*shape[:3], 1)) < 0.2  # whole rows
        if p.mask.dtype == "bool":
            result["mask"] = ~hidden
        else:
            values = rng.standard_normal(shape).astype(p.mask.dtype)
            lowest = ml_dtypes.finfo(p.mask.dtype).min  # finite: it hides no row without other values
            values[rng.random(shape) < 0.1] = lowest if rng.random() < 0.5 else 0
            result["mask"] = np.where(hidden, -np.inf, values).astype(p.mask.dtype)
    if p.score is not None:
        result |= formula_cases.parameters(p.score, case.kv_len, rng)
    if p.scale is None:
        result["scale"] = np.array([rng.choice([0.2, -0.4])], p.acc_dtype)
    if p.sink:
        sink = rng.standard_normal(p.q_heads) * rng.choice([1.0, 30.0])
        result["sink"] = np.where(rng.random(p.q_heads) < 0.2, -np.inf, sink).astype(p.dtype)
    if p.lengths:
        result["lengths"] = rng.integers(-2, case.kv_len + 4, case.batch)
    for name in ("lefts", "sink_keys"):
        if name in p.inputs():
            result[name] = rng.integers(-1, rng.choice([4, 30]), case.batch)
    if "past" in p.scalars():
        result["past"] = case.past
    if "free_batches" in p.scalars():
        result["free_batches"] = int(rng.integers(0, case.batch + 2))
    if case.poisoned:
        for name in ("k", "v", "kv", "k_scale", "v_scale", "kv_scale", "mask"):
            x = result.get(name)
            if x is not None and x.dtype not in (bool, np.int8) and x.dtype.itemsize > 1:
                where = rng.random(x.shape) < 0.3 / x.shape[-1] ** (name != "mask")
                result[name] = np.where(where, rng.choice([np.nan, np.inf, -np.inf]), x).astype(x.dtype)
    return result


def outputs(case: Case, inputs: dict[str, Any]) -> Results:
    """Return arrays for the outputs by parameter name, full of NaN, between guard pages."""
    p, q = case.problem, inputs["q"]
    sizes = dict(zip(p.row_axes, q.shape)) | {"d": p.v_head_dim, "e": p.q_heads * p.v_head_dim}
    shapes = {
        "y": tuple(sizes[axis] for axis in p.row_axes),
        "qk": (case.batch, p.q_heads, case.q_len, case.kv_len),
        "lse": (sizes["t"], p.q_heads) if p.is_ragged else (case.batch, p.q_heads, case.q_len),
    }
    shapes["max"] = shapes["lse"]
    types = {"y": p.dtype, "qk": p.dtype, "lse": p.acc_dtype, "max": p.acc_dtype}
    return {name: guarded(np.full(shapes[name], np.nan, types[name]), at_end(case)) for name in p.outputs()}


def run(case: Case, inputs: dict[str, Any], make: Callable[[AttentionProblem], tvm.IRModule]) -> Results:
    """Compile and call `make(problem)`. Arrays lie between guard pages, mostly aligned to their elements alone."""
    p, results = case.problem, outputs(case, inputs)
    tensors = {name: x if isinstance(x, int) else borrow(guarded(x, at_end(case))) for name, x in inputs.items()}
    tensors |= {name: borrow(x) for name, x in results.items()}
    kernel = _compiled(p, make)["attention"]
    kernel(*(tensors[name] for name in p.parameters()))
    return results


@functools.lru_cache(maxsize=64)
def _compiled(problem: AttentionProblem, make: Callable[[AttentionProblem], tvm.IRModule]) -> tvm.runtime.Module:
    return tvm.compile(guard_divisions(make(problem)), target=TARGET)


def at_end(case: Case) -> bool:
    """Return whether the case's arrays end at a guard page; else they begin at one."""
    return case.seed % 4 > 0


def check(case: Case, inputs: dict[str, Any], results: Results, rounding: float = 0.0) -> None:
    """Assert that the results equal the reference up to rounding.

    The kernel's rounding of probabilities counts, too, and then that of Q or K with scales of channels or groups.

    Rows that see NaN or inf are skipped: their results are undefined. All others must be untouched by poison, and
    so must packed rows outside all batches.
    """
    p = case.problem
    expected, dense = compute_reference(p, **inputs), read_dense_inputs(p, inputs)
    logits = compute_scores(p, dense, inputs).masked
    size = _magnitude(case, inputs, dense, logits)
    with np.errstate(all="ignore"):
        clean = ~_sees_poison(case, inputs, dense)
        epsilon = max(float(np.finfo(dtype).eps) for dtype in (p.acc_dtype, *_computed(p)))
        quantization = p.layout.quantization
        has_scales = quantization is not None and (quantization.channels or quantization.group > 0)
        by_row = epsilon * 32 + (epsilon * 8 + (rounding if has_scales else 0)) * size.max(-1, initial=0)
        v_size = np.nanmax(np.where(np.isfinite(dense.v), abs(dense.v), 0), initial=0)
        actual = {name: split_batches(p, name, x.astype(np.float64), inputs) for name, x in results.items()}
        expected = {name: split_batches(p, name, x, inputs) for name, x in expected.items()}
        is_row = np.arange(case.q_len) < dense.rows[:, None, None]
        by_element = (by_row[..., None] + rounding) * v_size
        _assert_close(actual["y"], expected["y"], by_element, (clean & is_row)[..., None], p.dtype, "Y")
        if p.is_ragged:
            _assert_untouched(case, inputs, results)
        for name in {"lse", "max"} & {*actual}:
            _assert_close(actual[name], expected[name], by_row, clean & is_row, p.acc_dtype, name)
        if p.qk_mode is None:
            return
        qk = expected["qk"]
        if p.qk_mode == 3:
            _assert_close(actual["qk"], qk, by_row[..., None], clean[..., None], p.dtype, "probabilities")
        else:
            defined = np.isfinite(qk) | ((qk == -np.inf) if p.qk_mode == 2 else False)
            _assert_close(actual["qk"], qk, epsilon * 32 * size, defined, p.dtype, "scores")


def _computed(p: AttentionProblem) -> set[str]:
    """Return the types in which formulas add and multiply: compilers may round once for both, NumPy twice."""
    nodes = [node for f in (p.mask, p.score) if isinstance(f, Formula) for node in f.value.walk()]
    return {node.dtype for node in nodes if node.op in ("add", "mul") and "float" in node.dtype}


def _assert_untouched(case: Case, inputs: dict[str, Any], results: Results) -> None:
    """Assert that packed output rows outside all batches are untouched."""
    starts = inputs["row_starts"]
    for name, x in results.items():
        axis = case.problem.row_axes.index("t") if name == "y" else 0
        assert np.isnan(x.take(range(starts[-1], x.shape[axis]), axis=axis).astype(np.float64)).all()


def _sees_poison(case: Case, inputs: dict[str, Any], dense: DenseInputs) -> np.ndarray:
    """Return whether a row sees a key with NaN or inf in K, V or the mask: [B, Hq, S]."""
    bias = compute_scores(case.problem, dense, inputs).bias
    finite = np.isfinite(dense.k).all(-1) & np.isfinite(dense.v).all(-1)
    return ((bias != -np.inf) & (~finite[:, :, None] | ~np.isfinite(bias))).any(-1)


def _magnitude(case: Case, inputs: dict[str, Any], dense: DenseInputs, logits: np.ndarray) -> np.ndarray:
    """Return the size that rounding errors of a logit are relative to: the sum of the sizes of its terms."""
    p = case.problem
    sizes = dataclasses.replace(dense, q=abs(dense.q), k=abs(dense.k))
    size = abs(compute_scores(p, sizes, inputs).raw)
    size = np.where(np.isfinite(size), size, 0)  # a soft cap can make a finite logit of it
    # In float64 tanh is good to an absolute epsilon, which the soft cap multiplies.
    size = size + (p.softcap if p.acc_dtype == "float64" else 0)
    # A key whose logit is far below the row's largest gets a weight of zero, however large it is itself.
    weighty = logits >= logits.max(-1, keepdims=True, initial=-np.inf) - 800
    return size + np.where(weighty & np.isfinite(logits), abs(logits), 0)


def _assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: np.ndarray, where: np.ndarray, dtype: str, what: str
) -> None:
    info = ml_dtypes.finfo(dtype)
    rounding = float(info.eps) * abs(expected) + float(info.smallest_subnormal)
    is_close = (actual == expected.astype(dtype).astype(np.float64)) | (abs(actual - expected) <= tolerance + rounding)
    wrong = ~(is_close | ~np.broadcast_to(where, actual.shape))
    if wrong.any():
        at = tuple(int(x) for x in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}{list(at)} is {actual[at]}, not {expected[at]} ({int(wrong.sum())} of {actual.size} wrong)"
        )
