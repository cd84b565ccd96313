"""FlexAttention: variants that are Python functions, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from lowering import flex
from lowering.flex.attention import make_sizes_symbolic
from lowering.flex.captured import read_array_specs
from lowering.flex.problem import FlexProblem, build_problem

from .case import Arrays, Bar, Case, Work


@dataclass(frozen=True)
class Variant:
    """score(score, b, h, i, j, **captures) and mask(b, h, i, j, **captures) for us and for NumPy; what PyTorch is given
    by its own names is in peers/torch.py."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captures: Callable[[int, int], Arrays] = lambda heads, length: {}


def _documents(heads: int, length: int) -> Arrays:
    return {"document": (np.arange(length) * 5 // length).astype(np.int32)}


def _slopes(heads: int, length: int) -> Arrays:
    return {"slopes": flex.mods.alibi_slopes(heads)}


def _document_causal(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
    return (document[i] == document[j]) & (i >= j)


VARIANTS = {
    "full": Variant(),
    "causal": Variant(mask=flex.masks.causal),
    "window of 256": Variant(mask=flex.masks.sliding_window(256)),
    "documents": Variant(mask=_document_causal, captures=_documents),
    "soft cap": Variant(score=flex.mods.soft_cap(20.0)),
    "ALiBi": Variant(score=flex.mods.alibi, captures=_slopes),
    "prefix of 512": Variant(mask=flex.masks.prefix_lm(512)),
    "neighborhood": Variant(mask=flex.masks.neighborhood((32, 64), 13)),
}


@dataclass(frozen=True, kw_only=True)
class FlexCase(Case):
    """A variant over B 1, H heads, S rows and keys, D elements of a head; gradient asks for dq, dk, dv and those of
    captured arrays instead of y."""

    variant: str
    H: int = 8
    S: int = 2048
    D: int = 64
    gradient: bool = False

    @property
    def source(self) -> str:
        return f"{self.group} {self.variant} {self.H} {self.D}"

    @cached_property
    def captures(self) -> Arrays:
        return VARIANTS[self.variant].captures(self.H, self.S)

    @property
    def problem(self) -> FlexProblem:
        variant = VARIANTS[self.variant]
        shapes = make_sizes_symbolic(dict.fromkeys("qkv", (1, self.H, self.S, self.D)))
        types = dict.fromkeys("qkv", "float32")
        arrays = read_array_specs(self.captures)
        return build_problem(shapes, types, variant.score, variant.mask, arrays, None, None, False, self.gradient)

    def model(self) -> onnx.ModelProto:
        return self.problem.gradient_to_onnx() if self.gradient else self.problem.to_onnx()

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        arrays = {name: rng.standard_normal((1, self.H, self.S, self.D), np.float32) for name in ("q", "k", "v", "dy")}
        if not self.gradient:
            del arrays["dy"]
        else:
            arrays |= {name: np.concatenate([x[name] for x in self._heads()])[None] for name in ("y", "lse")}
        return {name: x.astype(np.float32) for name, x in arrays.items()} | self.captures

    def expected(self) -> Arrays:
        names = ("dq", "dk", "dv") if self.gradient else ("y",)
        return {name: np.concatenate([head[name] for head in self._heads()])[None] for name in names}

    def work(self) -> Work:
        pairs = float(self._visible(0).sum()) * self.H
        return Work((10 if self.gradient else 4) * pairs * self.D, "FLOP")

    def _visible(self, h: int) -> np.ndarray:
        variant = VARIANTS[self.variant]
        i, j = np.arange(self.S)[:, None], np.arange(self.S)
        seen = True if variant.mask is None else variant.mask(0, h, i, j, **self.captures)
        return np.broadcast_to(seen, (self.S, self.S))

    def _heads(self) -> list[Arrays]:
        """Return results of each head in float64, and their inputs."""
        rng = np.random.default_rng(0)
        arrays = {name: rng.standard_normal((1, self.H, self.S, self.D), np.float32) for name in ("q", "k", "v", "dy")}
        return [self._head(h, {name: x[0, h].astype(np.float64) for name, x in arrays.items()}) for h in range(self.H)]

    def _head(self, h: int, inputs: Arrays) -> Arrays:
        variant, (q, k, v, dy) = VARIANTS[self.variant], (inputs[name] for name in ("q", "k", "v", "dy"))
        scale = 1 / math.sqrt(self.D)
        s = q @ k.T * scale
        i, j = np.arange(self.S)[:, None], np.arange(self.S)

        def changed(s: np.ndarray) -> np.ndarray:
            return s if variant.score is None else variant.score(s, 0, h, i, j, **self.captures)

        z = np.where(self._visible(h), changed(s), -np.inf)
        m = z.max(axis=1, keepdims=True)
        p = np.exp(z - m)
        l = p.sum(axis=1, keepdims=True)
        p /= l
        y = p @ v
        results = {"y": y[None], "lse": (m + np.log(l))[None, :, 0]}
        if not self.gradient:
            return results
        dz = p * (dy @ v.T - (dy * y).sum(axis=1, keepdims=True))
        step = 1e-5
        ds = dz * (changed(s + step) - changed(s - step)) / (2 * step)
        return results | {"dq": (ds @ k * scale)[None], "dk": (ds.T @ q * scale)[None], "dv": (p.T @ dy)[None]}


def cases() -> list[FlexCase]:
    flex_cases = []
    for variant in VARIANTS:
        name = f"flex {variant}" + (", S 4096" if variant == "window of 256" else "")
        length = 4096 if variant == "window of 256" else 2048
        baseline = ("flex full", 1 / 1.25) if variant in ("soft cap", "ALiBi") else None
        flex_cases.append(
            FlexCase(name=name, group="flex", variant=variant, S=length, bar=Bar(ratio=2.0, compared_to=baseline))
        )
    for variant in ("full", "causal", "window of 256", "soft cap", "ALiBi"):
        name = f"gradients, {variant}"
        flex_cases.append(
            FlexCase(name=name, group="gradients", variant=variant, S=1024, gradient=True, bar=Bar(ratio=1.5))
        )
    return flex_cases
