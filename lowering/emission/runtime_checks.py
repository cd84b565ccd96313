"""C code of the checks of data and sizes that the importer adds (importing/checks.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import tirx
from tvm.ir import StringImm
from tvm.tirx import IntImm

from ..tensorir.expressions import Expr
from .c_code import CTensor
from .c_names import quote

_SPAN_BYTES = 32  # of Span in requests.h
ToC = Callable[[Expr], str]


def list_numbers(sizes: Sequence[Expr], to_c: ToC) -> str:
    """Return C code of an array of sizes."""
    return f"(const int64_t[]){{{', '.join(map(to_c, sizes)) or 0}}}"


def make_indices_check(
    to_c: ToC, tensor: CTensor, bounds: Sequence[Expr], from_the_back: IntImm, name: StringImm, bounded: StringImm
) -> str:
    """Return the check that integers are less than their bounds; arguments are those of `importing.checks`."""
    dtype = tvm.DataType(tensor.dtype)
    names = ", ".join(map(quote, str(bounded.value).split("\n")))
    is_signed, back = int(tensor.dtype.startswith("int")), int(from_the_back.value)
    return (
        f"check_indices(error, &(Indices){{{tensor.address}, {dtype.bits}, {is_signed}, {len(tensor.shape)}, "
        f"{list_numbers(tensor.shape, to_c)}, {list_numbers(bounds, to_c)}, {len(bounds)}, {back}, "
        f"{quote(str(name.value))}, (const char* const[]){{{names}}}}})"
    )


def make_sizes_check(
    to_c: ToC, sizes: Sequence[Expr], other_dims: Sequence[Expr], itemsize: IntImm, name: StringImm
) -> str:
    """Return the check of sizes computed from data; arguments are those of `importing.checks`."""
    listed = f"{list_numbers(sizes, to_c)}, {len(sizes)}, {list_numbers(other_dims, to_c)}, {len(other_dims)}"
    return f"check_sizes(error, {listed}, {int(itemsize.value)}, {quote(str(name.value))})"


def make_condition_check(to_c: ToC, condition: Expr, numbers: Sequence[Expr], code: StringImm, text: StringImm) -> str:
    """Return the check of a condition on sizes; arguments are those of `importing.checks`."""
    literals = f"{quote(str(code.value))}, {quote(str(text.value))}"
    return f"check_condition(error, {to_c(condition)} != 0, {literals}, {list_numbers(numbers, to_c)}, {len(numbers)})"


def make_requests_check(
    to_c: ToC, name: str, sizes: Sequence[Expr], node: StringImm, tables: Sequence[CTensor | None]
) -> str:
    """Return the check of a batch of requests by the function `name`; arguments are those of `importing.checks`."""
    entries = ", ".join("{0}" if table is None else _describe_table(table, to_c) for table in tables)
    return (
        f"{name}(&(Requests){{&(Node){{{quote(str(node.value))}, error, lowering_context.scratch, "
        f"lowering_context.bytes}}, "
        f"{list_numbers(sizes, to_c)}, {len(sizes)}, (const Table[]){{{entries}}}}})"
    )


def _describe_table(table: CTensor, to_c: ToC) -> str:
    is_narrow = int(table.dtype == "int32")
    return f"{{{table.address}, {list_numbers(table.shape, to_c)}, {len(table.shape)}, {is_narrow}}}"


def count_span_bytes(tables: Sequence[CTensor | None]) -> Expr:
    """Return how many bytes of memory the check of these tables needs: at most three spans of slots for each entry."""
    total: Expr = tirx.const(0, "int64")
    for table in tables:
        if table is not None:
            count: Expr = tirx.const(3 * _SPAN_BYTES, "int64")
            for size in table.shape:
                count = count * size
            total = total + count
    return total


def make_dim_check(to_c: ToC, text: str, axis: int, size: Expr, expected: Expr) -> str:
    """Return the check that a size of a tensor inside the model is another one."""
    return f"check_dim(error, {quote(text)}, {axis}, {to_c(size)}, {to_c(expected)})"
