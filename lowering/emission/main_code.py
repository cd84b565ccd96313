"""C code of `main`: checks, addresses and calls of kernels, in the order of the planned bindings.

Every tensor is an address and a shape of expressions; memory is planned, so that no tensor needs a record at run time.
Sizes are those of the inputs. Relax that needs more, such as loops and memory whose size depends on data, is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.sym import Analyzer
from tvm.tirx.buffer import is_buffer_var

from ..importing.checks import CONDITION, INDICES, SIZES
from ..manifest import TensorSpec
from ..passes.memory.plan_memory import ALIGNMENT, FROM_ITS_OFFSET, VIEW
from ..tensorir.expressions import Expr, substitute
from .c_code import CTensor, MainCode, Value, name_kernel, reject
from .c_expressions import UnsupportedExpressionError
from .c_names import quote
from .kernel_signature import list_scratch_sizes, list_shape_symbols


def emit_main(
    module: tvm.IRModule,
    inputs: Sequence[TensorSpec],
    weights: Sequence[CTensor],
    assertions: Mapping[str, str],
) -> MainCode:
    """Return the C code of `main`.

    Args:
        module: The module after the pipeline's phase "memory".
        inputs: The manifest's inputs, the first parameters of `main`.
        weights: The fields of its tuple of weights.
        assertions: Error texts of shape assertions, by the name of their variable.

    Raises:
        ModelError: It has loops, or memory whose size depends on data.
    """
    main = module["main"]
    emitter = _Emitter(module, assertions)
    for parameter, spec in zip(main.params, inputs):
        emitter.add_input(parameter, spec)
    for parameter in main.params[len(inputs) :]:
        emitter.values[parameter] = tuple(weights)
    try:
        outputs = emitter.emit(main.body)
        assert isinstance(outputs, tuple)
        emitter.code.outputs = tuple(map(emitter.read_output, outputs))
        emitter.check_sizes([output.count_bytes() for output in emitter.code.outputs])
    except UnsupportedExpressionError as error:
        raise reject(f"{error} in a size") from error
    return emitter.code


class _Emitter:
    def __init__(self, module: tvm.IRModule, assertions: Mapping[str, str]) -> None:
        self.module, self.assertions = module, assertions
        self.code = MainCode()
        self.values: dict[relax.Var, Value] = {}
        self._analyzer = Analyzer()
        self._constants: dict[bytes, str] = {}
        self._branches = 0  # that enclose what is emitted
        self._from_inputs: set[tirx.Var] = set()
        self._from_data: set[tirx.Var] = set()

    def add_input(self, parameter: relax.Var, spec: TensorSpec) -> None:
        """Let a parameter be an input, whose shape names sizes."""
        tensor = CTensor(f"input{len(self.code.inputs)}", tuple(parameter.ty.shape.values), str(parameter.ty.dtype))
        self.code.inputs.append(tensor)
        self.values[parameter] = tensor
        for size, dim in zip(tensor.shape, spec.dims):
            if isinstance(size, ir.Var) and size not in self.code.symbols:
                self.code.symbols[size] = self.code.add_size(str(dim))

    # -- values -------------------------------------------------------------------------------------------------------

    def read(self, expr: Any) -> Value:
        """Return the value of an argument."""
        if isinstance(expr, relax.Var):
            if expr not in self.values:
                return expr  # a symbolic size
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.read, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            fields = self.read(expr.tuple_value)
            assert isinstance(fields, tuple)
            return fields[expr.index]
        if isinstance(expr, ir.GenericConst):
            return self._emit_constant(expr.value.numpy(), str(expr.ty.dtype))
        return expr

    def _read_tensor(self, expr: Any) -> CTensor:
        value = self.read(expr)
        if not isinstance(value, CTensor):
            raise reject(f"a tensor that {type(expr).__name__} computes")
        return value

    def read_output(self, value: Value) -> CTensor:
        if not isinstance(value, CTensor):
            raise reject("an output other than a tensor")
        return value

    def _emit_constant(self, array: np.ndarray, dtype: str) -> CTensor:
        shape = tuple(tirx.const(size, "int64") for size in array.shape)
        content = np.ascontiguousarray(array).tobytes() or b"\0"
        if content in self._constants:
            return CTensor(self._constants[content], shape, dtype)
        name = f"constant{len(self.code.constants)}"
        lines = [",".join(map(str, content[k : k + 32])) for k in range(0, len(content), 32)]
        declaration = f"static const unsigned char {name}[] __attribute__((aligned({ALIGNMENT}))) = {{\n"
        self.code.constants.append(declaration + ",\n".join(lines) + "};")
        self._constants[content] = f"(void*){name}"
        return CTensor(self._constants[content], shape, dtype)

    # -- bindings -----------------------------------------------------------------------------------------------------

    def emit(self, body: relax.SeqExpr) -> Value:
        """Emit the bindings of a body; return its value."""
        for block in body.blocks:
            for binding in block.bindings:
                self.values[binding.var] = self._emit_binding(binding)
        return self.read(body.body)

    def _emit_binding(self, binding: Any) -> Value:
        if isinstance(binding, relax.MatchCast):
            return self._match(binding)
        if isinstance(binding.value, relax.Call):
            return self._emit_call(binding.value)
        if isinstance(binding.value, relax.If):
            return self._emit_branches(binding.value)
        return self.read(binding.value)

    def _emit_branches(self, branches: relax.If) -> Value:
        """Emit both branches, each of which sets the address of every result."""
        statements = self.code.statements
        condition = self._read_tensor(branches.cond).address
        position = len(statements)
        statements += ["", f"if (*(const uint8_t*){condition} != 0) {{"]
        self._branches += 1
        value = self.emit(branches.true_branch)
        middle = len(statements)
        statements += ["", "} else {"]
        addresses: dict[str, tuple[str, str]] = {}
        merged = self._merge(value, self.emit(branches.false_branch), f"branch{position}_", addresses)
        statements += [*(f"{name} = {other};" for name, (_, other) in addresses.items()), "}"]
        self._branches -= 1
        statements[middle] = " ".join(f"{name} = {address};" for name, (address, _) in addresses.items())
        statements[position] = " ".join(f"void* {name};" for name in addresses)
        return merged

    def _merge(self, value: Value, other: Value, prefix: str, addresses: dict[str, tuple[str, str]]) -> Value:
        """Return the value of branches with these values; add C names and both addresses of its tensors."""
        if isinstance(value, tuple) and isinstance(other, tuple):
            return tuple(self._merge(*pair, prefix, addresses) for pair in zip(value, other, strict=True))
        if not isinstance(value, CTensor) or not isinstance(other, CTensor) or not self._have_same_shape(value, other):
            raise reject("branches (If) whose results have different shapes")
        name = f"{prefix}{len(addresses)}"
        addresses[name] = value.address, other.address
        return CTensor(name, value.shape, value.dtype)

    def _have_same_shape(self, tensor: CTensor, other: CTensor) -> bool:
        pairs = list(zip(tensor.shape, other.shape))
        return len(tensor.shape) == len(other.shape) and all(self._analyzer.can_prove_equal(*pair) for pair in pairs)

    def _match(self, binding: Any) -> Value:
        """Check that a tensor has the shape of a match_cast, which may also name its sizes."""
        source, kind = self.read(binding.value), binding.ty
        if isinstance(source, tuple) and isinstance(kind, relax.ShapeType):
            return self._name_sizes(source, kind)
        if not isinstance(source, CTensor) or kind.shape is None:
            return source
        expected = tuple(kind.shape.values)
        if len(expected) != len(source.shape):
            raise reject("a tensor whose rank depends on data")
        text = self.assertions.get(binding.var.name, "sizes inside the model do not fit: a tensor has another shape")
        shape = []
        for axis, (size, expected_size) in enumerate(zip(source.shape, expected)):
            if isinstance(expected_size, ir.Var) and expected_size not in self.code.symbols:
                self._name_size(expected_size, size)
            shape.append(size)
            if not self._analyzer.can_prove_equal(size, expected_size):
                arguments = f"{quote(text)}, {axis}, {self.code.to_c(size)}, {self.code.to_c(expected_size)}"
                self._add_size_check(f"check_dim(error, {arguments})", (size, expected_size))
        return CTensor(source.address, tuple(shape), source.dtype, source.memory)

    def _name_size(self, symbol: tirx.Var, size: Expr) -> None:
        """Let a symbol stand for a size."""
        self.code.symbols[symbol] = self.code.to_c(size)
        if self._depends_on_data(size):
            self._from_data.add(symbol)

    def _depends_on_data(self, size: Expr) -> bool:
        free = [] if isinstance(size, tirx.IntImm) else tirx.analysis.undefined_vars(size)
        return any(symbol not in self.code.symbols or symbol in self._from_data for symbol in free)

    def _read_sizes(self, tensor: CTensor) -> Value:
        """Read sizes that are the elements of a tensor of int64, of one axis."""
        (count,) = tensor.shape
        if not isinstance(count, tirx.IntImm):
            raise reject("a shape whose rank depends on data")
        is_input = tensor.address in {source.address for source in self.code.inputs}
        sizes = []
        for index in range(int(count.value)):
            size = tirx.Var("size", "int64")
            self.code.symbols[size] = f"value{len(self.code.statements)}"
            value = f"((const int64_t*){tensor.address})[{index}]"
            self.code.statements.append(f"const int64_t {self.code.symbols[size]} = {value};")
            (self._from_inputs if is_input else self._from_data).add(size)
            sizes.append(size)
        return tuple(sizes)

    def _name_sizes(self, sizes: Sequence[Expr], kind: relax.ShapeType) -> Value:
        """Let the symbols of a shape stand for sizes that have been read.

        Those in inputs are given by the caller as well, because memory may depend on them.
        """
        for size, symbol in zip(sizes, kind.values, strict=True):
            if not isinstance(symbol, ir.Var) or symbol in self.code.symbols:
                raise reject("sizes from data that must equal other sizes")
            value = self.code.symbols[size]
            if size in self._from_inputs:
                name = str(symbol.name)
                self.code.symbols[symbol] = self.code.add_size(name)
                self._add_check(f"check_value(error, {quote(name)}, {self.code.symbols[symbol]}, {value})")
            else:
                self.code.symbols[symbol] = value
                self._from_data.add(symbol)
        return tuple(kind.values)

    def _emit_call(self, call: relax.Call) -> Value:
        if isinstance(call.op, ir.GlobalVar):
            return self._call_kernel(call.op, call.args)
        if isinstance(call.op, relax.ExternFunc):
            return self._call_external(str(call.op.global_symbol), call.args)
        name = call.op.name
        if name == "relax.call_pure_packed":
            return self._call_external(str(call.args[0].global_symbol), call.args[1:])
        if name == "relax.memory.alloc_storage":
            (size,) = call.args[0].values
            return self._allocate(size)
        if name == "relax.memory.alloc_tensor":
            storage = self._read_tensor(call.args[0])
            return CTensor(storage.address, tuple(call.args[2].values), str(call.args[3].value), storage.memory)
        if name == "relax.reshape":
            source = self._read_tensor(call.args[0])
            return CTensor(source.address, tuple(call.args[1].values), source.dtype, source.memory)
        if name == "relax.tensor_to_shape":
            return self._read_sizes(self._read_tensor(call.args[0]))
        raise reject(f"the operation {name}")

    def _allocate(self, size: Expr) -> CTensor:
        self.check_sizes([size])
        address = f"block{len(self.code.workspace)}"
        self.code.workspace[address] = size
        return CTensor(address, (size,), "uint8", address)

    def check_sizes(self, sizes: Sequence[Expr]) -> None:
        """Reject sizes of memory that shapes of inputs do not determine."""
        for size in sizes:
            if self._depends_on_data(size):
                raise reject("memory whose size depends on data")
            self.code.to_c(size)

    # -- calls of the runtime -----------------------------------------------------------------------------------------

    def _call_external(self, name: str, args: Sequence[Any]) -> Value:
        if name == VIEW:
            block, shape, dtype, offset = args
            tensor = self._read_tensor(block)
            position = self.code.to_c(offset)
            address = f"tensor{len(self.code.statements)}"
            self.code.statements.append(f"void* const {address} = (char*){tensor.address} + {position};")
            return CTensor(address, tuple(shape.values), str(dtype.value), tensor.memory)
        if name == FROM_ITS_OFFSET:
            return self._read_tensor(args[0])
        if name == INDICES:
            return self._check_indices(*args)
        if name == CONDITION:
            return self._check_condition(*args)
        raise reject("sizes that operators compute" if name == SIZES else f"the function {name}")

    def _add_check(self, check: str) -> None:
        self.code.statements.append(f"if ({check} != 0) return -1;")

    def _add_size_check(self, check: str, sizes: Sequence[Expr]) -> None:
        """Add a check of sizes: before memory is laid out, unless it needs data or depends on a branch."""
        if self._branches or any(map(self._depends_on_data, sizes)):
            self._add_check(check)
        else:
            self.code.size_checks.append(f"if ({check} != 0) return -1;")

    def _check_indices(self, indices: Any, bounds: Any, from_the_back: Any, name: Any, bounded: Any) -> Value:
        tensor = self._read_tensor(indices)
        dtype = tvm.DataType(tensor.dtype)
        names = str(bounded.value).split("\n")
        shape, limits = (", ".join(map(self.code.to_c, sizes)) for sizes in (tensor.shape, bounds.values))
        is_signed, back = int(tensor.dtype.startswith("int")), int(from_the_back.value)
        self._add_check(
            f"check_indices(error, &(Indices){{{tensor.address}, {dtype.bits}, {is_signed}, {len(tensor.shape)}, "
            f"(const int64_t[]){{{shape or 0}}}, (const int64_t[]){{{limits}}}, {len(bounds.values)}, {back}, "
            f"{quote(str(name.value))}, (const char* const[]){{{', '.join(map(quote, names))}}}}})"
        )
        return tensor

    def _check_condition(self, tensor: Any, numbers: Any, code: Any, text: Any) -> Value:
        condition, *values = map(self.code.to_c, numbers.values)
        listed = f"(const int64_t[]){{{', '.join(values) or 0}}}, {len(values)}"
        literals = f"{quote(str(code.value))}, {quote(str(text.value))}"
        self._add_size_check(f"check_condition(error, {condition} != 0, {literals}, {listed})", numbers.values)
        return self.read(tensor)

    # -- calls of kernels ---------------------------------------------------------------------------------------------

    def _call_kernel(self, variable: ir.GlobalVar, args: Sequence[Any]) -> Value:
        kernel, name = self.module[variable], str(variable.name_hint)
        if not isinstance(kernel, tirx.PrimFunc):
            raise reject("a loop, or another function with a body of its own")
        arguments, sizes = [], {}
        tensors: dict[int, CTensor] = {}
        for number, (parameter, argument) in enumerate(zip(kernel.params, args, strict=True)):
            if is_buffer_var(parameter):
                tensors[number] = self._read_tensor(argument)
                arguments.append(tensors[number].address)
            else:
                sizes[parameter] = argument
                arguments.append(self.code.to_c(sizes[parameter]))
        for number, axis in list_shape_symbols(kernel):
            size = tensors[number].shape[axis]
            sizes[kernel.params[number].shape[axis]] = size
            arguments.append(self.code.to_c(size))
        self._add_scratch(kernel, sizes)
        self.code.kernels.append(name)
        call = f"{name_kernel(name)}({', '.join(arguments)})"
        self.code.statements.append(f"if ({call} != 0) return fail_kernel(error, {quote(name)});")
        return ()

    def _add_scratch(self, kernel: tirx.PrimFunc, sizes: Mapping[tirx.Var, Expr]) -> None:
        total: Expr = tirx.const(0, "int64")
        for shape, itemsize in list_scratch_sizes(kernel):
            size: Expr = tirx.const(itemsize, "int64")
            for extent in shape:
                size = size * substitute(extent.astype("int64"), sizes)
            total = total + tirx.floordiv(size + 2 * ALIGNMENT - 1, ALIGNMENT) * ALIGNMENT
        total = self._analyzer.simplify(total)
        self.check_sizes([total])
        if not any(tvm_ffi.structural_equal(total, other) for other in self.code.scratch):
            self.code.scratch.append(total)
