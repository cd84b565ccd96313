"""The score of a pair: its scaled dot product, the soft cap, the score modification and the mask.

In all of these one of i, j may be a vector (`T.ramp`). Lanes outside [0, S) x [0, T) are legal: a mask is then read at
the nearest element inside. Expressions are not bound to variables: `T.bind` those that are used twice (but no vector of
bool, which TVM cannot bind).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..expr.emit import broadcast, cast, lanes, scalar_type, widen_to
from ..expr.emit_interval import Interval
from ..record.formula import Formula
from ..record.problem import Mask
from .addressing import Addressing
from .parameters import AttentionParameters, int64

HIDDEN_BIAS = -5e4
"""Additive masks mask keys with -inf or with the lowest number of their type. Scores do not come near this bound. So a
key with a lower bias has no effect on the softmax of a row in which any other key scores more than half of this bound.
"""


class PairScores:
    """Scores and masks, in acc_dtype unless a mask is bool."""

    def __init__(self, parameters: AttentionParameters, addressing: Addressing) -> None:
        self.problem, self.buffers, self.scratch = parameters.problem, parameters.buffers, parameters.scratch
        self.S, self.addressing = parameters.S, addressing
        mask = self.problem.mask
        self.has_mask = mask is not None
        self.has_tensor = isinstance(mask, Mask)
        self.has_bias = mask is not None and mask.dtype != "bool"  # elements are added to scores
        self.formula, self.score_mod = (
            parameters.bind(formula.value) if isinstance(formula, Formula) else None
            for formula in (mask, self.problem.score)
        )
        self.T = parameters.T
        if isinstance(mask, Formula):
            self.mask_keys = parameters.scalars.get("mask_keys", int64(parameters.T))

    @property
    def can_skip_finite(self) -> bool:
        """Whether tiles may be skipped that finite numbers mask; these count in rows that see nothing better."""
        return self.formula is not None and self.has_bias

    def compute_logit(
        self,
        s: Expr,
        b: Expr,
        h: Expr,
        i: Expr,
        j: Expr,
        *,
        inside: bool = False,
        tanh: Callable[[Expr], Expr] | None = None,
    ) -> Expr:
        """Return the logit of a pair from its scaled dot product s: soft cap, score modification, then additive mask.

        It is meaningless for a masked pair: select it away. inside is as in `compute_bias`.
        """
        return self.add_bias(self.apply_score_mod(s, b, h, i, j, inside=inside, tanh=tanh), b, h, i, j, inside=inside)

    @property
    def scale(self) -> Expr:
        """The factor of dot products: a constant, or a parameter of the kernel."""
        constant = self.problem.scale
        return self.buffers["scale"][0] if constant is None else self._constant(constant)

    @property
    def has_score_mod(self) -> bool:
        """Whether scaled dot products are modified before the mask."""
        return bool(self.problem.softcap) or self.score_mod is not None

    def apply_score_mod(
        self,
        s: Expr,
        b: Expr,
        h: Expr,
        i: Expr,
        j: Expr,
        *,
        inside: bool = False,
        tanh: Callable[[Expr], Expr] | None = None,
    ) -> Expr:
        """Apply soft cap and score modification to the scaled dot product s of a pair.

        h and i may both be vectors. A kernel can pass its own tanh, for softcap * tanh(s / softcap).
        """
        c = self.problem.softcap
        if c != 0.0:
            s = (tanh or _tanh)(s * self._constant(1.0 / c)) * self._constant(c)
        if self.score_mod is None:
            return s
        if not inside and self.problem.score is not None and self.problem.score.tables():
            i, j = self._nearest(i, int64(self.S)), self._nearest(j, int64(self.T))
        return broadcast(cast(self.score_mod(b, h, i, j, s), self.problem.acc_dtype), lanes(s))

    def add_bias(self, s: Expr, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False) -> Expr:
        """Return s plus the additive mask, if there is one."""
        return s + self._mask(b, h, i, j, inside) if self.has_bias else s

    def compute_initial_statistics(self, h: Expr) -> tuple[Expr, Expr]:
        """Return the running maximum m and sum l of a row of query head h before its first key; scalars."""
        if not self.problem.sink:
            return self._constant(float("-inf")), self._constant(0.0)
        return widen_to(self.buffers["sink"][h], self.problem.acc_dtype), self._constant(1.0)

    # The mask.

    def is_unmasked(self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False) -> Expr:
        """Return whether the mask lets row i see key j; bool."""
        value = self._mask(b, h, i, j, inside)
        if value.ty.dtype.is_bool:
            return value
        return tirx.NE(value, broadcast(self._constant(float("-inf")), lanes(value)))

    def compute_bias(self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False) -> Expr:
        """Return the mask as a bias to add to the score, -inf where it masks a key, with the lanes of i and j.

        inside promises that every lane is inside [0, S) x `KeyRanges.compute_tile_ranges`, so that a mask can be read
        without clamping.
        """
        return self.convert_to_bias(broadcast(self._mask(b, h, i, j, inside), max(lanes(i), lanes(j))))

    def convert_to_bias(self, element: Expr) -> Expr:
        """Convert an element of the mask, or a vector of them, to a bias that is added to the score."""
        value = self._number(element)
        if not value.ty.dtype.is_bool:
            return value
        shown, hidden = (broadcast(self._constant(x), lanes(value)) for x in (0.0, float("-inf")))
        return tirx.Select(value, shown, hidden)

    def element(
        self, convert: Callable[[Expr], Expr], b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False
    ) -> Expr:
        """Return the mask tensor's converted element for the pair; i is a scalar.

        A mask of no columns masks nothing. This is decided on converted elements: TVM 0.27 promotes an if_then_else of
        bfloat16 to float32, whose bits are others.
        """
        buffer, indices = self.mask_at(b, h, i, j, inside=inside)
        value, mask = convert(buffer[tuple(indices)]), self.problem.mask
        if not isinstance(mask, Mask) or not mask.starts:
            return value
        shown = tirx.const(mask.dtype == "bool", scalar_type(value))  # bits and numbers of 0.0 are 0
        return tirx.if_then_else(buffer.shape[3] > 0, value, broadcast(shown, lanes(value)))

    def column(self, b: Expr, j: Expr) -> Expr:
        """Return the column of the mask tensor for key j."""
        mask = self.problem.mask
        if not isinstance(mask, Mask) or not mask.starts:
            return j
        return j + cast(tirx.max(self.buffers["key_starts"][b], T.int64(0)), scalar_type(j))

    def mask_at(
        self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False
    ) -> tuple[tirx.Buffer, list[Expr | int]]:
        """Return buffer and indices of the mask tensor's element for the pair, within its bounds unless `inside`."""
        mask, buffer = self.problem.mask, self.buffers["mask"]
        assert isinstance(mask, Mask)
        indices: list[Expr | int] = []
        i = self.addressing.row(b, i)
        j = self.column(b, j)
        for axis, index in enumerate((b, h, i, j)):
            if mask.dims[axis] == 1 and not (axis == 3 and mask.pad):
                indices.append(0)
            elif axis in mask.broadcasts or (axis >= 2 and not inside):
                indices.append(tirx.max(tirx.min(index, cast(buffer.shape[axis], scalar_type(index)) - 1), 0))
            else:
                indices.append(index)
        return buffer, indices

    @property
    def mask_per_row(self) -> bool:
        """Whether the query rows of one key/value head, of all its query heads, may differ in their mask."""
        mask = self.problem.mask
        if isinstance(mask, Formula):
            return "i" in mask.index_names or ("h" in mask.index_names and self.problem.group > 1)
        return mask is not None and (mask.dims[2] != 1 or (mask.dims[1] != 1 and self.problem.group > 1))

    def emit_mask_bounds(self, b: Expr, h: Expr, heads: int, rows: Interval, keys: Interval) -> Interval:
        """Emit bounds of the formula as additive values, -inf where it masks a key.

        The bounds are over rows and keys (ends included) of `heads` query heads from h on. Emits code at the insertion
        point of the IRBuilder.
        """
        assert self.formula is not None
        zero, hidden = self._constant(0.0), self._constant(float("-inf"))
        heads = heads if self.problem.has_formula_per_head else 1
        low, high = (self.scratch(1, self.problem.acc_dtype) for _ in range(2))
        T.buffer_store(low, -hidden, [0])
        T.buffer_store(high, hidden, [0])
        with T.serial(heads) as g:
            bounds = self.formula.compute_interval(b, T.bind(h + g), rows, keys)
            if bounds is None:
                ends = hidden, -hidden
            elif self.has_bias:
                ends = widen_to(bounds[0], self.problem.acc_dtype), widen_to(bounds[1], self.problem.acc_dtype)
            else:
                ends = tirx.Select(bounds[0], zero, hidden), tirx.Select(bounds[1], zero, hidden)
            T.buffer_store(low, tirx.min(low[0], ends[0]), [0])
            T.buffer_store(high, tirx.max(high[0], ends[1]), [0])
        return low[0], high[0]

    def _mask(self, b: Expr, h: Expr, i: Expr, j: Expr, inside: bool) -> Expr:
        """Return the mask's element for the pair: bool as it is, any other type in acc_dtype."""
        if self.formula is not None:
            if not inside:
                i, j = self._nearest(i, int64(self.S)), self._nearest(j, self.mask_keys)
            return self._number(self.formula(b, h, i, j))
        mask = self.problem.mask
        assert isinstance(mask, Mask)

        def load(row: Expr) -> Expr:
            if lanes(j) == 1 or not inside or 3 not in mask.broadcasts:
                return self.element(self._number, b, h, row, j, inside=inside)
            # A clamped vector of indices would be loaded lane by lane.
            buffer, indices = self.mask_at(b, h, row, j, inside=inside)
            first, elements = (self._number(buffer[(*indices[:3], at)]) for at in (0, j))
            return tirx.if_then_else(buffer.shape[3] > 1, elements, broadcast(first, lanes(j)))

        if mask.dims[2] == 1 or lanes(i) == 1:
            value = load(i)
        else:  # TensorIR takes a vector index on the last axis only
            all_lanes = range(lanes(i))
            value = tirx.Shuffle([load(tirx.Shuffle([i], [lane])) for lane in all_lanes], list(all_lanes))
        return value

    def _nearest(self, index: Expr, size: Expr) -> Expr:
        """Return the index, or the nearest one of [0, size)."""
        return tirx.max(tirx.min(index, cast(size, scalar_type(index)) - 1), 0)

    def _number(self, value: Expr) -> Expr:
        """Return a mask's element: bool as it is, any other type widened."""
        return value if scalar_type(value) == "bool" else widen_to(value, self.problem.acc_dtype)

    def _constant(self, value: float) -> Expr:
        return tirx.const(value, self.problem.acc_dtype)


def _tanh(x: Expr) -> Expr:
    """Return tanh with a small relative error near 0, where 1 - 2 / (exp(2 x) + 1) cancels.

    A large soft cap makes arguments small and multiplies the error by the cap. For the same reason the error does not
    depend on the target: that of the instruction on GPUs is 2^-11.
    """
    if scalar_type(x) != "float32":
        return T.tanh(x)
    x2 = x * x
    series = 62 / 2835
    for coefficient in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = series * x2 + tirx.const(coefficient, "float32")
    one, two, near = (broadcast(tirx.const(c, "float32"), lanes(x)) for c in (1.0, 2.0, 0.25))
    return tirx.Select(tirx.abs(x) < near, x * series, one - two / (T.exp(two * x) + one))
