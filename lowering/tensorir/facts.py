"""What is known about index variables, and the simplification of indices by it.

TVM's analyzer does not divide by symbolic sizes. Reshapes with symbolic dimensions are full of such quotients, and a
quotient that is left over costs more than the rest of a loop: those by provably larger numbers are removed here.
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
        self._forget()

    def _forget(self) -> None:
        """Drop what follows from fewer facts. Kernels ask the same of every row of a tile."""
        self._simplified, self._divided, self._proven = Memo[Expr](), Memo[Expr](), Memo[bool]()

    @staticmethod
    def of(func: tirx.PrimFunc) -> Facts:
        """That the sizes of the function's buffers are sizes."""
        facts = Facts()
        for buffer in filter(tirx.is_buffer_var, func.params):
            for extent in buffer.shape:
                facts.add_size(extent)
        return facts

    def add_size(self, size: Expr) -> None:
        """The variables in `size` are sizes."""
        for node in walk(size):
            if isinstance(node, tirx.Var):
                self.largest[node] = node
        self._forget()

    def copy(self) -> Facts:
        other = copy.copy(self)
        other.analyzer, other.largest = self.analyzer.clone(), dict(self.largest)
        other._forget()
        return other

    def bind(self, var: Expr, low: Expr | int, high: Expr) -> None:
        """0 <= low <= var < high. Constants are their own bounds."""
        if isinstance(var, tirx.Var):
            # In the variable's type: it is what stands for a variable that has one value alone.
            low = tirx.const(low, str(var.ty)) if isinstance(low, int) else low
            self.analyzer.bind(var, ir.Range(low, high), allow_override=True)
            self.largest[var] = self.analyzer.simplify(high - 1)
            self._forget()

    def simplify(self, expr: Expr) -> Expr:
        """A simpler form; floats in it stay as they are, as the analyzer takes them for real numbers."""
        return expr if is_float(expr) else self._simplified(expr, self._simplify)

    def _simplify(self, expr: Expr) -> Expr:
        hidden, floats = _without_floats(expr)
        return substitute(self.analyzer.simplify(rewrite(self.analyzer.simplify(hidden), self._divide)), floats)

    def can_prove(self, condition: Expr) -> bool:
        """What is made of floats stands for any number: nothing is known of it, and the analyzer, which tries all it
        knows on every branch inside, takes a tenth of a second to find that out."""
        return self._proven(condition, lambda given: self.analyzer.can_prove(_without_floats(given)[0]))

    def _divide(self, node: Expr) -> Expr | None:
        """Simpler forms of a // n and a % n for symbolic n."""
        if type(node) not in _DIVISIONS or node.ty != "int64":
            return None
        return self._divided(node, self._quotient_or_rest)

    def _quotient_or_rest(self, node: Expr) -> Expr:
        a, n = (self.analyzer.simplify(rewrite(operand, self._divide)) for operand in (node.a, node.b))
        quotient = isinstance(node, prim.FloorDiv)
        if quotient and isinstance(a, prim.FloorDiv):  # (a // m) // n
            return self._divided(prim.FloorDiv(a.a, self.analyzer.simplify(a.b * n)), self._quotient_or_rest)
        whole, rest = self._multiples(a, n)
        bound = self.bound(rest)
        if bound is not None and self.can_prove(_distributed(n - bound) > 0):
            return whole if quotient else rest
        return whole + rest // n if quotient else rest % n

    def _multiples(self, a: Expr, n: Expr) -> tuple[Expr, Expr]:
        """b and c with a = b n + c: the terms of a that are multiples of n, divided by it, and the others."""
        whole: Expr = tirx.const(0, "int64")
        rest: Expr = tirx.const(0, "int64")
        for term in _terms(a):
            factor = self._factor(term, n)
            whole, rest = (whole + factor, rest) if factor is not None else (whole, rest + term)
        return self.analyzer.simplify(whole), self.analyzer.simplify(rest)

    @staticmethod
    def _factor(term: Expr, n: Expr) -> Expr | None:
        """b with term = b n, if all factors of n are factors of the product `term`."""
        factors, constant = _factors(term)
        wanted, divisor = _factors(n)
        if constant % divisor:
            return None
        for factor in wanted:
            found = next(
                (i for i, f in enumerate(factors) if prim.expr_deep_equal(f, factor)),
                None,
            )
            if found is None:
                return None
            del factors[found]
        return functools.reduce(operator.mul, factors, tirx.const(constant // divisor, "int64"))

    def bound(self, a: Expr) -> Expr | None:
        """An upper bound of `a` in terms of sizes, or None; also None if `a` might be negative."""
        total: Expr = tirx.const(0, "int64")
        for term in _terms(a):
            factors, constant = _factors(term)
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


def _without_floats(expr: Expr) -> tuple[Expr, dict[tirx.Var, Expr]]:
    """expr with a variable in place of each integer and truth value that is made of floats, one for equal ones, and
    what they stand for."""
    found: list[tuple[Expr, tirx.Var]] = []

    def replace(node: Expr) -> Expr | None:
        if is_float(node) or not any(is_float(operand) for operand in children(node)):
            return None
        known = next((var for made, var in found if prim.expr_deep_equal(made, node)), None)
        if known is None:
            known = tirx.Var(f"of_floats_{len(found)}", str(node.ty))
            found.append((node, known))
        return known

    return rewrite(expr, replace), {var: made for made, var in found}


def _terms(expr: Expr) -> list[Expr]:
    return [*_terms(expr.a), *_terms(expr.b)] if isinstance(expr, prim.Add) else [expr]


def _distributed(expr: Expr) -> Expr:
    """expr as a sum of products without sums in them, where terms can cancel."""
    if isinstance(expr, prim.Add | prim.Sub):
        a, b = _distributed(expr.a), _distributed(expr.b)
        return a + b if isinstance(expr, prim.Add) else a - b
    if isinstance(expr, prim.Mul):
        a, b = _distributed(expr.a), _distributed(expr.b)
        for one, other in ((a, b), (b, a)):
            if isinstance(one, prim.Add):
                return _distributed(one.a * other) + _distributed(one.b * other)
            if isinstance(one, prim.Sub):
                return _distributed(one.a * other) - _distributed(one.b * other)
        return a * b
    return expr


def _factors(expr: Expr) -> tuple[list[Expr], int]:
    """The factors of a product: the symbolic ones, and the constant."""
    if isinstance(expr, prim.IntImm):
        return [], expr.value
    if isinstance(expr, prim.Mul):
        (a, m), (b, n) = _factors(expr.a), _factors(expr.b)
        return [*a, *b], m * n
    return [expr], 1
