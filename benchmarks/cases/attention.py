"""One Attention node: prefill, short queries after long keys, decode; masks of every form; three types.

Symbols: B batch, Hq and Hkv heads, S query rows, T keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from .case import TYPES, Arrays, Bar, Case, Work

_SLOTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """One Attention node whose batch and lengths are symbolic.

    causal: query row i sees keys up to i, or with `end` up to i + length - S, where the queries are the last rows.
    end: "full" says that all T keys are valid, "ragged" that from a tenth of them to all are, by batch; both by
    nonpad_kv_seqlen. mask: "random" is a bool mask that hides one pair in a hundred, "triangle" one that is causal,
    "add" a float mask of normal numbers; mask_dims names its dimensions out of B, H, S, T and 1. window is the number
    of keys before the query row. memory: the work is to read K and V, else it is arithmetic.
    """

    B: int = 1
    Hq: int = 8
    Hkv: int = 8
    S: int = 1024
    T: int = 1024
    D: int = 64
    causal: bool = False
    end: str = ""
    mask: str = ""
    mask_dims: str = "ST"
    softcap: float = 0.0
    window: int | None = None
    memory: bool = False

    def lengths(self) -> np.ndarray:
        """Valid keys of each batch, int64 [B]."""
        ragged = np.ceil(np.linspace(self.T / 10, self.T, self.B)).astype(np.int64)
        return ragged if self.end == "ragged" else np.full(self.B, self.T)

    def visible(self) -> np.ndarray | None:
        """bool [B or 1, H or 1, S, T]: all that hides a pair; None where nothing does."""
        lengths = self.lengths()[:, None, None, None]
        i, j = np.arange(self.S)[:, None], np.arange(self.T)
        seen = np.ones((1, 1, self.S, self.T), bool)
        if self.end == "ragged":
            seen = seen & (j < lengths)
        position = i + (lengths - self.S if self.end else 0)
        if self.causal:
            seen = seen & (j <= position)
        if self.window is not None:
            seen = seen & (j >= position - self.window)
        if self.mask and self.mask != "add":
            seen = seen & self.mask_array()
        return None if seen.all() else seen

    def bias(self) -> np.ndarray | None:
        """Return the array added to the scores, [B or 1, H or 1, S or 1, T] of the case's type, or None."""
        if self.mask != "add":
            return None
        array = self.mask_array()
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    def mask_array(self) -> np.ndarray:
        """The mask as the node gets it."""
        if self.mask == "triangle":
            return np.tri(self.S, self.T, dtype=bool)
        sizes = {"B": self.B, "H": self.Hq, "S": self.S, "T": self.T, "1": 1}
        shape, rng = [sizes[dim] for dim in self.mask_dims], np.random.default_rng(1)
        return rng.random(shape) >= 0.01 if self.mask == "random" else rng.standard_normal(shape).astype(self._type)

    @property
    def _type(self) -> np.dtype:
        return TYPES[self.dtype]

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        shapes = {"Q": (self.Hq, self.S), "K": (self.Hkv, self.T), "V": (self.Hkv, self.T)}
        arrays = {
            name: rng.standard_normal((self.B, heads, rows, self.D), np.float32).astype(self._type)
            for name, (heads, rows) in shapes.items()
        }
        if self.mask:
            arrays["attn_mask"] = self.mask_array()
        if self.end:
            arrays["nonpad_kv_seqlen"] = self.lengths()
        return arrays

    def model(self) -> onnx.ModelProto:
        feeds = self.feeds()
        slots = [name if name in feeds else "" for name in _SLOTS]
        while not slots[-1]:
            slots.pop()
        attributes: dict[str, Any] = {"is_causal": int(self.causal), "softcap": self.softcap}
        if self.window is not None:
            attributes["left_window_size"] = self.window
        mask_dims = [1 if dim == "1" else self.Hq if dim == "H" else dim for dim in self.mask_dims]
        dims: dict[str, list[Any]] = {
            "attn_mask": mask_dims,
            "nonpad_kv_seqlen": ["B"],
            "Q": ["B", self.Hq, "S", self.D],
        }
        node = onnx.helper.make_node("Attention", slots, ["Y"], **attributes)
        inputs = [port(name, a.dtype, dims.get(name, ["B", self.Hkv, "T", self.D])) for name, a in feeds.items()]
        graph = onnx.helper.make_graph([node], "attention", inputs, [port("Y", self._type, dims["Q"])])
        opset = onnx.helper.make_opsetid("", 24 if self.window is None else 25)
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=11)

    def expected(self) -> Arrays:
        feeds, seen, bias = self.feeds(), self.visible(), self.bias()
        q, k, v = (feeds[name].astype(np.float64) for name in "QKV")
        out = np.zeros(q.shape)
        group = self.Hq // self.Hkv
        for b, h in np.ndindex(self.B, self.Hq):
            scores = q[b, h] @ k[b, h // group].T / np.sqrt(self.D)
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if bias is not None:
                scores += bias[b % len(bias), h % bias.shape[1]].astype(np.float64)
            if seen is not None:
                scores[~seen[b % len(seen), h % seen.shape[1]]] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            out[b, h] = scores @ v[b, h // group] / scores.sum(axis=-1, keepdims=True)
        return {"Y": out}

    def work(self) -> Work:
        """4 FLOPs for each visible pair and head dimension, or the bytes of valid K and V."""
        if self.memory:
            return Work(2.0 * float(self.lengths().sum()) * self.Hkv * self.D * self._type.itemsize, "byte")
        seen = self.visible()
        share = 1.0 if seen is None else float(seen.mean())
        return Work(4.0 * self.B * self.Hq * self.S * self.T * self.D * share, "FLOP")


def port(name: str, dtype: np.dtype, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(dtype), shape)


_P: dict[str, dict[str, Any]] = {
    "P1": {"Hq": 8, "Hkv": 8, "S": 1024, "T": 1024, "D": 64},
    "P2": {"Hq": 8, "Hkv": 8, "S": 2048, "T": 2048, "D": 128},
    "P3": {"Hq": 32, "Hkv": 8, "S": 2048, "T": 2048, "D": 128},
}
_DECODE: dict[str, Any] = {"Hq": 32, "Hkv": 8, "S": 1, "D": 128, "memory": True}

# The bars of the forms of P1, P2 and P3.
_FULL = Bar(share=0.88, ratio=1.05, scaling=1.85)
_CAUSAL = Bar(share=0.82, ratio=1.25, scaling=1.85)
_MASK = Bar(share=0.78, ratio=1.15, scaling=1.85)
_SOFTCAP = Bar(share=0.65, ratio=1.3, scaling=1.85)
_READ = Bar(share=0.9, ratio=1.3)


def _prefill() -> list[AttentionCase]:
    cases = []
    for name, sizes in _P.items():
        forms: dict[str, tuple[dict[str, Any], Bar]] = {
            "full": ({}, _FULL),
            "causal": ({"causal": True}, _CAUSAL),
            "bool mask": ({"mask": "random"}, _MASK),
            "additive mask": ({"mask": "add"}, _MASK),
            "softcap 50": ({"softcap": 50.0}, _SOFTCAP),
        }
        cases += [
            AttentionCase(name=f"{name} {form}", group="attention", bar=bar, **sizes, **fields)
            for form, (fields, bar) in forms.items()
        ]
    window = Bar(share=0.6, ratio=2.0, scaling=1.85)
    sizes = {**_P["P1"], "S": 4096, "T": 4096, "causal": True, "window": 256}
    cases.append(AttentionCase(name="window 256, S 4096", group="attention", bar=window, **sizes))
    return cases


def _decode() -> list[AttentionCase]:
    # Ragged lengths must cost what their keys do, to within what repeats of a measurement differ by.
    ragged = Bar(ratio=1.2, compared_to=("decode B8 kv 1024", 0.95 / (np.linspace(0.1, 1.0, 8).mean())))
    shapes: dict[str, tuple[dict[str, Any], Bar]] = {
        "decode B1 kv 4096": ({"B": 1, "T": 4096}, _READ),
        "decode B8 kv 1024": ({"B": 8, "T": 1024}, _READ),
        "decode B8 ragged": ({"B": 8, "T": 1024, "end": "ragged"}, ragged),
        "decode B1 kv 1000": ({"B": 1, "T": 1000}, Bar()),
        "decode B1 kv 77, D 80": ({"B": 1, "T": 77, "D": 80}, Bar()),
        "decode B2 kv 2048, 12 heads": ({"B": 2, "T": 2048, "Hq": 12, "Hkv": 12, "D": 64}, Bar()),
    }
    return [
        AttentionCase(name=name, group="decode", bar=bar, **{**_DECODE, **fields})
        for name, (fields, bar) in shapes.items()
    ]


def _short_queries() -> list[AttentionCase]:
    """Speculative decoding: the last S rows see the keys up to their own."""
    sizes = {**_DECODE, "causal": True, "end": "full"}
    cases = [
        AttentionCase(name=f"Sq {S} kv 4096", group="decode", **{**sizes, "S": S, "T": 4096}) for S in (2, 4, 8, 16)
    ]
    cases.append(AttentionCase(name="Sq 4 B4 kv 1024", group="decode", **{**sizes, "S": 4, "B": 4, "T": 1024}))
    sizes = {**sizes, "S": 256, "T": 1280, "memory": False}
    cases.append(AttentionCase(name="continued prefill, 256 behind 1024", group="attention", **sizes))
    return cases


def _half() -> list[AttentionCase]:
    cases = []
    for dtype in ("f16", "bf16"):
        # A prefill's bar is a share of our own float32, a decode's a multiple of it.
        for form in ("full", "causal"):
            bar = Bar(ratio=1.1, compared_to=(f"P1 {form}", 0.85))
            causal = form == "causal"
            cases.append(
                AttentionCase(name=f"P1 {form} {dtype}", group="half", bar=bar, dtype=dtype, causal=causal, **_P["P1"])
            )
        for shape, fields in {"B1 kv 4096": {"B": 1, "T": 4096}, "B8 kv 1024": {"B": 8, "T": 1024}}.items():
            bar = Bar(ratio=1.1, compared_to=(f"decode {shape}", 1.6))
            name = f"decode {shape} {dtype}"
            cases.append(AttentionCase(name=name, group="half", bar=bar, dtype=dtype, **{**_DECODE, **fields}))
    return cases


def _mask_shapes() -> list[AttentionCase]:
    """Float masks by what they broadcast over. A last dimension of 1 would not broadcast: it is padded."""
    sizes: dict[str, Any] = {"B": 2, "S": 512, "T": 512, "mask": "add"}
    dims = ("T", "ST", "1T", "HST", "H1T", "1ST", "BHST", "B1ST", "BH1T", "B11T", "1H1T")
    return [AttentionCase(name=f"mask [{d}]", group="masks", mask_dims=d, **sizes) for d in dims]


def _odd() -> list[AttentionCase]:
    shapes: dict[str, dict[str, Any]] = {
        "D 80": {"D": 80},
        "D 80 causal": {"D": 80, "causal": True},
        "D 96": {"D": 96},
        "D 256": {"D": 256, "Hq": 4, "Hkv": 4},
        "D 256 causal": {"D": 256, "Hq": 4, "Hkv": 4, "causal": True},
        "S 1000": {"S": 1000, "T": 1000},
        "S 1000 causal": {"S": 1000, "T": 1000, "causal": True},
        "S 77": {"S": 77, "T": 77},
        "S 77 causal": {"S": 77, "T": 77, "causal": True},
        "S 3": {"S": 3, "T": 3},
        "S 128 T 1000": {"S": 128, "T": 1000},
        "12 heads, S 384": {"Hq": 12, "Hkv": 12, "S": 384, "T": 384},
        "B8, 12 heads, S 128": {"B": 8, "Hq": 12, "Hkv": 12, "S": 128, "T": 128},
        "B4 S 512 causal, grouped": {"B": 4, "Hq": 16, "Hkv": 4, "S": 512, "T": 512, "causal": True},
        "B2 ragged prefill, S 1024": {"B": 2, "S": 1024, "end": "ragged"},
        "P1 bool triangle": {"mask": "triangle"},
    }
    return [AttentionCase(name=name, group="odd", **fields) for name, fields in shapes.items()]


def cases() -> list[AttentionCase]:
    return [*_prefill(), *_decode(), *_short_queries(), *_half(), *_mask_shapes(), *_odd()]
