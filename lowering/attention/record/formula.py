"""Formula: a mask, or a score modification, as an expression over (b, h, i, j) that a kernel evaluates on the fly.

The masks of real models are computed from positions, lengths and ids. As a tensor such a mask has S * T elements for
every head that differs; as an expression it reads a few small tables: the padding of each batch, a bias by distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from ..expr.node import INDICES, Expr, find_indices, find_parameters, rename_parameters
from ..expr.read import read_expr

SCORE_MOD_PREFIX = "score_"


@dataclass(frozen=True)
class Formula:
    """The mask's element for batch b, query head h, query row i and key j: `value`.

    Its type is bool (True is visible) or a floating-point type that is added to the score. It reads int64 scalars
    size_0, size_1, ... and tensors table_0, .... short means that there is one more scalar, mask_keys: keys from that
    number on are masked, and the element is not evaluated there. For a score modification the value is the new score, s
    the old one, and names begin with `SCORE_MOD_PREFIX`, as a record can have both.
    """

    value: Expr
    short: bool = False

    @staticmethod
    def from_tir(
        value: ir.Expr,
        indices: Sequence[tirx.Var],
        sizes: Sequence[tirx.Var],
        tables: Sequence[tirx.Buffer],
        short: bool = False,
    ) -> tuple[Formula, dict[str, tirx.Var | tirx.Buffer]]:
        """Return the formula for `value`, an expression of the indices (b, h, i, j[, s]), the sizes and loads from the
        tables.

        Also return the sizes and tables that it reads, by their names in it. With s among the indices it is a score
        modification.

        Raises ValueError for an expression that cannot be represented.
        """
        parameters = {f"size_{k}": size for k, size in enumerate(sizes)}
        parameters |= {f"table_{k}": table for k, table in enumerate(tables)}
        expr, names = rename_parameters(
            read_expr(value, indices, sizes, tables), SCORE_MOD_PREFIX if len(indices) == len(INDICES) else ""
        )
        return Formula(expr, short), {new: parameters[old] for new, old in names.items()}

    @property
    def dtype(self) -> str:
        return self.value.dtype

    @property
    def index_names(self) -> tuple[str, ...]:
        """Names of the indices that the element depends on."""
        return find_indices(self.value)

    def tables(self) -> dict[str, tuple[int, str]]:
        """Return rank and element type of the tables, by name."""
        return {name: (len(node.args), node.dtype) for name, node in find_parameters(self.value, "load").items()}

    def scalars(self) -> tuple[str, ...]:
        """Return the names of the kernel's int64 parameters for it."""
        return (*find_parameters(self.value, "scalar"), *(("mask_keys",) if self.short else ()))

    def names(self) -> tuple[str, ...]:
        """Return the names of the kernel's parameters for it, in their order: the tables, then the scalars."""
        return (*self.tables(), *self.scalars())
