"""Traced values: a mod is an ordinary Python function, called once with these in place of numbers.

Operations on them build an expression (`lowering.attention.expr`), as plain data. Types are those of the kernel:
indices are int32, the score is float32, or float64 for float64 operands. Python's numbers take the type of the other
operand; / gives floating point, // and % round down, as in Python.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..attention.expr.node import Expr, make_number
from ..errors import InputError

MAX_OPERATIONS = 4000
"""Limit of the operations of an expression, written out as a tree."""

MAX_NESTING = 200
"""Limit of the nesting of operations: compilers recurse for each level."""

_WIDTHS = ("bool", "int32", "int64", "float32", "float64")

_NOT_A_NUMBER = "a traced value is not a Python number: its value is unknown while the mod is traced."
_CAPTURE_VALUES = "Compute values that do not depend on the row and key outside the mod, and capture them."
_CAPTURE_ARRAY = "Capture the array: captures={'bias': array}, with a keyword-only parameter, def mod(..., *, bias)."


LIBRARY_CALLS: dict[str, Callable[..., Any]] = {}
"""Calls a function of NumPy or PyTorch for traced values; vocabulary.py has the functions, and registers both."""


class NotANumber(abc.ABC):
    """A value that a mod may read but not compute with."""

    @abc.abstractmethod
    def reject_whole_array(self, *_: Any) -> Any:
        """Raise InputError: the value is not a number."""


# -- operations -------------------------------------------------------------------------------------------------------


def trace_value(value: Any, like: str | None = None) -> Traced:
    """Convert a number to a traced value; a Python number takes the type `like`, unless that cannot represent it."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Traced(make_number(bool(value), "bool"))
    if isinstance(value, (int, np.integer)):
        if like is not None and "float" in like:
            return Traced(make_number(float(value), like))
        wide = like == "int64" or not -(2**31) <= value < 2**31
        if not -(2**63) <= value < 2**63:
            raise InputError("flex.number_out_of_range", f"the number {value} does not fit in 64 bits.")
        return Traced(make_number(int(value), "int64" if wide else "int32"))
    if isinstance(value, (float, np.floating)):
        return Traced(make_number(float(value), like if like is not None and "float" in like else "float32"))
    if isinstance(value, NotANumber):
        value.reject_whole_array()
    if getattr(value, "ndim", 0) or type(value).__module__.split(".")[0] in ("torch", "numpy", "jax"):
        raise InputError(
            "flex.array_not_captured",
            f"an array ({type(value).__name__}) from outside is used in the mod. {_CAPTURE_ARRAY}",
        )
    raise InputError(
        "flex.value_type_unsupported",
        f"a mod computes with numbers, but {value!r} ({type(value).__name__}) is not a number.",
    )


def make_number_like(value: float, like: Traced) -> Traced:
    return Traced(make_number(value, "int32" if like.dtype == "bool" else like.dtype))


def promote(a: Any, b: Any) -> tuple[Traced, Traced]:
    """Convert both to the wider of their types."""
    kinds = [x.dtype if isinstance(x, Traced) else None for x in (a, b)]
    a, b = (trace_value(x, like) for x, like in zip((a, b), reversed(kinds)))
    common = max(a.dtype, b.dtype, key=_WIDTHS.index)
    return cast(a, common), cast(b, common)


def make_operation(op: str, dtype: str, *args: Traced) -> Traced:
    return Traced(Expr(op, dtype, tuple(a.expr for a in args)), args)


