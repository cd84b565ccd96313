"""What is added to a score, and which keys masks show: formulas over positions, and masks that are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tvm import tirx
from tvm.ir import Expr

from ...attention.alibi import alibi_slopes
from ...attention.formula import Formula
from ...attention.parameters import int64
from ...attention.problem import Mask, Offset, Window
from ...importing.node import Node
from ...importing.values import Value
from ..asserted import asserted
from ..attend import formula_of
from ..kernels import compute
from .requests import Requests, at_least_one
from .settings import Settings

if TYPE_CHECKING:
    from .streaming import Stream

Read = Callable[..., Any]


@dataclass(frozen=True)
class Scoring:
    """Fields of the record, and the kernel's parameters that they read."""

    fields: dict[str, Any]
    given: dict[str, Any]


@dataclass(frozen=True)
class Tables:
    """What scores read beside positions, where there are any: mask [rows of qkv without gaps, keys], slopes [Hq],
    bias [Hq, rows, keys] and bucketed [2, Hq, 2 max_distance + 1] (by phase, head and distance)."""

    mask: Value | None
    slopes: Value | None
    bias: Value | None
    bucketed: Value | None


def tables_of(node: Node, settings: Settings, given: Mapping[str, Value], requests: Requests, dtype: str) -> Tables:
    slopes = bias = bucketed = None
    if settings.alibi is not None:
        slopes = _slopes(node, settings, given.get("alibi_slopes"))
    if "relative_attention_bias" in given:
        bias = given["relative_attention_bias"]
        if bias.dtype not in (dtype, "float32"):
            raise node.error(f"relative_attention_bias is {bias.dtype}.", f"Make it {dtype} or float32.")
        if settings.max_distance:
            bucketed, bias = _bucketed(node, settings, bias), None
        elif bias.rank != 3:
            raise node.error(
                f"relative_attention_bias has rank {bias.rank}, and max_distance is 0.",
                "Make it [num_heads, rows, keys], or set max_distance for a table [num_heads, buckets].",
            )
        else:
            bias = asserted(node, bias, (settings.heads, *bias.shape[1:]))
            bias = at_least_one(node, "relative_attention_bias", bias, 1, 2)
    return Tables(_mask(node, given, requests), slopes, bias, bucketed)


Keys = Literal["all", "past", "new"]
"""Which keys an attention is over: all that there are behind the call, those before it, or those of the call."""

_OFFSETS: dict[Keys, Offset] = {"new": "zero", "all": "lengths", "past": "behind"}


def scoring(
    node: Node,
    settings: Settings,
    requests: Requests,
    stream: Stream | None,
    tables: Tables,
    keys: Keys,
    windowed: bool,
) -> Scoring:
    """How an attention over such keys scores them. A stream says where keys stand that are not all there; masks go by
    tokens all the same."""
    new = keys == "new"
    fields: dict[str, Any] = {"softcap": settings.softcap, "window": _window(settings, tables, keys, windowed)}
    given: dict[str, Any] = {}
    if windowed:
        given |= {"lefts": requests["lefts"], "sink_keys": requests["new_sinks" if new else "sinks"]}
    past, counts = requests["past"], requests["counts"]
    skipping = stream is not None and keys == "past"
    skipped = [requests["sinks"], stream.skips] if skipping and stream is not None else []

    def token(b: Expr, j: Expr, past: Read, *skipped: Read) -> Expr:
        """Which token key j is."""
        if new:
            return past(b) + j
        if skipped:
            sinks, skips = skipped
            return tirx.Select(j < sinks(b), j, j + skips(b))
        return j

    if tables.mask is not None:
        mask = tables.mask
        if skipping and stream is not None:
            mask = _gathered(node, mask, requests, stream, token)
        fields["mask"] = Mask("bool", (1, 1, None, None), pad=True, starts=True)
        zeros = compute(node, "zeros", lambda i: tirx.const(0, "int64"), [], (requests.sequences,), dtype="int64")
        given |= {"mask": mask, "key_starts": past if new else zeros}
    elif settings.mask == "blocksparse" and not settings.cross:
        sparse = _sparse(settings)

        def shown(b: Expr, h: Expr, i: Expr, j: Expr, past: Read, *skipped: Read) -> Expr:
            return sparse(h, past(b) + i, token(b, j, past, *skipped))

        fields["mask"], read = formula_of(shown, [past, *skipped])
        given |= read
    elif settings.mask.startswith("bidirectional") and not settings.cross and keys != "past":

        def ahead(b: Expr, h: Expr, i: Expr, j: Expr, past: Read, counts: Read) -> Expr:
            last = past(b) + counts(b) - 1
            row, key = past(b) + i, token(b, j, past)
            return tirx.any(key < last, tirx.all(tirx.EQ(row, last), tirx.EQ(key, last)))

        fields["mask"], read = formula_of(ahead, [past, counts])
        given |= read
    before = past if stream is None else stream.counts
    change = _change(settings, tables, before, requests["context"], new)
    if change is not None:
        fields["score"], read = change
        given |= read
    return Scoring(fields, given)


