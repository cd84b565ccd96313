"""Formulas of masks and scores as people write them."""

from __future__ import annotations

from ..attention.expr.node import Expr, terms

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "floormod": "%", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "and": "and", "or": "or", "bit_and": "&", "bit_or": "|", "bit_xor": "^", "shift_left": "<<",
    "shift_right": ">>",
}  # fmt: skip


def formula_text(expr: Expr) -> str:
    """b, h, i and j are batch, query head, query row and key; s is a score."""
    args = [formula_text(arg) for arg in expr.args]
    match expr.op:
        case "number":
            return str(expr.number)
        case "index" | "scalar":
            return expr.name
        case "load":
            return f"{expr.name}[{', '.join(args)}]"
        case "sum":
            return _sum(expr)
        case "cast":
            return f"{expr.dtype}({args[0]})"
        case "select":
            return f"{_bracketed(expr.args[1])} if {args[0]} else {_bracketed(expr.args[2])}"
        case "not":
            return f"not {_bracketed(expr.args[0])}"
    if expr.op in _INFIX:
        return f" {_INFIX[expr.op]} ".join(map(_bracketed, expr.args))
    return f"{expr.op.rpartition('.')[2]}({', '.join(args)})"


def _sum(expr: Expr) -> str:
    parts = []
    for factor, term in sorted(terms(expr), key=lambda part: part[0] < 0):
        shown = _bracketed(term) if abs(factor) == 1 else f"{abs(factor)} * {_bracketed(term)}"
        parts.append(f"{'-' if factor < 0 else '+'} {shown}")
    text = " ".join(parts)
    return text[2:] if text.startswith("+") else f"-{text[2:]}"


def _bracketed(expr: Expr) -> str:
    text = formula_text(expr)
    whole = expr.op in ("number", "index", "scalar", "load", "cast") or (expr.op not in _INFIX and " " not in text)
    return text if whole else f"({text})"
