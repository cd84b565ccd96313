"""C code of `main`, whose memory is planned: tensors are in the caller's workspace where sizes of inputs say theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from ..manifest import TensorSpec
from ..tensorir.expressions import Expr, is_int
from .c_code import CTensor, MainCode, Program, Value, reject
from .c_expressions import UnsupportedExpressionError
from .c_names import quote
from .function_code import FunctionEmitter
from .local_code import emit_functions


def emit_main(
    module: tvm.IRModule,
    inputs: Sequence[TensorSpec],
    weights: Sequence[CTensor],
    assertions: Mapping[str, str],
) -> tuple[Program, MainCode]:
    """Return the C code of the functions that `main` calls, and its own.

    Args:
        module: The module after the pipeline's phase "memory".
        inputs: The manifest's inputs, the first parameters of `main`.
        weights: The fields of its tuple of weights.
        assertions: Error texts of shape assertions, by the name of their variable.

    Raises:
        ModelError: It calls other functions than kernels and those of loops.
    """
    main = module["main"]
    emitter = _MainEmitter(Program(module, assertions), MainCode())
    for parameter, spec in zip(main.params, inputs):
        emitter.add_input(parameter, spec)
    for parameter in main.params[len(inputs) :]:
        emitter.values[parameter] = tuple(weights)
    try:
        outputs = emitter.emit(main.body)
        assert isinstance(outputs, tuple)
        emitter.set_outputs(outputs)
        emit_functions(emitter.program)
    except UnsupportedExpressionError as error:
        raise reject(f"{error} in a size") from error
    return emitter.program, emitter.code


class _MainEmitter(FunctionEmitter):
    code: MainCode

    def __init__(self, program: Program, code: MainCode) -> None:
        super().__init__(program, code)
        self._branches = 0  # that enclose what is emitted
        self._from_inputs: dict[tirx.Var, tuple[int, int]] = {}
        self._from_data: set[tirx.Var] = set()

    def add_input(self, parameter: relax.Var, spec: TensorSpec) -> None:
        """Let a parameter be an input, whose shape names sizes."""
        tensor = CTensor(f"input{len(self.code.inputs)}", tuple(parameter.ty.shape.values), str(parameter.ty.dtype))
        self.code.inputs.append(tensor)
        self.values[parameter] = tensor
        for size, dim in zip(tensor.shape, spec.dims):
            if isinstance(size, ir.Var) and size not in self.code.symbols:
                self.code.symbols[size] = self.code.add_size(str(dim))

    def set_outputs(self, outputs: Sequence[Value]) -> None:
        """Let the function return these outputs."""
        tensors = [output for output in outputs if isinstance(output, CTensor)]
        if len(tensors) < len(outputs):
            raise reject("an output other than a tensor")
        self.code.outputs = tuple(tensors)
        allocated = (k for k, output in enumerate(tensors) if any(map(self.depends_on_data, output.shape)))
        self.code.allocated = tuple(allocated)
        self.program.allocates |= bool(self.code.allocated)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def add_symbol(self, symbol: tirx.Var, size: str) -> None:
        super().add_symbol(symbol, size)
        self._from_data.add(symbol)

    def name_size(self, symbol: tirx.Var, size: Expr) -> None:
        """Sizes in inputs are given by the caller as well, because memory may depend on them."""
        if size in self._from_inputs:
            name, value = str(symbol.name), self.code.symbols[size]
            self.code.symbols[symbol] = self.code.add_size(name)
            self.code.elements.setdefault(name, self._from_inputs[size])
            self.add_check(f"check_value(error, {quote(name)}, {self.code.symbols[symbol]}, {value})")
            return
        super().name_size(symbol, size)
        if self.depends_on_data(size):
            self._from_data.add(symbol)

    def read_element(self, tensor: CTensor, index: int) -> Expr:
        size = super().read_element(tensor, index)
        for number, source in enumerate(self.code.inputs):
            if source.address == tensor.address:
                self._from_inputs[size] = number, index
        return size

    def depends_on_data(self, size: Expr) -> bool:
        free = [] if isinstance(size, tirx.IntImm) else tirx.analysis.undefined_vars(size)
        return any(symbol not in self.code.symbols or symbol in self._from_data for symbol in free)

    def add_size_check(self, check: str, sizes: Sequence[Expr]) -> None:
        """Add a check of sizes: before memory is laid out, unless it needs data or depends on a branch."""
        if self._branches or any(map(self.depends_on_data, sizes)):
            self.add_check(check)
        else:
            self.code.size_checks.append(f"if ({check} != 0) return -1;")

    # -- memory and branches ------------------------------------------------------------------------------------------

    def allocate(self, size: Expr) -> CTensor:
        if self.depends_on_data(size):
            return super().allocate(size)
        self.code.to_c(size)
        address = f"memory{len(self.code.workspace)}"
        self.code.workspace[address] = size
        return CTensor(address, (size,), "uint8", address)

    def add_scratch(self, total: Expr) -> None:
        if self.depends_on_data(total):
            super().add_scratch(total)
        elif not is_int(total, 0) and not any(tvm_ffi.structural_equal(total, s) for s in self.code.scratch):
            self.code.to_c(total)
            self.code.scratch.append(total)

    def emit_branches(self, branches: relax.If) -> Value:
        self._branches += 1
        merged = super().emit_branches(branches)
        self._branches -= 1
        return merged