def apply_arithmetic(op: str, a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if a.dtype == "bool":
        a, b = cast(a, "int32"), cast(b, "int32")
    return make_operation(op, a.dtype, a, b)


def divide(a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if "float" not in a.dtype:
        a, b = cast(a, "float32"), cast(b, "float32")
    return make_operation("div", a.dtype, a, b)


def floor_divide(a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if "float" in a.dtype:
        return call_function("floor", divide(a, b))
    return make_operation("floordiv", a.dtype, a, _check_divisor(b))


def compute_remainder(a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if "float" in a.dtype:
        return a - call_function("floor", divide(a, b)) * b
    return make_operation("floormod", a.dtype, a, _check_divisor(b))


def _check_divisor(b: Traced) -> Traced:
    """Return a divisor that is not a literal 0. A quotient by 0 at run time is meaningless but harmless."""
    if b.expr.op == "number" and not b.expr.number:
        raise InputError("flex.division_by_zero", "a mod divides by 0.")
    return b


def raise_to_power(a: Any, b: Any) -> Traced:
    if isinstance(b, int) and not isinstance(b, bool) and isinstance(a, Traced) and 1 <= b <= 8:
        result = a
        for _ in range(b - 1):
            result = result * a
        return result
    a, b = promote(a, b)
    if "float" not in a.dtype:
        a, b = cast(a, "float32"), cast(b, "float32")
    return make_operation("tirx.pow", a.dtype, a, b)


def compare(op: str, a: Any, b: Any) -> Traced:
    return make_operation(op, "bool", *promote(a, b))


def apply_bitwise(op: str, a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if "float" in a.dtype:
        raise InputError("flex.bitwise_dtype_unsupported", f"`{op}` needs truth values or integers, not {a.dtype}.")
    if a.dtype != "bool":
        return make_operation(f"bit_{op}", a.dtype, a, b)
    return make_operation("ne", "bool", a, b) if op == "xor" else make_operation(op, "bool", a, b)


def shift_bits(op: str, a: Any, b: Any) -> Traced:
    a, b = promote(a, b)
    if "float" in a.dtype or "bool" in a.dtype:
        raise InputError("flex.bitwise_dtype_unsupported", f"shifts need integers, not {a.dtype}.")
    bits = 63 if a.dtype == "int64" else 31
    return make_operation(op, a.dtype, a, apply_arithmetic("max", apply_arithmetic("min", b, bits), 0))


def select(condition: Any, if_true: Any, if_false: Any) -> Traced:
    condition = trace_value(condition)
    if condition.dtype != "bool":
        condition = compare("ne", condition, 0)
    return make_operation("select", (pair := promote(if_true, if_false))[0].dtype, condition, *pair)


def call_function(name: str, x: Any, dialect: str = "tirx") -> Traced:
    """Apply a function of floating-point numbers, by TVM's name."""
    x = trace_value(x)
    if "float" not in x.dtype:
        x = cast(x, "float32")
    return make_operation(f"{dialect}.{name}", x.dtype, x)


def cast(x: Any, dtype: Any) -> Traced:
    """Convert to another type, by its NumPy name or type: small integers become int32, half precision float32."""
    x, name = trace_value(x), promote_dtype(dtype)
    if x.dtype == name:
        return x
    if x.expr.op == "number" and (name != "bool" or x.dtype != "bool"):
        return Traced(make_number(x.expr.number, name)) if np.isfinite(x.expr.number) or "float" in name else x
    if name == "bool":
        return compare("ne", x, 0)
    if "float" in x.dtype and "int" in name:  # hardware converts numbers out of range to anything
        low, high = _INTEGER_LIMITS[x.dtype, name]
        x = apply_arithmetic("max", apply_arithmetic("min", x, high), low)
    return make_operation("cast", name, x)


_INTEGER_LIMITS = {
    ("float32", "int32"): (-(2.0**31), 2.0**31 - 2**7),
    ("float64", "int32"): (-(2.0**31), 2.0**31 - 1),
    ("float32", "int64"): (-(2.0**63), 2.0**63 - 2**39),
    ("float64", "int64"): (-(2.0**63), 2.0**63 - 2**10),
}
"""The lowest and the highest number of a floating-point type that an integer type can represent."""


def promote_dtype(dtype: Any) -> str:
    """Return the type in which a kernel computes with elements of this type: widened, never narrowed."""
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
    raise InputError(
        "flex.element_dtype_unsupported",
        f"mods do not compute with elements of type {name}. Use one of {', '.join(_WIDTHS)}.",
    )


def _make_operators(
    apply: Callable[..., Traced], *op: str
) -> tuple[Callable[[Traced, Any], Traced], Callable[[Traced, Any], Traced]]:
    """Return the method of an operator, and the reflected one, for a traced value on the right."""

    def apply_left(self: Traced, other: Any) -> Traced:
        return apply(*op, self, other)

    def apply_right(self: Traced, other: Any) -> Traced:
        return apply(*op, other, self)

    return apply_left, apply_right


# -- traced values ----------------------------------------------------------------------------------------------------


class Traced:
    """A number or bool of a pair of query row and key."""

    __slots__ = ("depth", "expr", "size")
    expr: Expr
    size: int
    depth: int
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr, operands: Sequence[Traced] = ()) -> None:
        """operands are the values from which the expression is computed."""
        size, depth = 1 + sum(x.size for x in operands), 1 + max((x.depth for x in operands), default=0)
        if size > MAX_OPERATIONS:
            raise InputError(
                "flex.expression_too_large",
                f"the expression has more than {MAX_OPERATIONS} operations; reused ones count again. {_CAPTURE_VALUES}",
            )
        if depth > MAX_NESTING:
            raise InputError(
                "flex.expression_too_deep",
                f"operations are nested more than {MAX_NESTING} deep. Add up in pairs. {_CAPTURE_VALUES}",
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

    __add__, __radd__ = _make_operators(apply_arithmetic, "add")
    __sub__, __rsub__ = _make_operators(apply_arithmetic, "sub")
    __mul__, __rmul__ = _make_operators(apply_arithmetic, "mul")
    __truediv__, __rtruediv__ = _make_operators(divide)
    __floordiv__, __rfloordiv__ = _make_operators(floor_divide)
    __mod__, __rmod__ = _make_operators(compute_remainder)
    __pow__, __rpow__ = _make_operators(raise_to_power)

    def __neg__(self) -> Traced:
        return apply_arithmetic("sub", make_number_like(0, self), self)

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        if "float" in self.dtype:
            return call_function("fabs", self)
        return apply_arithmetic("max", self, -self)

    # Comparisons and logic.

    __lt__, __gt__ = _make_operators(compare, "lt")
    __le__, __ge__ = _make_operators(compare, "le")
    __eq__ = _make_operators(compare, "eq")[0]  # type: ignore[assignment]
    __ne__ = _make_operators(compare, "ne")[0]  # type: ignore[assignment]
    __and__, __rand__ = _make_operators(apply_bitwise, "and")
    __or__, __ror__ = _make_operators(apply_bitwise, "or")
    __xor__, __rxor__ = _make_operators(apply_bitwise, "xor")
    __rshift__, __rrshift__ = _make_operators(shift_bits, "shift_right")
    __lshift__, __rlshift__ = _make_operators(shift_bits, "shift_left")

    def __invert__(self) -> Traced:
        if self.dtype == "bool":
            return make_operation("not", "bool", self)
        return -self - 1

    # A method of PyTorch's tensors and NumPy's arrays, so that one source text works for all.

    def astype(self, dtype: Any) -> Traced:
        """Convert to another type, by its NumPy name or type."""
        return cast(self, dtype)

    # Operations that need a value, which does not exist while a mod is traced.

    def __bool__(self) -> NoReturn:
        raise InputError(
            "flex.traced_truth_value",
            "a traced value has no truth value, but `if`, `while`, `and`, `or`, `not`, `in`, `max` and chains such "
            "as a < b < c need one. Write where(condition, a, b), a & b, a | b, ~a, maximum(a, b), (a < b) & (b < c).",
        )

    def __index__(self) -> NoReturn:
        raise InputError(
            "flex.traced_as_index",
            f"a traced value cannot be an index of an ordinary array, nor a number of steps. {_CAPTURE_ARRAY}",
        )

    def __int__(self) -> NoReturn:
        raise InputError("flex.traced_as_number", f"{_NOT_A_NUMBER} Use cast(x, 'int32').")

    def __float__(self) -> NoReturn:
        raise InputError("flex.traced_as_number", f"{_NOT_A_NUMBER} Use cast(x, 'float32').")

    def __iter__(self) -> NoReturn:
        raise InputError("flex.traced_iteration", "a traced value is one number, and cannot be iterated over.")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "flex.traced_as_array",
            "a traced value is not an array, nor an index of one. Use the functions of lowering.flex, or NumPy's "
            f"functions of the same names. {_CAPTURE_ARRAY}",
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Call NumPy's functions of numbers, and operators with NumPy's numbers on the left."""
        return LIBRARY_CALLS["numpy"](ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return LIBRARY_CALLS["numpy"](function, "__call__", args, options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        """Call PyTorch's functions of numbers, so that mods written for it trace unchanged."""
        return LIBRARY_CALLS["torch"](function, args, options or {})
