"""Biases that are added to scores, and masks: formulas over positions, and masks that are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tvm import tirx
from tvm.ir import Expr

from ...attention.codegen.parameters import int64
from ...attention.record.alibi import alibi_slopes
from ...attention.record.formula import Formula
from ...attention.record.problem import Mask, Window, WindowOffset
from ...importing.node import Node
from ...importing.values import Value
from ..attention.attend import trace_formula
from ..helpers.assertions import assert_shape
from ..helpers.kernels import compute
from ..helpers.requirements import require_dtype, require_tensor
from .requests import GptRequests, require_nonempty
from .settings import GptSettings

if TYPE_CHECKING:
    from .streaming import StreamedKeys

Read = Callable[..., Any]


@dataclass(frozen=True)
class Scoring:
    """Fields of the attention record, and the kernel's arguments that they read."""

    fields: dict[str, Any]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ScoreTables:
    """Tensors that scores read in addition to positions; None if absent.

    mask is [rows of qkv without gaps, keys], slopes [Hq], bias [Hq, rows, keys], and bucketed [2, Hq, 2 max_distance +
    1] by phase, head and distance.
    """

    mask: Value | None
    slopes: Value | None
    bias: Value | None
    bucketed: Value | None


def read_score_tables(
    node: Node, settings: GptSettings, inputs: Mapping[str, Value], requests: GptRequests, dtype: str
) -> ScoreTables:
    slopes = bias = bucketed = None
    if settings.alibi is not None:
        slopes = _read_slopes(node, settings, inputs.get("alibi_slopes"))
    if "relative_attention_bias" in inputs:
        bias = inputs["relative_attention_bias"]
        require_dtype(node, "relative_attention_bias", bias, (dtype, "float32"))
        if settings.max_distance:
            bucketed, bias = _compute_bucketed_bias(node, settings, bias), None
        elif bias.rank != 3:
            raise node.error(
                "node.rank_unsupported",
                f"relative_attention_bias has rank {bias.rank}, and max_distance is 0.",
                "Make it [num_heads, rows, keys], or set max_distance for a table [num_heads, buckets].",
            )
        else:
            bias = assert_shape(node, bias, (settings.heads, *bias.shape[1:]))
            bias = require_nonempty(node, "relative_attention_bias", bias, 1, 2)
    return ScoreTables(_read_mask(node, inputs, requests), slopes, bias, bucketed)


KeySet = Literal["all", "past", "new"]
"""The keys that an attention is over: all keys after the call, those before it, or those of the call."""

_OFFSETS: dict[KeySet, WindowOffset] = {"new": "zero", "all": "lengths", "past": "behind"}


def build_scoring(
    node: Node,
    settings: GptSettings,
    requests: GptRequests,
    stream: StreamedKeys | None,
    tables: ScoreTables,
    keys: KeySet,
    has_window: bool,
) -> Scoring:
    """Return how an attention over these keys scores them.

    A stream gives the positions of keys if some are skipped. Masks are indexed by token in any case.
    """
    is_new = keys == "new"
    fields: dict[str, Any] = {"softcap": settings.softcap, "window": _build_window(settings, tables, keys, has_window)}
    arguments: dict[str, Any] = {}
    if has_window:
        arguments |= {"lefts": requests["lefts"], "sink_keys": requests["new_sinks" if is_new else "sinks"]}
    past, counts = requests["past"], requests["counts"]
    is_skipping = stream is not None and keys == "past"
    skipped = [requests["sinks"], stream.skips] if is_skipping and stream is not None else []

    def token(b: Expr, j: Expr, past: Read, *skipped: Read) -> Expr:
        """Return the token of key j."""
        if is_new:
            return past(b) + j
        if skipped:
            sinks, skips = skipped
            return tirx.Select(j < sinks(b), j, j + skips(b))
        return j

    if tables.mask is not None:
        mask = tables.mask
        if is_skipping and stream is not None:
            mask = _gather_mask_columns(node, mask, requests, stream, token)
        fields["mask"] = Mask("bool", (1, 1, None, None), pad=True, starts=True)
        zeros = compute(node, "zeros", lambda i: tirx.const(0, "int64"), [], (requests.sequences,), dtype="int64")
        arguments |= {"mask": mask, "key_starts": past if is_new else zeros}
    elif settings.mask == "blocksparse" and not settings.is_cross:
        sparse = _build_block_sparse(settings)

        def shown(b: Expr, h: Expr, i: Expr, j: Expr, past: Read, *skipped: Read) -> Expr:
            return sparse(h, past(b) + i, token(b, j, past, *skipped))

        fields["mask"], formula_arguments = trace_formula(shown, [past, *skipped])
        arguments |= formula_arguments
    elif settings.mask.startswith("bidirectional") and not settings.is_cross and keys != "past":
        fields["mask"], formula_arguments = trace_formula(_build_bidirectional(token), [past, counts])
        arguments |= formula_arguments
    before = past if stream is None else stream.counts
    score = _build_biases(settings, tables, before, requests["context"], is_new)
    if score is not None:
        fields["score"], formula_arguments = score
        arguments |= formula_arguments
    return Scoring(fields, arguments)


