"""AttentionProblem: the one record through which every attention operator reaches every kernel.

A front end builds a record and never sees a kernel; a kernel reads a record and never sees an operator. A record is
plain data. It travels through Relax as JSON in the PrimFunc attribute `lowering.attention`.

Symbols: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, S query rows, T keys, D head_dim, Dv v_head_dim,
i query row, j key, p = i + offset the position of query row i among the keys. Query head h reads key/value head h // G.
Rows and keys are numbered within their batch, wherever they are stored.

Sizes that are None are symbolic: the kernel takes them from the shapes of its buffers. Shapes do not give them for
ragged rows or for caches with mapped slots. S and T are then the maximum over all batches: the int64 scalar parameters
most_rows and most_keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ...records import Record
from .cache_layout import DENSE, Axes, CacheLayout, KvQuantization
from .formula import Formula

WindowOffset = Literal["zero", "past", "lengths", "behind"]

ATTRIBUTE = "lowering.attention"

MAX_SPLITS = 256


@dataclass(frozen=True)
class Window:
    """Key j is visible to query row i iff p - left <= j <= p + right; None is unbounded. Causal is right = 0.

    offset gives p = i + offset:

    * "zero": top-left aligned.
    * "past": the int64 scalar parameter `past`, the same for the whole batch.
    * "lengths": lengths[b] minus the rows of the batch, as the queries are the last valid keys. It may be negative and
      is never clamped.
    * "behind": lengths[b], as the queries follow the valid keys.

    The first `sinks` keys are visible to every row, however far to the left they are (arXiv:2309.17453). A field of
    value "given" is an int64 [B] parameter: lefts, sink_keys. With `free` there is an int64 scalar parameter
    free_batches: the rows of that many leading batches see all keys.
    """

    left: int | Literal["given"] | None = None
    right: int | None = None
    offset: WindowOffset = "zero"
    sinks: int | Literal["given"] = 0
    free: bool = False


@dataclass(frozen=True)
class Mask:
    """A mask tensor [mb, mh, ms, mt], indexed right-aligned like [B, Hq, S, T].

    A dimension of static size 1 broadcasts over B, Hq and S. Along keys, with pad, a mask shorter than T leaves keys j
    >= mt masked (also when mt is 1: ONNX opset 24); without pad, a static mt of 1 broadcasts. None is symbolic: the
    full size, or with pad any number of keys. dtype bool selects (True is visible); any other type is added to the
    score after the soft cap, and -inf masks the key.

    broadcasts are the axes, None in dims, for which only the tensor says at run time whether they are 1 or full.

    If query rows are ragged, so are the rows of the mask, whose batch dimension is 1. With `starts` keys are ragged
    too: key j of batch b is at key_starts[b] + j, an int64 [B] parameter. A mask without columns then masks nothing.
    """

    dtype: str
    dims: tuple[int | None, int | None, int | None, int | None]
    pad: bool = True
    broadcasts: tuple[int, ...] = ()
    starts: bool = False


@dataclass(frozen=True)
class AttentionProblem(Record):
    """softmax(score(softcap(scale * Q K^T)) + mask, visible keys only) V; rows without visible keys give 0.

    Arithmetic is in acc_dtype: float32, or float64 if any operand or the requested softmax is float64. Y and qk are
    rounded once to dtype. qk_mode requests the [B, Hq, S, T] matrix as an output: 0 scaled scores, 1 after the soft cap
    and the score modification, 2 after masking (-inf where masked), 3 probabilities (ONNX Attention,
    qk_matmul_output_mode). A score of -inf has no weight. Only masks and ranges keep a value that is not finite from
    contributing to Y.

    sink requests one more score per query head, which takes its share of the softmax and has no value: l gets the term
    exp(sink[h]) (arXiv:2309.17453; "attention sink", "smooth softmax"). lse requests a [B, Hq, S] output, [N, Hq] for N
    ragged rows, in acc_dtype: the natural logarithm of the sum of exp(score) over the visible keys of a row and the
    sink, -inf if there are none. It merges attentions over disjoint ranges of keys. max requests an output of the same
    shape: the largest of these scores.

    splits is the number of ranges into which small-M kernels split the keys (split-KV); None: as many as sizes ask for.

    Raises ValueError for a record that no operator produces.
    """

    batch: int | None
    q_len: int | None
    kv_len: int | None
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # of Q, K, Y and qk (T1), unless K is quantized (layout.quantization)
    v_dtype: str  # of V (T2), unless V is quantized
    acc_dtype: str
    scale: float | None  # None: the parameter scale, a [1] of acc_dtype
    row_axes: Axes = "bhtd"  # of Q and Y; without b, batch b begins at row_starts[b], an int64 [B + 1] parameter
    layout: CacheLayout = DENSE
    softcap: float = 0.0
    score: Formula | None = None  # applied after the soft cap and before the mask
    window: Window | None = None
    lengths: bool = False  # an int64 [B] parameter: keys j >= lengths[b] are invisible
    mask: Mask | Formula | None = None
    sink: bool = False  # a [Hq] parameter of type dtype
    qk_mode: int | None = None
    lse: bool = False
    max: bool = False
    splits: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads do not divide into {self.kv_heads} key/value heads")
        if self.window is not None and self.window.offset in ("lengths", "behind") and not self.lengths:
            raise ValueError(f'a window with offset "{self.window.offset}" needs the lengths parameter')
        if {*self.row_axes} - {"b"} not in ({*"htd"}, {*"te"}) or len({*self.row_axes}) < len(self.row_axes):
            raise ValueError(f"query rows cannot have the axes '{self.row_axes}'")
        if (self.is_ragged and self.q_len == 0) or (self.layout.is_mapped and self.kv_len == 0):
            raise ValueError("the maximum of rows or keys of a batch must be None or at least 1")
        if self.is_ragged and self.layout.has_lookup and not self.lengths:
            raise ValueError("no parameter determines the batch size: the lengths parameter is missing")
        if self.layout.is_joint and (self.head_dim, self.dtype) != (self.v_head_dim, self.v_dtype):
            raise ValueError("keys and values in one buffer must have the same size and type")
        if self.head_dim % self.layout.packing or self.v_head_dim % self.layout.packing:
            raise ValueError("quantized values that share bytes need even head sizes")
        if self.is_ragged and self.qk_mode is not None:
            raise ValueError("ragged batches have no qk output")
        if isinstance(self.mask, Mask) and (self.is_ragged or self.mask.starts) and self.mask.dims[0] != 1:
            raise ValueError("the mask of ragged rows or keys must have a batch size of 1")
        operands = {self.dtype, self.v_dtype, self.mask.dtype if self.mask is not None else ""}
        if self.acc_dtype not in ("float32", "float64") or (self.acc_dtype == "float32" and "float64" in operands):
            raise ValueError(
                f"acc_dtype {self.acc_dtype} is not wide enough: use float32, or float64 for float64 operands"
            )
        names = [name for formula in self._formulas() for name in formula.names()]
        if len({*names}) < len(names):
            raise ValueError("the mask and the score modification read parameters of the same name")
        if self.splits is not None and not 1 <= self.splits <= MAX_SPLITS:
            raise ValueError(f"splits must be None or 1 to {MAX_SPLITS}, not {self.splits}")
        if self.qk_mode not in (None, 0, 1, 2, 3):
            raise ValueError(f"qk_mode must be None, 0, 1, 2 or 3, not {self.qk_mode}")

    @property
    def group(self) -> int:
        """Query heads per key/value head (G)."""
        return self.q_heads // self.kv_heads

    @property
    def stored_types(self) -> tuple[str, str]:
        """Element types of K and V in memory."""
        quantization = self.layout.quantization
        return (
            (self.dtype, self.v_dtype)
            if quantization is None
            else (quantization.storage_dtype, quantization.storage_dtype)
        )

    @property
    def quantization(self) -> KvQuantization | None:
        """Type and scales of K and V if they are quantized."""
        return self.layout.quantization

    @property
    def is_quantized(self) -> bool:
        """Whether K and V are quantized values with scales."""
        return self.quantization is not None

    @property
    def is_ragged(self) -> bool:
        """Whether the query rows of the batches are concatenated, with a row count for each batch (varlen)."""
        return "b" not in self.row_axes

    @property
    def is_dense(self) -> bool:
        """Whether shapes alone give the address of every element: no ragged rows, slot tables or quantized values."""
        return not (self.is_ragged or self.layout.has_lookup or self.is_quantized)

    @property
    def is_causal(self) -> bool:
        """Whether early rows see fewer keys, so that tiles of rows differ in their work."""
        return self.window is not None and self.window.right is not None

    @property
    def has_mask(self) -> bool:
        return self.mask is not None

    @property
    def has_formula(self) -> bool:
        """Whether the mask is computed, not loaded."""
        return isinstance(self.mask, Formula)

    @property
    def has_formula_per_head(self) -> bool:
        """Whether a computed mask may differ from query head to query head."""
        return isinstance(self.mask, Formula) and "h" in self.mask.index_names

    @property
    def has_additive_mask(self) -> bool:
        """Whether elements of a mask tensor are added to scores."""
        return isinstance(self.mask, Mask) and self.mask.dtype != "bool"

    @property
    def has_left_bound(self) -> bool:
        """Whether the visible keys of a row also have a first key that depends on the row."""
        return self.window is not None and self.window.left is not None

    def make_empty_sizes_symbolic(self) -> AttentionProblem:
        """Return the problem with symbolic sizes in place of 0, since TVM divides by static sizes."""
        mask = self.mask
        if isinstance(mask, Mask):
            mb, mh, ms, mt = (size or None for size in mask.dims)
            mask = dataclasses.replace(mask, dims=(mb, mh, ms, mt))
        batch, q_len, kv_len = (size or None for size in (self.batch, self.q_len, self.kv_len))
        return dataclasses.replace(self, batch=batch, q_len=q_len, kv_len=kv_len, mask=mask)

    def parameters(self) -> tuple[str, ...]:
        """Return the names of the PrimFunc's parameters in order: the inputs present, then the requested outputs."""
        return (*self.inputs(), *self.outputs())

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the parameters that are read."""
        is_joint, has_scales = self.layout.is_joint, self.is_quantized
        present = {
            "k": not is_joint, "v": not is_joint, "kv": is_joint,
            "k_scale": has_scales and not is_joint, "v_scale": has_scales and not is_joint,
            "kv_scale": has_scales and is_joint,
            "mask": isinstance(self.mask, Mask),
            "scale": self.scale is None,
            "sink": self.sink,
            "lengths": self.lengths,
            "lefts": self.window is not None and self.window.left == "given",
            "sink_keys": self.window is not None and self.window.sinks == "given",
            "row_starts": self.is_ragged,
            "key_starts": isinstance(self.mask, Mask) and self.mask.starts,
        }  # fmt: skip
        scalars = self.scalars()
        tables = [name for formula in self._formulas() for name in formula.tables()]
        names = ("q", "k", "v", "kv", "k_scale", "v_scale", "kv_scale", "mask", *tables)
        names = (*names, "scale", "sink", "lengths", "lefts", "sink_keys", "row_starts", "key_starts")
        return tuple(name for name in (*names, *self.layout.tables(), *scalars) if present.get(name, True))

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the parameters that are written."""
        present = {"y": True, "qk": self.qk_mode is not None, "lse": self.lse, "max": self.max}
        return tuple(name for name, is_present in present.items() if is_present)

    def scalars(self) -> tuple[str, ...]:
        """Return the names of the parameters that are int64 scalars."""
        present = {
            "past": self.window is not None and self.window.offset == "past",
            "free_batches": self.window is not None and self.window.free,
            "most_rows": self.is_ragged and self.q_len is None,
            "most_keys": self.layout.is_mapped and self.kv_len is None,
        }
        formulas = [name for formula in self._formulas() for name in formula.scalars()]
        return (*formulas, *(name for name, is_present in present.items() if is_present))

    def _formulas(self) -> tuple[Formula, ...]:
        return tuple(formula for formula in (self.mask, self.score) if isinstance(formula, Formula))
