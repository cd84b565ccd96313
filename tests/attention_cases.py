"""Random attention problems with data for them: what the property tests draw, run and compare."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import formula_cases
import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from hypothesis import strategies as st

from lowering.attention.formula import Formula
from lowering.attention.problem import AttentionProblem, Mask, Offset, Window
from lowering.attention.reference import log_sum_exp, reference

FLOATS = ("float32", "float16", "bfloat16", "float64")
Results: TypeAlias = dict[str, np.ndarray]
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


@dataclass(frozen=True)
class Case:
    """A problem, the sizes of one call, and how its data are drawn. poisoned puts NaN and inf into K, V and mask."""

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
    """As `made`, for any seed. Drawn piece by piece, hypothesis would mostly vary what it drew before."""
    return st.integers(0, 2**48).map(lambda seed: made(seed, calls))


def made(seed: int, calls: int) -> list[Case]:
    """A problem and so many calls of it, which follow from the seed: one compiled kernel serves them all."""
    rng = random.Random(seed)
    problem = _problem(rng)
    return [_call(rng, problem) for _ in range(calls)]


def _problem(rng: random.Random) -> AttentionProblem:
    """The cross product of sizes, layouts, types, masks, windows, lengths, soft caps and qk modes."""
    dtype = rng.choice(FLOATS)
    v_dtype = rng.choice([dtype, dtype, rng.choice(FLOATS)])
    batch, q_len, kv_len = (rng.choice([None, rng.choice(sizes)]) for sizes in (BATCHES, Q_LENGTHS, KV_LENGTHS))
    kv_heads = rng.randint(1, 3)
    q_heads = kv_heads * rng.randint(1, 3)
    mask = rng.choice([None, _mask(rng, (batch, q_heads, q_len, kv_len), dtype), formula_cases.formula(rng)])
    dims = [1, 2, 5, 7, 8, 9, 16, 17, 32, 40, 64]
    head_dim = rng.choice(dims)
    lengths = rng.choice([False, True])
    sides = [None, None, 0, 1, 2, 5, 100]
    offsets: list[Offset] = ["zero", "past", "lengths"] if lengths else ["zero", "past"]
    window = rng.choice([None, Window(rng.choice(sides), rng.choice([*sides, 0]), rng.choice(offsets))])
    double = "float64" in (dtype, v_dtype, mask.dtype if mask else "") or rng.random() < 0.1
    return AttentionProblem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=rng.choice([head_dim, rng.choice(dims)]),
        dtype=dtype,
        v_dtype=v_dtype,
        acc_dtype="float64" if double else "float32",
        scale=rng.choice([head_dim**-0.5, 0.0, 0.3, 2.0]),
        q_layout=rng.choice(["bhsd", "bshd"]),
        kv_layout=rng.choice(["bhsd", "bshd"]),
        softcap=rng.choice([0.0, 0.0, 0.5, 30.0, 1e4]),
        window=window,
        lengths=lengths,
        mask=mask,
        sink=rng.choice([False, False, True]),
        qk_mode=rng.choice([None, None, None, 0, 1, 2, 3]),
        lse=rng.choice([False, True]),
    )


def _mask(rng: random.Random, full: tuple[int | None, ...], dtype: str) -> Mask:
    pad = rng.choice([False, True])
    batch, heads, rows = (rng.choice([1, size]) for size in full[:3])
    keys = rng.choice([full[3], 1, 6, None] if pad else [full[3], full[3], 1])
    dims = [batch, heads, rows, keys]
    broadcasts = tuple(axis for axis in range(3 if pad else 4) if dims[axis] == full[axis] and rng.random() < 0.1)
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
    """The inputs by parameter name: arrays, and scalars of formulas."""
    p, rng = case.problem, np.random.default_rng(case.seed)

    def rows(layout: str, heads: int, length: int, dim: int, dtype: str) -> np.ndarray:
        by_layout = {"bhsd": (case.batch, heads, length, dim), "bshd": (case.batch, length, heads * dim)}
        return rng.standard_normal(by_layout[layout]).astype(dtype)

    result: dict[str, Any] = {
        "q": rows(p.q_layout, p.q_heads, case.q_len, p.head_dim, p.dtype),
        "k": rows(p.kv_layout, p.kv_heads, case.kv_len, p.head_dim, p.dtype),
        "v": rows(p.kv_layout, p.kv_heads, case.kv_len, p.v_head_dim, p.v_dtype),
    }
    if isinstance(p.mask, Formula):
        result |= formula_cases.parameters(p.mask, case.kv_len, rng)
    elif p.mask is not None:
        full = (case.batch, p.q_heads, case.q_len, case.mask_len)
        ones = {axis for axis in p.mask.broadcasts if rng.random() < 0.5}
        shape = tuple(1 if axis in ones else full[axis] if d is None else d for axis, d in enumerate(p.mask.dims))
        hidden = rng.random(shape) < rng.choice([0.0, 0.3, 0.9])
        hidden |= rng.random((*shape[:3], 1)) < 0.2  # whole rows
        if p.mask.dtype == "bool":
            result["mask"] = ~hidden
        else:
            values = rng.standard_normal(shape).astype(p.mask.dtype)
            lowest = ml_dtypes.finfo(p.mask.dtype).min  # finite: hides no row that holds nothing else
            values[rng.random(shape) < 0.1] = lowest if rng.random() < 0.5 else 0
            result["mask"] = np.where(hidden, -np.inf, values).astype(p.mask.dtype)
    if p.sink:
        sink = rng.standard_normal(p.q_heads) * rng.choice([1.0, 30.0])
        result["sink"] = np.where(rng.random(p.q_heads) < 0.2, -np.inf, sink).astype(p.dtype)
    if p.lengths:
        result["lengths"] = rng.integers(-2, case.kv_len + 4, case.batch)
    if case.poisoned:
        for name in ("k", "v", "mask"):
            if name in result and result[name].dtype != bool:
                where = rng.random(result[name].shape) < 0.3 / result[name].shape[-1] ** (name != "mask")
                result[name] = np.where(where, rng.choice([np.nan, np.inf, -np.inf]), result[name]).astype(
                    result[name].dtype
                )
    return result


def outputs(case: Case) -> Results:
    """Arrays for the outputs by parameter name, full of NaN and not aligned beyond their elements."""
    p = case.problem
    y = (case.batch, p.q_heads, case.q_len, p.v_head_dim)
    if p.q_layout == "bshd":
        y = (case.batch, case.q_len, p.q_heads * p.v_head_dim)
    results = {"y": unaligned(np.full(y, np.nan, p.dtype))}
    if p.qk_mode is not None:
        results["qk"] = unaligned(np.full((case.batch, p.q_heads, case.q_len, case.kv_len), np.nan, p.dtype))
    if p.lse:
        results["lse"] = unaligned(np.full((case.batch, p.q_heads, case.q_len), np.nan, p.acc_dtype))
    return results


def run(case: Case, inputs: dict[str, Any], make: Callable[[AttentionProblem], tvm.IRModule]) -> Results:
    """Compiles and calls `make(problem)`. No array is aligned beyond its element."""
    p, results = case.problem, outputs(case)
    tensors = {name: x if isinstance(x, int) else borrow(unaligned(x)) for name, x in inputs.items()}
    tensors |= {name: borrow(x) for name, x in results.items()}
    kernel = _compiled(p, make)["attention"]
    kernel(*(tensors[name] if name != "past" else case.past for name in p.parameters()))
    return results


@functools.lru_cache(maxsize=64)
def _compiled(problem: AttentionProblem, make: Callable[[AttentionProblem], tvm.IRModule]) -> tvm.runtime.Module:
    return tvm.compile(make(problem), target=TARGET)


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts one element past a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64 + array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def borrow(array: np.ndarray) -> tvm.runtime.Tensor:
    """The array's own memory as a tensor (NumPy cannot export bfloat16, and gives empty arrays odd strides)."""
    if array.size == 0:
        return tvm.runtime.empty(array.shape, array.dtype.name)
    if array.dtype != ml_dtypes.bfloat16:
        return tvm_ffi.from_dlpack(array)
    return tvm_ffi.from_dlpack(array.view(np.uint16))._create_view(array.shape, "bfloat16")