def _gather_mask_columns(
    node: Node, mask: Value, requests: GptRequests, stream: StreamedKeys, token: Callable[..., Expr]
) -> Value:
    """Return the columns of the mask for the keys of a stream, [1, 1, rows without gaps, keys]."""

    def element(
        index: tuple[Expr, ...], mask: Read, sequence: Read, source: Read, sinks: Read, skips: Read, *size: Expr
    ) -> Expr:
        n, j = index[2], index[3]
        key = token(sequence(source(n)), j, None, sinks, skips)
        zero = int64(0)
        is_inside = tirx.all(key >= zero, key < size[0])
        return tirx.if_then_else(is_inside, mask(zero, zero, n, tirx.max(tirx.min(key, size[0] - 1), zero)), False)

    arrays = [mask, requests["sequence"], requests["source"], requests["sinks"], stream.skips]
    return compute(
        node, "mask", element, arrays, (1, 1, requests.rows, stream.max_keys), [mask.shape[3]], dtype="bool"
    )  # fmt: skip


def _build_window(settings: GptSettings, tables: ScoreTables, keys: KeySet, has_window: bool) -> Window | None:
    if settings.is_cross:
        return None
    is_causal = settings.mask in ("causal", "sliding_window_causal", "blocksparse") and tables.mask is None
    right = 0 if is_causal and keys != "past" else None
    if not has_window and right is None:
        return None
    offset = _OFFSETS[keys]
    run_time: Literal["given"] = "given"
    return Window(run_time, right, offset, run_time) if has_window else Window(right=right, offset=offset)


