"""Formulas of masks and scores in the usual notation."""

from __future__ import annotations

from ..attention.expr.node import Expr, split_terms

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "floormod": "%", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "and": "and", "or": "or", "bit_and": "&", "bit_or": "|", "bit_xor": "^", "shift_left": "<<",
    "shift_right": ">>",
}  # fmt: skip


def format_formula(expr: Expr) -> str:
    """Return the text of a formula: b, h, i, j are batch, query head, query row and key; s is a score."""
    args = [format_formula(arg) for arg in expr.args]
    match expr.op:
        case "number":
            return str(expr.number)
        case "index" | "scalar":
            return expr.name
        case "load":
            return f"{expr.name}[{', '.join(args)}]"
        case "sum":
            return _format_sum(expr)
        case "cast":
            return f"{expr.dtype}({args[0]})"
        case "select":
            return f"{_bracket(expr.args[1])} if {args[0]} else {_bracket(expr.args[2])}"
        case "not":
            return f"not {_bracket(expr.args[0])}"
    if expr.op in _INFIX:
        return f" {_INFIX[expr.op]} ".join(map(_bracket, expr.args))
    return f"{expr.op.rpartition('.')[2]}({', '.join(args)})"


def _format_sum(expr: Expr) -> str:
    text_terms = []
    for factor, term in sorted(split_terms(expr), key=lambda pair: pair[0] < 0):
        shown = _bracket(term) if abs(factor) == 1 else f"{abs(factor)} * {_bracket(term)}"
        text_terms.append(f"{'-' if factor < 0 else '+'} {shown}")
    text = " ".join(text_terms)
    return text[2:] if text.startswith("+") else f"-{text[2:]}"


def _bracket(expr: Expr) -> str:
    text = format_formula(expr)
    is_atomic = expr.op in ("number", "index", "scalar", "load", "cast") or (expr.op not in _INFIX and " " not in text)
    return text if is_atomic else f"({text})"
