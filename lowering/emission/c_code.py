"""The C code of a main function, while it is emitted (main_code.py) and for the object around it (static_source.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import tirx

from ..errors import ModelError
from ..tensorir.expressions import Expr
from .c_expressions import UnsupportedExpressionError, to_c


@dataclass(frozen=True)
class CTensor:
    """A tensor: C code of its address, its shape, its element type, and the block of the workspace that it is in."""

    address: str
    shape: tuple[Expr, ...]
    dtype: str
    memory: str = ""

    def count_bytes(self) -> Expr:
        count: Expr = tirx.const(tvm.DataType(self.dtype).itemsize, "int64")
        for size in self.shape:
            count = count * size
        return count


Value: TypeAlias = CTensor | Expr | tuple["Value", ...]
"""A tensor, a scalar, or a tuple."""


@dataclass
class MainCode:
    """The C code of a main function.

    Attributes:
        symbols: C names of its symbolic sizes.
        sizes: Names of the sizes that a caller gives, whose C names are `size0`, `size1`, ...
        inputs: The inputs, whose addresses are `input0`, `input1`, ...
        constants: Declarations of constant arrays.
        workspace: The bytes of each block of memory, by the C name of its address.
        scratch: Sums of bytes that a call of a kernel allocates.
        size_checks: Checks of sizes of the caller, which need no data.
        statements: The code of the call.
        outputs: The tensors that it returns.
        kernels: The kernels that it calls, in order.
    """

    symbols: dict[tirx.Var, str] = field(default_factory=dict)
    sizes: list[str] = field(default_factory=list)
    inputs: list[CTensor] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    workspace: dict[str, Expr] = field(default_factory=dict)
    scratch: list[Expr] = field(default_factory=list)
    size_checks: list[str] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    outputs: tuple[CTensor, ...] = ()
    kernels: list[str] = field(default_factory=list)

    def add_size(self, name: str) -> str:
        """Let the caller give a size, if not yet; return its C name."""
        if name not in self.sizes:
            self.sizes.append(name)
        return f"size{self.sizes.index(name)}"

    def to_c(self, expr: Expr) -> str:
        """Return C code of an expression of sizes."""
        return to_c(expr, self._name)

    def _name(self, symbol: tirx.Var) -> str:
        if symbol not in self.symbols:
            raise UnsupportedExpressionError(f"'{symbol.name}', which no input's shape gives,")
        return self.symbols[symbol]


def name_kernel(name: str) -> str:
    """Return the C name of a kernel's function."""
    return f"kernel_{name}"


def reject(what: str) -> ModelError:
    """Return the error of a model that cannot be a static object."""
    return ModelError(
        "static.unsupported",
        "a static object is a sequence of kernels in memory that the shapes of inputs determine, and this model needs "
        f"more: {what}. Compile it without --emit static, or make sizes static with --dim where they decide it.",
    )
