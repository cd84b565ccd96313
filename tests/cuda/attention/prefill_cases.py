"""Shared parts of the tests of prefill kernels: problems, inputs of odd sizes, and comparison with float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from lowering.attention.reference import compute_reference
from tests import cuda_emulation as emulated

Arrays = dict[str, Any]
CAUSAL = Window(right=0)
THREE_D = {"row_axes": "bte", "layout": CacheLayout("bte")}
TURNS = list(itertools.product(emulated.ORDERS, emulated.ARRIVALS))


def problem(**changes: Any) -> AttentionProblem:
    """Return a problem of two query heads on each of two key/value heads, all sizes symbolic, float16, head_dim 64."""
    defaults: dict[str, Any] = {
        **{"batch": None, "q_len": None, "kv_len": None, "q_heads": 4, "kv_heads": 2},
        **{"head_dim": 64, "dtype": "float16", "acc_dtype": "float32"},
    }
    values = defaults | changes
    derived = {"v_head_dim": values["head_dim"], "v_dtype": values["dtype"], "scale": values["head_dim"] ** -0.5}
    return AttentionProblem(**derived | values)


def formula() -> Formula:
    """Return a formula: row i sees key j of its own document in table_0, and the first size_0 keys."""
    b, h, i, j, size = (tirx.Var(name, "int64") for name in ("b", "h", "i", "j", "size"))
    table = tirx.decl_buffer((tirx.Var("n", "int64"),), "int64", "table")
    shown = tirx.any(table[i].equal(table[j]), j < size)
    return Formula.from_tir(shown, (b, h, i, j), [size], [table], short=False)[0]


def draw(p: AttentionProblem, batch: int, q_len: int, kv_len: int) -> Arrays:
    """Draw inputs by parameter name. A mask hides a third of the pairs, whole tiles of keys, and all keys of rows."""
    rng = np.random.default_rng(q_len + kv_len)

    def rows(layout: str, heads: int, length: int, dim: int) -> np.ndarray:
        shape = (batch, heads, length, dim) if layout == "bhtd" else (batch, length, heads * dim)
        return rng.standard_normal(shape).astype(p.dtype)

    inputs: Arrays = {
        "q": rows(p.row_axes, p.q_heads, q_len, p.head_dim),
        "k": rows(p.layout.axes, p.kv_heads, kv_len, p.head_dim),
        "v": rows(p.layout.axes, p.kv_heads, kv_len, p.v_head_dim),
    }
    if isinstance(p.mask, Mask):
        mask_len = kv_len - 7 if p.mask.pad and kv_len > 9 else kv_len
        full = (batch, p.q_heads, q_len, mask_len)
        shape = tuple(n if d is None else d for n, d in zip(full, p.mask.dims))
        hidden = rng.random(shape) < 0.3
        hidden[:, :, ::5] |= shape[2] > 1
        hidden[..., 32:64] = True
        lowest = 0 if p.mask.dtype == "bool" else ml_dtypes.finfo(p.mask.dtype).min
        if p.mask.dtype == "float16":  # a row may see no other key; added to -65504, scores are rounded to 1/128
            lowest = -1000
        finite = np.where(rng.random(shape) < 0.2, lowest, rng.standard_normal(shape))
        if p.mask.dtype != "float16":  # added to its lowest number, scores vanish, in float64, too
            finite[:, :, 1::5] = lowest
        inputs["mask"] = ~hidden if p.mask.dtype == "bool" else np.where(hidden, -np.inf, finite).astype(p.mask.dtype)
    if isinstance(p.mask, Formula):
        inputs |= {"size_0": 2, "table_0": np.arange(max(q_len, kv_len)) // 50}
    if p.sink:
        inputs["sink"] = np.array([0.5, -np.inf, 3, -20]).astype(p.dtype)
    if p.lengths:
        inputs["lengths"] = np.array([kv_len // 2 + 1, -1, kv_len + 2])[:batch]
    if "past" in p.parameters():
        inputs["past"] = kv_len // 3
    return inputs


def expected(p: AttentionProblem, inputs: Arrays) -> tuple[np.ndarray, np.ndarray | None]:
    """Return Y and the log-sum-exp, if the problem has one, in float64."""
    if isinstance(p.mask, Formula):
        i, j = np.arange(inputs["q"].shape[2])[:, None], np.arange(inputs["k"].shape[2])
        table = inputs["table_0"]
        shown = ((table[i] == table[j]) | (j < inputs["size_0"]))[None, None]
        inputs = {name: inputs[name] for name in "qkv"} | {"mask": shown}
    reference = compute_reference(p, **inputs)
    return reference["y"], reference.get("lse")


def close(got: np.ndarray, want: np.ndarray, p: AttentionProblem) -> None:
    """Check that results are equal up to the rounding of P and of Y to 16 bits."""
    rounding = float(ml_dtypes.finfo(p.dtype).eps)
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding)


def close_to(inputs: Arrays, got: np.ndarray, want: np.ndarray, p: AttentionProblem) -> None:
    """Check that results are equal up to the rounding of P, half a unit of each term, and of Y to 16 bits."""
    rounding = float(ml_dtypes.finfo(p.dtype).eps)
    bound, _ = expected(p, inputs | {"v": np.abs(inputs["v"])})
    np.testing.assert_array_less(np.abs(got - want), rounding * (np.abs(want) + np.maximum(bound, 1)), strict=False)


class Kernels:
    """Prefill kernels for problems by name, built together at the first call."""

    def __init__(
        self, problems: Mapping[str, AttentionProblem], make: Callable[[str], tirx.PrimFunc], arch: str
    ) -> None:
        self.problems, self._make, self._arch = problems, make, arch

    @functools.cached_property
    def _module(self) -> emulated.Module:
        functions = {self._function(name): self._make(name) for name in self.problems}
        return emulated.module(functions, arch=self._arch)

    def _function(self, name: str) -> str:
        return f"attention_{self.number(name)}"

    def number(self, name: str) -> int:
        return list(self.problems).index(name)

    def call(self, name: str, inputs: Arrays, turn: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Call a kernel, and return Y and the log-sum-exp, if it has one, in float64."""
        p = self.problems[name]
        batch, q_len = inputs["q"].shape[0], inputs["q"].shape[2 if p.row_axes == "bhtd" else 1]
        y = (*inputs["q"].shape[:-1], p.v_head_dim * (1 if p.row_axes == "bhtd" else p.q_heads))
        outputs = {"y": np.full(y, np.nan, p.dtype), "lse": np.full((batch, p.q_heads, q_len), np.nan, np.float32)}
        arguments, names = inputs | outputs, p.parameters()
        order, arrivals = TURNS[turn % len(TURNS)]
        after = self._module.call(self._function(name), [arguments[n] for n in names], order=order, arrivals=arrivals)
        results = {n: x.astype(np.float64) for n, x in zip(names, after) if n in outputs}
        return results["y"], results.get("lse")

    def check(self, name: str, sizes: list[tuple[int, int, int]]) -> None:
        """Check Y and the log-sum-exp against the reference for each batch, number of rows and number of keys."""
        p = self.problems[name]
        for number, size in enumerate(sizes):
            inputs = draw(p, *size)
            y, lse = self.call(name, inputs, self.number(name) + number)
            want_y, want_lse = expected(p, inputs)
            close_to(inputs, y, want_y, p)
            if lse is not None:
                np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