def _build_block_sparse(settings: GptSettings) -> Callable[[Expr, Expr, Expr], Expr]:
    """Return a formula: the blocks near a row's own one, and the stripes of each head, are visible."""
    sparse = settings.sparse
    step = 0 if sparse.is_homogeneous else max(1, sparse.stride // (settings.heads * settings.tp_size))
    first = settings.tp_rank * settings.heads

    def shown(h: Expr, row: Expr, key: Expr) -> Expr:
        size, stride = int64(sparse.size), int64(sparse.stride)
        block = tirx.floordiv(key, size)
        is_near = tirx.floordiv(row, size) - block < int64(sparse.local)
        is_stripe = tirx.EQ(tirx.floormod(block + (h + int64(first)) * int64(step) + 1, stride), int64(0))
        return tirx.any(is_near, is_stripe)

    return shown


def _build_bidirectional(token: Callable[..., Expr]) -> Callable[..., Expr]:
    """Return a formula: all keys are visible to each row, except the last key to earlier rows."""

    def ahead(b: Expr, h: Expr, i: Expr, j: Expr, past: Read, counts: Read) -> Expr:
        last = past(b) + counts(b) - 1
        row, key = past(b) + i, token(b, j, past)
        return tirx.any(key < last, tirx.all(tirx.EQ(row, last), tirx.EQ(key, last)))

    return ahead


def _build_biases(
    settings: GptSettings, tables: ScoreTables, before: Value, context: Value, is_new: bool
) -> tuple[Formula, dict[str, Any]] | None:
    """Return the formula that adds ALiBi and relative biases, and its arguments.

    `before` is the number of positions before the first row.
    """
    optional = {"before": before, "slopes": tables.slopes, "bias": tables.bias, "bucketed": tables.bucketed}
    if tables.bucketed is not None:
        optional["context"] = context
    arrays = {name: value for name, value in optional.items() if value is not None}
    if not arrays.keys() & {"slopes", "bias", "bucketed"}:
        return None
    sizes = () if tables.bias is None else tables.bias.shape[1:]

    def changed(b: Expr, h: Expr, i: Expr, j: Expr, s: Expr, *operands: Any) -> Expr:
        reads = dict(zip(arrays, operands))
        first = reads["before"](b)
        row, key = first + i, (first + j if is_new else j)
        if tables.slopes is not None:
            s = s + reads["slopes"](h) * (key - row).astype("float32")
        if tables.bias is not None:
            bias_index = (_clamp(x, size) for x, size in zip((row, key), operands[len(arrays) :]))
            s = s + reads["bias"](h, *bias_index).astype("float32")
        if tables.bucketed is not None:
            max_distance = settings.max_distance
            distance = tirx.max(tirx.min(key - row, int64(max_distance)), int64(-max_distance)) + int64(max_distance)
            s = s + reads["bucketed"](reads["context"](b), h, distance)
        return s

    return trace_formula(changed, list(arrays.values()), "float32", sizes)


def _read_slopes(node: Node, settings: GptSettings, slopes_input: Value | None) -> Value:
    """Return the slopes, float32 [Hq]: the input or this rank's default, times the factor of the position type."""
    heads, factor = settings.heads, settings.alibi or 1.0
    if slopes_input is None:
        first = settings.tp_rank * heads
        slopes = alibi_slopes(heads * settings.tp_size, range(first, first + heads))
        return node.constant((slopes * factor).astype("float32"))
    require_tensor(node, "alibi_slopes", slopes_input, "float32", f"[{heads}]")
    slopes_input = assert_shape(node, slopes_input, (heads,))
    scale = tirx.const(factor, "float32")
    return compute(node, "slopes", lambda i, x: x(*i) * scale, [slopes_input], (heads,))


def _compute_bucketed_bias(node: Node, settings: GptSettings, table: Value) -> Value:
    """Return the bias by phase, head and distance from -max_distance to max_distance, of a table [Hq, buckets].

    Buckets (T5, arXiv:1910.10683) are exact up to half of their number, and logarithmic beyond.
    """
    if table.rank != 2 or not isinstance(table.shape[1], int):
        raise node.error(
            "node.shape_mismatch",
            f"relative_attention_bias has shape {list(table.shape)}.",
            "Make it [num_heads, buckets].",
        )
    table = assert_shape(node, table, (settings.heads, table.shape[1]))
    max_distance = settings.max_distance
    widths = (table.shape[1], table.shape[1] // 2 if settings.is_bidirectional else table.shape[1])
    if widths[1] < 2 or max_distance <= widths[1] // 2:  # buckets of the context phase, which may be the only phase
        raise node.error(
            "gpt_attention.max_distance_too_small",
            f"attribute max_distance is {max_distance}, for {table.shape[1]} buckets.",
            "Make it more than half the number of buckets.",
        )

    def element(index: tuple[Expr, ...], table: Read) -> Expr:
        phase, h, distance_index = index
        distance = distance_index - int64(max_distance)
        buckets = []
        for width, is_bidirectional in ((widths[0], False), (widths[1], settings.is_bidirectional)):
            size = tirx.abs(distance) if is_bidirectional else tirx.max(-distance, int64(0))
            exact = width // 2
            ratio = tirx.max(size, int64(1)).astype("float32") / tirx.const(float(exact), "float32")
            span = tirx.log(tirx.const(max(max_distance, exact + 1) / exact, "float32"))
            far = tirx.log(ratio) / span * tirx.const(float(width - exact), "float32")
            far = tirx.min(int64(exact) + tirx.max(far, tirx.const(0.0, "float32")).astype("int64"), int64(width - 1))
            bucket = tirx.Select(size < int64(exact), size, far)
            buckets.append(bucket + tirx.Select(distance > 0, int64(width), int64(0)) if is_bidirectional else bucket)
        bucket = tirx.Select(phase > 0, buckets[1], buckets[0])
        return table(h, bucket).astype("float32")

    return compute(
        node, "bias_by_distance", element, [table], (2, settings.heads, 2 * max_distance + 1), dtype="float32"
    )


def _read_mask(node: Node, inputs: Mapping[str, Value], requests: GptRequests) -> Value | None:
    """Return the mask as bool [1, 1, rows without gaps, keys]."""
    mask, bits = inputs.get("attention_mask"), inputs.get("attention_packed_mask")
    if mask is None and bits is None:
        return None
    if bits is not None:
        unpacked = _unpack_mask(node, assert_shape(node, bits, (requests.rows, *bits.shape[1:])))
        mask = unpacked if mask is None else mask
    assert mask is not None
    require_tensor(node, "attention_mask", mask, "bool", "[rows, keys]")
    mask = assert_shape(node, mask, (requests.rows, mask.shape[1]))
    if requests.is_padded:
        mask = compute(
            node, "mask", lambda i, x, source: x(source(i[0]), i[1]), [mask, requests["source"]], mask.shape
        )  # fmt: skip
    return node.reshape_to(mask, (1, 1, requests.rows, mask.shape[1]))


def _unpack_mask(node: Node, bits: Value) -> Value:
    require_tensor(node, "attention_packed_mask", bits, ("uint32", "int32"), "[rows, words]")

    def element(index: tuple[Expr, ...], packed: Read) -> Expr:
        row, key = index
        word = packed(row, tirx.floordiv(key, int64(32))).astype("int64")
        return tirx.NE((word >> tirx.floormod(key, int64(32))) & int64(1), int64(0))

    shape = (bits.shape[0], node.simplify(bits.shape[1] * 32))
    return compute(node, "unpacked", element, [bits], shape, dtype="bool")


def _clamp(index: Expr, size: Expr) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))