def check(case: Case, inputs: dict[str, Any], results: Results) -> None:
    """Asserts that the results equal the reference up to rounding.

    Rows that see NaN or inf are left out: what they give is not defined. All others must be untouched by poison.
    """
    p = case.problem
    arguments = {**inputs, "past": case.past}
    y, qk = reference(p, **arguments)
    _, logits = reference(dataclasses.replace(p, qk_mode=2), **arguments)
    size = _magnitude(case, inputs, logits)
    with np.errstate(all="ignore"):
        clean = ~_sees_poison(case, inputs)
        epsilon = float(np.finfo(p.acc_dtype).eps)
        by_row = epsilon * (32 + 8 * size.max(-1, initial=0))
        v_size = np.nanmax(np.where(np.isfinite(inputs["v"]), abs(inputs["v"].astype(np.float64)), 0), initial=0)
        got = results["y"].astype(np.float64)
        if p.q_layout == "bshd":
            got, y = (x.reshape(case.batch, case.q_len, p.q_heads, p.v_head_dim).swapaxes(1, 2) for x in (got, y))
        _assert_close(got, y, by_row[..., None] * v_size, clean[..., None], p.dtype, "Y")
        if p.lse:
            lse = log_sum_exp(p, **{name: x for name, x in arguments.items() if name != "v"})
            _assert_close(results["lse"].astype(np.float64), lse, by_row, clean, p.acc_dtype, "lse")
        if p.qk_mode is None:
            return
        got = results["qk"].astype(np.float64)
        if p.qk_mode == 3:
            _assert_close(got, qk, by_row[..., None], clean[..., None], p.dtype, "probabilities")
        else:
            defined = np.isfinite(qk) | ((qk == -np.inf) if p.qk_mode == 2 else False)
            _assert_close(got, qk, epsilon * 32 * size, defined, p.dtype, "scores")