def _gathered(node: Node, mask: Value, requests: Requests, stream: Stream, token: Callable[..., Expr]) -> Value:
    """The columns of the mask for the keys of a stream, [1, 1, rows without gaps, keys]."""

    def element(
        index: tuple[Expr, ...], mask: Read, of: Read, source: Read, sinks: Read, skips: Read, *size: Expr
    ) -> Expr:
        n, j = index[2], index[3]
        key = token(of(source(n)), j, None, sinks, skips)
        zero = int64(0)
        inside = tirx.all(key >= zero, key < size[0])
        return tirx.if_then_else(inside, mask(zero, zero, n, tirx.max(tirx.min(key, size[0] - 1), zero)), False)

    arrays = [mask, requests["sequence"], requests["source"], requests["sinks"], stream.skips]
    return compute(
        node, "mask", element, arrays, (1, 1, requests.rows, stream.most), [mask.shape[3]], dtype="bool"
    )  # fmt: skip


def _window(settings: Settings, tables: Tables, keys: Keys, windowed: bool) -> Window | None:
    if settings.cross:
        return None
    causal = settings.mask in ("causal", "sliding_window_causal", "blocksparse") and tables.mask is None
    right = 0 if causal and keys != "past" else None
    if not windowed and right is None:
        return None
    offset = _OFFSETS[keys]
    given: Literal["given"] = "given"
    return Window(given, right, offset, given) if windowed else Window(right=right, offset=offset)


