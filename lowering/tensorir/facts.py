"""Bounds of index variables, and the simplification of indices by them.

TVM's analyzer does not divide by symbolic sizes. Reshapes with symbolic dimensions are full of such quotients, and a
remaining quotient costs more than the rest of a loop: those by provably larger numbers are removed here.
"""

from __future__ import annotations

import copy
import functools
import operator

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from .expressions import Expr, children, is_float, rewrite, substitute, walk
from .memo import Memo

_DIVISIONS = (prim.FloorDiv, prim.FloorMod)


class Facts:
    """Ranges of variables, and sizes, which are not negative."""

    def __init__(self) -> None:
        self.analyzer = Analyzer()
        self.largest: dict[tirx.Var, Expr] = {}
        self._clear_caches()

    def _clear_caches(self) -> None:
        """Clear results that were derived from fewer facts. Kernels ask the same for every row of a tile."""
        self._simplified, self._divided, self._proven = Memo[Expr](), Memo[Expr](), Memo[bool]()

    @staticmethod
    def of(func: tirx.PrimFunc) -> Facts:
        """Return the facts that the sizes of the function's buffers are sizes."""
        facts = Facts()
        for buffer in filter(tirx.is_buffer_var, func.params):
            for extent in buffer.shape:
                facts.add_size(extent)
        return facts

    def add_size(self, size: Expr) -> None:
        """Record that the variables in `size` are sizes."""
        for node in walk(size):
            if isinstance(node, tirx.Var):
                self.largest[node] = node
        self._clear_caches()

    def copy(self) -> Facts:
        other = copy.copy(self)
        other.analyzer, other.largest = self.analyzer.clone(), dict(self.largest)
        other._clear_caches()
        return other

    def bind(self, var: Expr, low: Expr | int, high: Expr) -> None:
        """Record that 0 <= low <= var < high. Constants are their own bounds."""
        if isinstance(var, tirx.Var):
            # In the variable's type: it replaces a variable that has a single value.
            low = tirx.const(low, str(var.ty)) if isinstance(low, int) else low
            self.analyzer.bind(var, ir.Range(low, high), allow_override=True)
            self.largest[var] = self.analyzer.simplify(high - 1)
            self._clear_caches()

    def simplify(self, expr: Expr) -> Expr:
        """Return a simpler form; floats in it are unchanged, as the analyzer takes them for real numbers."""
        return expr if is_float(expr) else self._simplified(expr, self._simplify)

    def _simplify(self, expr: Expr) -> Expr:
        hidden, floats = _replace_floats(expr)
        return substitute(self.analyzer.simplify(rewrite(self.analyzer.simplify(hidden), self._divide)), floats)

    def can_prove(self, condition: Expr) -> bool:
        """Return whether the condition provably holds.

        Subexpressions of floats are replaced by arbitrary numbers: they have no facts, and the analyzer takes a tenth
        of a second to find that out, as it tries all its rules on every branch inside.
        """
        return self._proven(condition, lambda expr: self.analyzer.can_prove(_replace_floats(expr)[0]))

    def _divide(self, node: Expr) -> Expr | None:
        """Return simpler forms of a // n and a % n for symbolic n, None if there are none."""
        if type(node) not in _DIVISIONS or node.ty != "int64":
            return None
        return self._divided(node, self._simplify_division)

    def _simplify_division(self, node: Expr) -> Expr:
        a, n = (self.analyzer.simplify(rewrite(operand, self._divide)) for operand in (node.a, node.b))
        is_quotient = isinstance(node, prim.FloorDiv)
        if is_quotient and isinstance(a, prim.FloorDiv):  # (a // m) // n
            return self._divided(prim.FloorDiv(a.a, self.analyzer.simplify(a.b * n)), self._simplify_division)
        multiple, remainder = self._split_multiples(a, n)
        bound = self.bound(remainder)
        if bound is not None and self.can_prove(_distribute(n - bound) > 0):
            return multiple if is_quotient else remainder
        return multiple + remainder // n if is_quotient else remainder % n

    def _split_multiples(self, a: Expr, n: Expr) -> tuple[Expr, Expr]:
        """Return b and c with a = b n + c: the terms of a that are multiples of n, divided by it, and the others."""
        quotient: Expr = tirx.const(0, "int64")
        remainder: Expr = tirx.const(0, "int64")
        for term in _split_terms(a):
            factor = self._divide_term(term, n)
            quotient, remainder = (quotient + factor, remainder) if factor is not None else (quotient, remainder + term)
        return self.analyzer.simplify(quotient), self.analyzer.simplify(remainder)

    @staticmethod
    def _divide_term(term: Expr, n: Expr) -> Expr | None:
        """Return b with term = b n, if all factors of n are factors of the product `term`."""
        factors, constant = _split_factors(term)
        divisor_factors, divisor = _split_factors(n)
        if constant % divisor:
            return None
        for factor in divisor_factors:
            index = next(
                (i for i, f in enumerate(factors) if prim.expr_deep_equal(f, factor)),
                None,
            )
            if index is None:
                return None
            del factors[index]
        return functools.reduce(operator.mul, factors, tirx.const(constant // divisor, "int64"))

    def bound(self, a: Expr) -> Expr | None:
        """Return an upper bound of `a` in terms of sizes, or None; also None if `a` might be negative."""
        total: Expr = tirx.const(0, "int64")
        for term in _split_terms(a):
            factors, constant = _split_factors(term)
            bounds = [self._bound_of_factor(factor) for factor in factors]
            if constant < 0 or any(bound is None for bound in bounds):
                return None
            total = total + functools.reduce(operator.mul, bounds, tirx.const(constant, "int64"))
        return self.analyzer.simplify(total)

    def _bound_of_factor(self, factor: Expr) -> Expr | None:
        if isinstance(factor, tirx.Var):
            return self.largest.get(factor)
        if isinstance(factor, prim.Add):
            return self.bound(factor)
        if isinstance(factor, prim.FloorDiv | prim.FloorMod):
            a, n = self.bound(factor.a), self.bound(factor.b)
            if a is not None and n is not None:
                return a // factor.b if isinstance(factor, prim.FloorDiv) else factor.b - 1
        return None


def _replace_floats(expr: Expr) -> tuple[Expr, dict[tirx.Var, Expr]]:
    """Replace each integer and truth value computed from floats by a variable, and return the replaced expressions.

    Equal expressions get the same variable.
    """
    replaced: list[tuple[Expr, tirx.Var]] = []

    def replace(node: Expr) -> Expr | None:
        if is_float(node) or not any(is_float(operand) for operand in children(node)):
            return None
        replacement = next((var for original, var in replaced if prim.expr_deep_equal(original, node)), None)
        if replacement is None:
            replacement = tirx.Var(f"of_floats_{len(replaced)}", str(node.ty))
            replaced.append((node, replacement))
        return replacement

    return rewrite(expr, replace), {var: original for original, var in replaced}


def _split_terms(expr: Expr) -> list[Expr]:
    return [*_split_terms(expr.a), *_split_terms(expr.b)] if isinstance(expr, prim.Add) else [expr]


def _distribute(expr: Expr) -> Expr:
    """Return expr as a sum of products of factors that are not sums, where terms can cancel."""
    if isinstance(expr, prim.Add | prim.Sub):
        a, b = _distribute(expr.a), _distribute(expr.b)
        return a + b if isinstance(expr, prim.Add) else a - b
    if isinstance(expr, prim.Mul):
        a, b = _distribute(expr.a), _distribute(expr.b)
        for factor, other in ((a, b), (b, a)):
            if isinstance(factor, prim.Add):
                return _distribute(factor.a * other) + _distribute(factor.b * other)
            if isinstance(factor, prim.Sub):
                return _distribute(factor.a * other) - _distribute(factor.b * other)
        return a * b
    return expr


def _split_factors(expr: Expr) -> tuple[list[Expr], int]:
    """Return the factors of a product: the symbolic ones, and the constant."""
    if isinstance(expr, prim.IntImm):
        return [], expr.value
    if isinstance(expr, prim.Mul):
        (a, m), (b, n) = _split_factors(expr.a), _split_factors(expr.b)
        return [*a, *b], m * n
    return [expr], 1