def _sees_poison(case: Case, inputs: dict[str, Any]) -> np.ndarray:
    """Whether a row sees a key with NaN or inf in K, V or the mask: [B, Hq, S]."""
    p = dataclasses.replace(case.problem, softcap=0.0, qk_mode=2)
    nothing = {name: np.zeros_like(inputs[name]) for name in ("q", "k", "v")}
    _, bias = reference(p, **{**inputs, **nothing}, past=case.past)
    finite = [np.isfinite(inputs[name].astype(np.float64)) for name in ("k", "v")]
    if p.kv_layout == "bshd":
        finite = [
            x.reshape(case.batch, case.kv_len, p.kv_heads, x.shape[2] // p.kv_heads).swapaxes(1, 2) for x in finite
        ]
    poisoned = ~(finite[0].all(-1) & finite[1].all(-1)).repeat(p.group, axis=1)[:, :, None]
    return ((bias != -np.inf) & (poisoned | ~np.isfinite(bias))).any(-1)


def _magnitude(case: Case, inputs: dict[str, Any], logits: np.ndarray) -> np.ndarray:
    """What rounding errors of a logit are relative to: the sum of the sizes of its terms."""
    p = case.problem
    plain_scores = dataclasses.replace(p, softcap=0.0, qk_mode=0)
    sizes = {**inputs, **{name: abs(inputs[name].astype(np.float64)) for name in ("q", "k")}}
    _, size = reference(plain_scores, **sizes, past=case.past)
    size = np.where(np.isfinite(size), size, 0)  # a soft cap can make a finite logit of it
    # In float64 tanh is good to an absolute epsilon, which the soft cap multiplies.
    size = size + (p.softcap if p.acc_dtype == "float64" else 0)
    # A key whose logit is far below the row's largest has no weight, however large it is itself.
    weighty = logits >= logits.max(-1, keepdims=True, initial=-np.inf) - 800
    return size + np.where(weighty & np.isfinite(logits), abs(logits), 0)


def _assert_close(
    got: np.ndarray, want: np.ndarray, tolerance: np.ndarray, where: np.ndarray, dtype: str, what: str
) -> None:
    info = ml_dtypes.finfo(dtype)
    rounding = float(info.eps) * abs(want) + float(info.smallest_subnormal)
    same = (got == want.astype(dtype).astype(np.float64)) | (abs(got - want) <= tolerance + rounding)
    wrong = ~(same | ~np.broadcast_to(where, got.shape))
    if wrong.any():
        at = tuple(int(x) for x in np.argwhere(wrong)[0])
        raise AssertionError(f"{what}{list(at)} is {got[at]}, not {want[at]} ({int(wrong.sum())} of {got.size} wrong)")
