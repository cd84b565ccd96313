"""The C code of a model, while it is emitted (main_code.py) and for the object around it (static_source.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from ..errors import ModelError
from ..tensorir.expressions import Expr
from .c_expressions import UnsupportedExpressionError, to_c
from .c_names import choose_names

NO_BLOCK = "NULL"


@dataclass(frozen=True)
class CTensor:
    """A tensor in C code.

    Attributes:
        address: C code of its address.
        shape: Its shape.
        dtype: Its element type.
        memory: The name of the block of the workspace that it is in, if it is in one.
        block: C code of the block that a function owns, for memory that is allocated when the program runs.
    """

    address: str
    shape: tuple[Expr, ...]
    dtype: str
    memory: str = ""
    block: str = NO_BLOCK

    def count_bytes(self) -> Expr:
        count: Expr = tirx.const(tvm.DataType(self.dtype).itemsize, "int64")
        for size in self.shape:
            count = count * size
        return count


Value: TypeAlias = CTensor | Expr | tuple["Value", ...]
"""A tensor, a scalar, or a tuple."""


@dataclass(frozen=True)
class LocalFunction:
    """A C function other than that of `main`: its name, and the element type and rank of each result."""

    name: str
    results: tuple[tuple[str, int], ...]


@dataclass
class Program:
    """The state that a model's functions share.

    Attributes:
        module: The module after the pipeline's phase "memory".
        assertions: Error texts of shape assertions, by the name of their variable.
        constants: Declarations of constant arrays.
        functions: The functions other than `main` that are called, by their names in the module.
        declarations: Their declarations.
        definitions: Their definitions.
        kernels: The kernels that are called, in order.
        checks: The checks of requests (`importing.checks.REQUESTS`) that are called.
        rank: The largest rank of arguments and results of functions.
        allocates: Whether a call allocates memory: for functions, and where sizes depend on data.
        pending: The names of the functions that are not emitted yet.
    """

    module: tvm.IRModule
    assertions: Mapping[str, str]
    constants: list[str] = field(default_factory=list)
    functions: dict[str, LocalFunction] = field(default_factory=dict)
    declarations: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    checks: dict[str, None] = field(default_factory=dict)
    rank: int = 1
    allocates: bool = False
    pending: list[str] = field(default_factory=list)
    _addresses: dict[bytes, str] = field(default_factory=dict)

    def find_function(self, name: str) -> LocalFunction:
        """Return a function of the module, which is emitted later.

        Raises:
            ModelError: Its results are not tensors whose ranks are constants.
        """
        if name not in self.functions:
            kind = self.module[name].ret_ty
            kinds = kind.fields if isinstance(kind, relax.TupleType) else (kind,)
            if not all(isinstance(result, relax.TensorType) and result.ndim >= 0 for result in kinds):
                raise reject(f"the function {name}, with results other than tensors")
            results = tuple((str(result.dtype), int(result.ndim)) for result in kinds)
            (c_name,) = choose_names([f"function_{name}"], [other.name for other in self.functions.values()])
            self.functions[name] = LocalFunction(c_name, results)
            self.rank = max(self.rank, *(rank for _, rank in results), 1)
            self.pending.append(name)
        return self.functions[name]

    def add_constant(self, content: bytes, alignment: int) -> str:
        """Return the C name of a constant array with this content."""
        content = content or b"\0"
        if content not in self._addresses:
            name = self._addresses[content] = f"constant{len(self.constants)}"
            lines = [",".join(map(str, content[k : k + 32])) for k in range(0, len(content), 32)]
            declaration = f"static const unsigned char {name}[] __attribute__((aligned({alignment}))) = {{\n"
            self.constants.append(declaration + ",\n".join(lines) + "};")
        return self._addresses[content]


@dataclass
class FunctionCode:
    """The C code of a function.

    Attributes:
        symbols: C names of its symbolic sizes.
        statements: Its statements.
        owned: How many blocks of memory it may own.
    """

    symbols: dict[tirx.Var, str] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    owned: int = 0
    _names: int = 0

    def choose_name(self, prefix: str) -> str:
        """Return a new C name of a variable."""
        self._names += 1
        return f"{prefix}{self._names}"

    def to_c(self, expr: Expr) -> str:
        """Return C code of an expression of sizes."""
        return to_c(expr, self._read_name)

    def _read_name(self, symbol: tirx.Var) -> str:
        if symbol not in self.symbols:
            raise UnsupportedExpressionError(f"'{symbol.name}', which no input's shape gives,")
        return self.symbols[symbol]


@dataclass
class MainCode(FunctionCode):
    """The C code of a main function.

    Attributes:
        sizes: Names of the sizes that a caller gives, whose C names are `size0`, `size1`, ...
        elements: Of those in the data of an input, the number of the input and the index in its data, by name.
        inputs: The inputs, whose addresses are `input0`, `input1`, ...
        workspace: The bytes of each block of memory, by the C name of its address.
        scratch: Sums of bytes that a call of a kernel allocates.
        size_checks: Checks of sizes of the caller, which need no data.
        outputs: The tensors that it returns.
        allocated: The numbers of the outputs whose size depends on data, for which the call allocates memory.
    """

    sizes: list[str] = field(default_factory=list)
    elements: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[CTensor] = field(default_factory=list)
    workspace: dict[str, Expr] = field(default_factory=dict)
    scratch: list[Expr] = field(default_factory=list)
    size_checks: list[str] = field(default_factory=list)
    outputs: tuple[CTensor, ...] = ()
    allocated: tuple[int, ...] = ()

    def add_size(self, name: str) -> str:
        """Let the caller give a size, if not yet; return its C name."""
        if name not in self.sizes:
            self.sizes.append(name)
        return f"size{self.sizes.index(name)}"


def name_kernel(name: str) -> str:
    """Return the C name of a kernel's function."""
    return f"kernel_{name}"


def reject(what: str) -> ModelError:
    """Return the error of a model that cannot be a static object."""
    return ModelError(
        "static.unsupported",
        f"C code of a model calls kernels on tensors, and this model needs more: {what}. "
        "Compile it without --emit static.",
    )