def _sparse(settings: Settings) -> Callable[[Expr, Expr, Expr], Expr]:
    """Blocks of a row's own neighborhood, and of every head's stripes."""
    sparse = settings.sparse
    step = 0 if sparse.homogeneous else max(1, sparse.stride // (settings.heads * settings.tp_size))
    first = settings.tp_rank * settings.heads

    def shown(h: Expr, row: Expr, key: Expr) -> Expr:
        size, stride = int64(sparse.size), int64(sparse.stride)
        block = tirx.floordiv(key, size)
        near = tirx.floordiv(row, size) - block < int64(sparse.local)
        stripe = tirx.EQ(tirx.floormod(block + (h + int64(first)) * int64(step) + 1, stride), int64(0))
        return tirx.any(near, stripe)

    return shown


def _change(
    settings: Settings, tables: Tables, before: Value, context: Value, new: bool
) -> tuple[Formula, dict[str, Any]] | None:
    """What ALiBi and relative biases add; `before` is how many positions lie before the first row."""
    present = {"before": before, "slopes": tables.slopes, "bias": tables.bias, "bucketed": tables.bucketed}
    if tables.bucketed is not None:
        present["context"] = context
    arrays = {name: value for name, value in present.items() if value is not None}
    if not arrays.keys() & {"slopes", "bias", "bucketed"}:
        return None
    sizes = () if tables.bias is None else tables.bias.shape[1:]

    def changed(b: Expr, h: Expr, i: Expr, j: Expr, s: Expr, *given: Any) -> Expr:
        reads = dict(zip(arrays, given))
        first = reads["before"](b)
        row, key = first + i, (first + j if new else j)
        if tables.slopes is not None:
            s = s + reads["slopes"](h) * (key - row).astype("float32")
        if tables.bias is not None:
            at = (_nearest(x, size) for x, size in zip((row, key), given[len(arrays) :]))
            s = s + reads["bias"](h, *at).astype("float32")
        if tables.bucketed is not None:
            most = settings.max_distance
            distance = tirx.max(tirx.min(key - row, int64(most)), int64(-most)) + int64(most)
            s = s + reads["bucketed"](reads["context"](b), h, distance)
        return s

    return formula_of(changed, list(arrays.values()), "float32", sizes)


def _slopes(node: Node, settings: Settings, given: Value | None) -> Value:
    """float32 [Hq]: those given, else those of this rank's heads; times what the position type asks for."""
    heads, factor = settings.heads, settings.alibi or 1.0
    if given is None:
        first = settings.tp_rank * heads
        slopes = alibi_slopes(heads * settings.tp_size, range(first, first + heads))
        return node.constant((slopes * factor).astype("float32"))
    if given.dtype != "float32" or given.rank != 1:
        raise node.error(f"alibi_slopes is {given.dtype} of rank {given.rank}.", f"Make it float32 [{heads}].")
    given = asserted(node, given, (heads,))
    scale = tirx.const(factor, "float32")
    return compute(node, "slopes", lambda i, x: x(*i) * scale, [given], (heads,))


def _bucketed(node: Node, settings: Settings, table: Value) -> Value:
    """The bias by phase, head and distance from -max_distance to max_distance, of a table [Hq, buckets] (T5,
    arXiv:1910.10683): exact up to half of the buckets, by the logarithm from there on."""
    if table.rank != 2 or not isinstance(table.shape[1], int):
        raise node.error(f"relative_attention_bias is {list(table.shape)}.", "Make it [num_heads, buckets].")
    table = asserted(node, table, (settings.heads, table.shape[1]))
    most = settings.max_distance
    widths = (table.shape[1], table.shape[1] // 2 if settings.bidirectional else table.shape[1])
    if widths[1] < 2 or most <= widths[1] // 2:  # those of the context phase, which may be all that there is
        raise node.error(
            f"attribute max_distance is {most}, for {table.shape[1]} buckets.", "Make it more than half of them."
        )

    def element(index: tuple[Expr, ...], table: Read) -> Expr:
        phase, h, at = index
        distance = at - int64(most)
        found = []
        for width, both in ((widths[0], False), (widths[1], settings.bidirectional)):
            size = tirx.abs(distance) if both else tirx.max(-distance, int64(0))
            exact = width // 2
            ratio = tirx.max(size, int64(1)).astype("float32") / tirx.const(float(exact), "float32")
            span = tirx.log(tirx.const(max(most, exact + 1) / exact, "float32"))
            far = tirx.log(ratio) / span * tirx.const(float(width - exact), "float32")
            far = tirx.min(int64(exact) + tirx.max(far, tirx.const(0.0, "float32")).astype("int64"), int64(width - 1))
            bucket = tirx.Select(size < int64(exact), size, far)
            found.append(bucket + tirx.Select(distance > 0, int64(width), int64(0)) if both else bucket)
        bucket = tirx.Select(phase > 0, found[1], found[0])
        return table(h, bucket).astype("float32")

    return compute(node, "bias_by_distance", element, [table], (2, settings.heads, 2 * most + 1), dtype="float32")


def _mask(node: Node, given: Mapping[str, Value], requests: Requests) -> Value | None:
    """[1, 1, rows without gaps, keys], bool."""
    mask, bits = given.get("attention_mask"), given.get("attention_packed_mask")
    if mask is None and bits is None:
        return None
    if bits is not None:
        unpacked = _unpacked(node, asserted(node, bits, (requests.rows, *bits.shape[1:])))
        mask = unpacked if mask is None else mask
    assert mask is not None
    if mask.rank != 2 or mask.dtype != "bool":
        raise node.error(f"attention_mask is {mask.dtype} of rank {mask.rank}.", "Make it bool [rows, keys].")
    mask = asserted(node, mask, (requests.rows, mask.shape[1]))
    if requests.padded:
        mask = compute(
            node, "mask", lambda i, x, source: x(source(i[0]), i[1]), [mask, requests["source"]], mask.shape
        )  # fmt: skip
    return node.reshaped(mask, (1, 1, requests.rows, mask.shape[1]))


def _unpacked(node: Node, bits: Value) -> Value:
    if bits.rank != 2 or bits.dtype not in ("uint32", "int32"):
        raise node.error(f"attention_packed_mask is {bits.dtype} of rank {bits.rank}.", "Make it uint32 [rows, words].")

    def element(index: tuple[Expr, ...], words: Read) -> Expr:
        row, key = index
        word = words(row, tirx.floordiv(key, int64(32))).astype("int64")
        return tirx.NE((word >> tirx.floormod(key, int64(32))) & int64(1), int64(0))

    shape = (bits.shape[0], node.simplify(bits.shape[1] * 32))
    return compute(node, "unpacked", element, [bits], shape, dtype="bool")


def _nearest(index: Expr, size: Expr) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))
