"""AttentionProblem: the one record in which every attention operator and every kernel meet.

A front end builds a record and never sees a kernel; a kernel reads a record and never sees an operator. A
record is plain data: it travels through Relax as JSON in the PrimFunc attribute `lowering.attention`.

Symbols: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, S query rows, T keys, D head_dim, Dv
v_head_dim, i query row, j key, p = i + offset the position of query row i among the keys. Query head h reads
key/value head h // G.

Sizes that are None are symbolic: the kernel takes them from the shapes of its buffers.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from .formula import Formula

Layout = Literal["bhsd", "bshd"]
"""bhsd: [B, H, L, D]. bshd: [B, L, H * D], the 3-D form of ONNX, read in place without a transpose."""

Offset = Literal["zero", "past", "lengths"]

ATTRIBUTE = "lowering.attention"


@dataclass(frozen=True)
class Window:
    """Key j is visible to query row i iff p - left <= j <= p + right; None is unbounded. Causal is right = 0.

    offset gives p = i + offset: "zero" (top-left aligned), "past" (the int64 scalar parameter `past`, the
    same for the whole batch), "lengths" (lengths[b] - S: the queries are the last S valid keys; may be
    negative, never clamped).
    """

    left: int | None = None
    right: int | None = None
    offset: Offset = "zero"


@dataclass(frozen=True)
class Mask:
    """A mask tensor [mb, mh, ms, mt], indexed right-aligned like [B, Hq, S, T].

    A dimension of static size 1 broadcasts over B, Hq and S. Along keys: with pad, a mask shorter than T
    leaves keys j >= mt masked (also when mt is 1: ONNX opset 24); without pad, a static mt of 1 broadcasts.
    None is symbolic: the full size, or with pad any number of keys. dtype bool selects (True is visible); any
    other type is added to the score after the soft cap, and -inf hides the key.

    broadcasts are the axes, None in dims, of which only the tensor tells whether they are 1 or full.
    """

    dtype: str
    dims: tuple[int | None, int | None, int | None, int | None]
    pad: bool = True
    broadcasts: tuple[int, ...] = ()


@dataclass(frozen=True)
class AttentionProblem:
    """softmax(softcap(scale * Q K^T) + mask, visible keys only) V, with rows that see no key giving 0.

    Arithmetic is in acc_dtype (float32, or float64 when any operand or the requested softmax is float64); Y
    and qk are rounded once to dtype. qk_mode asks for the [B, Hq, S, T] matrix too: 0 scaled scores, 1 after
    the soft cap, 2 after masking (-inf where masked), 3 probabilities (ONNX Attention,
    qk_matmul_output_mode). sink asks for one more score per query head, which takes its share of the softmax
    and has no value: l gets the term exp(sink[h]) (arXiv:2309.17453; "attention sink", "smooth softmax"). lse asks for
    a [B, Hq, S] output in acc_dtype: the natural logarithm of the sum of exp(score) over the keys that a row sees and
    the sink, -inf where there are none. Two attentions over parts of the keys are merged by it.

    Raises ValueError for a record that no operator means.
    """

    batch: int | None
    q_len: int | None
    kv_len: int | None
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # of Q, K, Y and qk (T1)
    v_dtype: str  # of V (T2)
    acc_dtype: str
    scale: float
    q_layout: Layout = "bhsd"
    kv_layout: Layout = "bhsd"
    softcap: float = 0.0
    window: Window | None = None
    lengths: bool = False  # an int64 [B] parameter: keys j >= lengths[b] are invisible
    mask: Mask | Formula | None = None
    sink: bool = False  # a [Hq] parameter of type dtype
    qk_mode: int | None = None
    lse: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads do not divide into {self.kv_heads} key/value heads")
        if self.window is not None and self.window.offset == "lengths" and not self.lengths:
            raise ValueError('a window with offset "lengths" needs the lengths parameter')
        operands = {self.dtype, self.v_dtype, self.mask.dtype if self.mask is not None else ""}
        if self.acc_dtype not in ("float32", "float64") or (self.acc_dtype == "float32" and "float64" in operands):
            raise ValueError(f"acc_dtype {self.acc_dtype} is not wide enough: float32, or float64 for float64 operands")
        if self.qk_mode not in (None, 0, 1, 2, 3):
            raise ValueError(f"qk_mode is None, 0, 1, 2 or 3, not {self.qk_mode}")

    @property
    def group(self) -> int:
        """Query heads per key/value head (G)."""
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        """Whether early rows see fewer keys, so that tiles of rows differ in their work."""
        return self.window is not None and self.window.right is not None

    @property
    def has_mask(self) -> bool:
        return self.mask is not None

    def parameters(self) -> tuple[str, ...]:
        """Names of the PrimFunc's parameters in order: the inputs present, then the outputs asked for."""
        return (*self.inputs(), *self.outputs())

    def inputs(self) -> tuple[str, ...]:
        """Those of the parameters that are read."""
        present = {
            "mask": isinstance(self.mask, Mask),
            "sink": self.sink,
            "lengths": self.lengths,
            "past": self.window is not None and self.window.offset == "past",
        }
        formula = self.mask.names() if isinstance(self.mask, Formula) else ()
        names = ("q", "k", "v", "mask", *formula, "sink", "lengths", "past")
        return tuple(name for name in names if present.get(name, True))

    def outputs(self) -> tuple[str, ...]:
        """Those of the parameters that are written."""
        present = {"qk": self.qk_mode is not None, "lse": self.lse}
        return tuple(name for name in ("y", "qk", "lse") if present.get(name, True))

    def scalars(self) -> tuple[str, ...]:
        """Those of the parameters that are int64 numbers."""
        formula = self.mask.scalars() if isinstance(self.mask, Formula) else ()
        return tuple(name for name in self.inputs() if name == "past" or name in formula)

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        if isinstance(self.mask, Formula):
            data["mask"] = self.mask.to_data()
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> AttentionProblem:
        data: dict[str, Any] = json.loads(text)
        if data["window"] is not None:
            data["window"] = Window(**data["window"])
        mask = data["mask"]
        if mask is not None and "value" in mask:
            data["mask"] = Formula.from_data(mask)
        elif mask is not None:
            data["mask"] = Mask(**{**mask, "dims": tuple(mask["dims"]), "broadcasts": tuple(mask["broadcasts"])})
        return AttentionProblem(**data)
