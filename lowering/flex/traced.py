"""Values of a mod while it is traced: a mod is an ordinary Python function, called once with these in place of numbers.

What is computed with them becomes an expression (`lowering.attention.expr`), as plain data. Types are those of the
kernel: indices are int32, the score is float32, or float64 for float64 operands. Python's numbers take the type of what
they meet; / gives floating point, // and % round down, as in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..attention.expr.node import Expr, number
from ..errors import InputError

MOST_OPERATIONS = 4000
"""Of an expression, written out as a tree."""

MOST_NESTED = 200
"""How deep they are nested: compilers call themselves for each level."""

_WIDTHS = ("bool", "int32", "int64", "float32", "float64")


class Traced:
    """A number or truth value of a pair of query row and key."""

    __slots__ = ("depth", "expr", "size")
    expr: Expr
    size: int
    depth: int
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr, parts: Sequence[Traced] = ()) -> None:
        """parts are the values that the expression is made of."""
        size, depth = 1 + sum(x.size for x in parts), 1 + max((x.depth for x in parts), default=0)
        if size > MOST_OPERATIONS:
            raise InputError(
                f"the expression has more than {MOST_OPERATIONS} operations, written out as a tree: values that are "
                "used twice count twice. Compute what does not depend on the pair outside, and capture it."
            )
        if depth > MOST_NESTED:
            raise InputError(
                f"operations are nested more than {MOST_NESTED} deep. Add up in pairs, or compute what does not depend "
                "on the pair outside, and capture it."
            )
        self.expr = expr
        self.size: int = size
        self.depth: int = depth

    @property
    def dtype(self) -> str:
        """bool, int32, int64, float32 or float64."""
        return self.expr.dtype

    def __repr__(self) -> str:
        return f"<traced {self.dtype}>"

    # Arithmetic.

    def __add__(self, other: Any) -> Traced:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Traced:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Traced:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Traced:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Traced:
        return arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Traced:
        return divided(self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return divided(other, self)

    def __floordiv__(self, other: Any) -> Traced:
        return floor_divided(self, other)

    def __rfloordiv__(self, other: Any) -> Traced:
        return floor_divided(other, self)

    def __mod__(self, other: Any) -> Traced:
        return remainder(self, other)

    def __rmod__(self, other: Any) -> Traced:
        return remainder(other, self)

    def __pow__(self, other: Any) -> Traced:
        return power(self, other)

    def __rpow__(self, other: Any) -> Traced:
        return power(other, self)

    def __neg__(self) -> Traced:
        return arithmetic("sub", number_like(0, self), self)

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        if "float" in self.dtype:
            return applied("fabs", self)
        return arithmetic("max", self, -self)

    # Comparisons and truth values.

    def __lt__(self, other: Any) -> Traced:
        return compared("lt", self, other)

    def __le__(self, other: Any) -> Traced:
        return compared("le", self, other)

    def __gt__(self, other: Any) -> Traced:
        return compared("lt", other, self)

    def __ge__(self, other: Any) -> Traced:
        return compared("le", other, self)

    def __eq__(self, other: Any) -> Traced:  # type: ignore[override]
        return compared("eq", self, other)

    def __ne__(self, other: Any) -> Traced:  # type: ignore[override]
        return compared("ne", self, other)

    def __and__(self, other: Any) -> Traced:
        return bitwise("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Traced:
        return bitwise("or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Traced:
        return bitwise("xor", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Traced:
        if self.dtype == "bool":
            return joined("not", "bool", self)
        return -self - 1

    def __rshift__(self, other: Any) -> Traced:
        return shifted("shift_right", self, other)

    def __rrshift__(self, other: Any) -> Traced:
        return shifted("shift_right", other, self)

    def __lshift__(self, other: Any) -> Traced:
        return shifted("shift_left", self, other)

    def __rlshift__(self, other: Any) -> Traced:
        return shifted("shift_left", other, self)

    # What PyTorch's tensors and NumPy's arrays have, too, so that one text serves all.

    def astype(self, dtype: Any) -> Traced:
        """In another type, by its NumPy name or type."""
        return cast(self, dtype)

    # What a mod cannot do, as its values are not known yet.

    def __bool__(self) -> NoReturn:
        raise InputError(
            "a traced value has no truth value: `if`, `while`, `and`, `or`, `not`, `in`, `max` and chains such as "
            "a < b < c ask for one. Write where(condition, a, b), a & b, a | b, ~a, maximum(a, b), and "
            "(a < b) & (b < c)."
        )

    def __index__(self) -> NoReturn:
        raise InputError(
            "a traced value is no index of an ordinary array, and no number of steps. Name the array: "
            "captures={'bias': array}, with a keyword-only parameter of that name in the mod, def mod(..., *, bias)."
        )

    def __int__(self) -> NoReturn:
        raise InputError("a traced value is no Python number: its value is not known. Use cast(x, 'int32').")

    def __float__(self) -> NoReturn:
        raise InputError("a traced value is no Python number: its value is not known. Use cast(x, 'float32').")

    def __iter__(self) -> NoReturn:
        raise InputError("a traced value is one number, and cannot be iterated over.")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "a traced value is no array, and no index of one. Use the functions of lowering.flex, or NumPy's that they "
            "name; an array that is read is named, captures={'bias': array}, with a keyword-only parameter of that "
            "name in the mod, def mod(..., *, bias)."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions of numbers, and NumPy's numbers in front of an operator."""
        from .vocabulary import for_numpy

        return for_numpy(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        from .vocabulary import for_numpy

        return for_numpy(function, "__call__", args, options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        """PyTorch's functions of numbers, so that mods written for it trace as they are."""
        from .vocabulary import for_torch

        return for_torch(function, args, options or {})


# -- operations -------------------------------------------------------------------------------------------------------


def traced(value: Any, like: str | None = None) -> Traced:
    """A number as a traced value; a Python number takes the type `like`, unless that cannot hold it."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Traced(number(bool(value), "bool"))
    if isinstance(value, (int, np.integer)):
        if like is not None and "float" in like:
            return Traced(number(float(value), like))
        wide = like == "int64" or not -(2**31) <= value < 2**31
        if not -(2**63) <= value < 2**63:
            raise InputError(f"the number {value} does not fit in 64 bits.")
        return Traced(number(int(value), "int64" if wide else "int32"))
    if isinstance(value, (float, np.floating)):
        return Traced(number(float(value), like if like is not None and "float" in like else "float32"))
    from .captured import Captured

    if isinstance(value, Captured):
        value.refuse()
    if getattr(value, "ndim", 0) or type(value).__module__.split(".")[0] in ("torch", "numpy", "jax"):
        raise InputError(
            f"an array ({type(value).__name__}) from outside takes part in the mod. Name it: captures={{'bias': "
            "array}, with a keyword-only parameter of that name in the mod, def mod(..., *, bias)."
        )
    raise InputError(f"a mod computes with numbers, and {value!r} ({type(value).__name__}) is none.")


def number_like(value: float, like: Traced) -> Traced:
    return Traced(number(value, "int32" if like.dtype == "bool" else like.dtype))


def together(a: Any, b: Any) -> tuple[Traced, Traced]:
    """Both in the wider of their types."""
    kinds = [x.dtype if isinstance(x, Traced) else None for x in (a, b)]
    a, b = (traced(x, like) for x, like in zip((a, b), reversed(kinds)))
    wide = max(a.dtype, b.dtype, key=_WIDTHS.index)
    return cast(a, wide), cast(b, wide)


def joined(op: str, dtype: str, *args: Traced) -> Traced:
    return Traced(Expr(op, dtype, tuple(a.expr for a in args)), args)


def arithmetic(op: str, a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if a.dtype == "bool":
        a, b = cast(a, "int32"), cast(b, "int32")
    return joined(op, a.dtype, a, b)


def divided(a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if "float" not in a.dtype:
        a, b = cast(a, "float32"), cast(b, "float32")
    return joined("div", a.dtype, a, b)


def floor_divided(a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if "float" in a.dtype:
        return applied("floor", divided(a, b))
    return joined("floordiv", a.dtype, a, _divisor(b))


def remainder(a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if "float" in a.dtype:
        return a - applied("floor", divided(a, b)) * b
    return joined("floormod", a.dtype, a, _divisor(b))


def _divisor(b: Traced) -> Traced:
    """A divisor that is not known to be 0. What a quotient by 0 is when the kernel runs means nothing, and harms
    nothing."""
    if b.expr.op == "number" and not b.expr.number:
        raise InputError("a mod divides by 0.")
    return b


def power(a: Any, b: Any) -> Traced:
    if isinstance(b, int) and not isinstance(b, bool) and isinstance(a, Traced) and 1 <= b <= 8:
        result = a
        for _ in range(b - 1):
            result = result * a
        return result
    a, b = together(a, b)
    if "float" not in a.dtype:
        a, b = cast(a, "float32"), cast(b, "float32")
    return joined("tirx.pow", a.dtype, a, b)


def compared(op: str, a: Any, b: Any) -> Traced:
    return joined(op, "bool", *together(a, b))


def bitwise(op: str, a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if "float" in a.dtype:
        raise InputError(f"`{op}` joins truth values or integers, not {a.dtype}.")
    if a.dtype != "bool":
        return joined(f"bit_{op}", a.dtype, a, b)
    return joined("ne", "bool", a, b) if op == "xor" else joined(op, "bool", a, b)


def shifted(op: str, a: Any, b: Any) -> Traced:
    a, b = together(a, b)
    if "float" in a.dtype or "bool" in a.dtype:
        raise InputError(f"shifts are of integers, not of {a.dtype}.")
    bits = 63 if a.dtype == "int64" else 31
    return joined(op, a.dtype, a, arithmetic("max", arithmetic("min", b, bits), 0))


def select(condition: Any, yes: Any, no: Any) -> Traced:
    condition = traced(condition)
    if condition.dtype != "bool":
        condition = compared("ne", condition, 0)
    return joined("select", (pair := together(yes, no))[0].dtype, condition, *pair)


def applied(name: str, x: Any, dialect: str = "tirx") -> Traced:
    """A function of floating-point numbers, by TVM's name."""
    x = traced(x)
    if "float" not in x.dtype:
        x = cast(x, "float32")
    return joined(f"{dialect}.{name}", x.dtype, x)


def cast(x: Any, dtype: Any) -> Traced:
    """In another type, by its NumPy name or type: small integers as int32, half precision as float32."""
    x, name = traced(x), type_name(dtype)
    if x.dtype == name:
        return x
    if x.expr.op == "number" and (name != "bool" or x.dtype != "bool"):
        return Traced(number(x.expr.number, name)) if np.isfinite(x.expr.number) or "float" in name else x
    if name == "bool":
        return compared("ne", x, 0)
    if "float" in x.dtype and "int" in name:  # hardware converts what has no place there to anything
        low, high = _REACH[x.dtype, name]
        x = arithmetic("max", arithmetic("min", x, high), low)
    return joined("cast", name, x)


_REACH = {
    ("float32", "int32"): (-(2.0**31), 2.0**31 - 2**7),
    ("float64", "int32"): (-(2.0**31), 2.0**31 - 1),
    ("float32", "int64"): (-(2.0**63), 2.0**63 - 2**39),
    ("float64", "int64"): (-(2.0**63), 2.0**63 - 2**10),
}
"""The lowest and the highest number of a floating-point type that an integer type has."""


def type_name(dtype: Any) -> str:
    """The type of a kernel that computes with elements of this type: widened, never narrowed."""
    text = str(dtype).rpartition(".")[2]  # torch.float32
    name = text if text in ("bfloat16",) else np.dtype(text if "torch" in str(dtype) else dtype).name
    if name in ("float16", "bfloat16"):
        return "float32"
    if name in _WIDTHS:
        return name
    if name in ("int8", "int16", "uint8", "uint16"):
        return "int32"
    if name == "uint32":
        return "int64"
    raise InputError(f"mods do not compute with elements of type {name}. Use one of {', '.join(_WIDTHS)}.")
