"""C code of a Relax function's bindings: checks, addresses and calls of kernels, in order.

Every tensor is an address and a shape of expressions. Records of tensors exist only where a function calls another one,
as the steps of loops are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import ir, relax, tirx
from tvm.sym import Analyzer
from tvm.tirx.buffer import is_buffer_var

from ..importing.checks import CONDITION, INDICES, REQUESTS, SIZES
from ..passes.memory.plan_memory import ALIGNMENT, FROM_ITS_OFFSET, VIEW
from ..passes.memory.size_classes import to_float64
from ..tensorir.expressions import Expr, is_int, substitute
from . import runtime_checks
from .branches import Branches
from .c_code import CTensor, FunctionCode, Program, Value, name_kernel, reject
from .c_names import quote
from .kernel_signature import list_scratch_sizes, list_shape_symbols

_UNEQUAL = "sizes inside the model do not fit: a tensor has another shape"


class FunctionEmitter:
    """Emits a function, whose memory is allocated when it runs."""

    code: FunctionCode

    def __init__(self, program: Program, code: FunctionCode) -> None:
        self.program, self.code = program, code
        self.values: dict[relax.Var, Value] = {}
        self.analyzer = Analyzer()

    # -- values -------------------------------------------------------------------------------------------------------

    def read(self, expr: Any) -> Value:
        """Return the value of an argument."""
        if isinstance(expr, relax.Var):
            return self.values.get(expr, expr)  # or a symbolic size
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.read, expr.fields))
        if isinstance(expr, relax.ShapeExpr):
            return tuple(expr.values)
        if isinstance(expr, relax.TupleGetItem):
            fields = self.read(expr.tuple_value)
            assert isinstance(fields, tuple)
            return fields[expr.index]
        if isinstance(expr, ir.GenericConst):
            return self._read_constant(expr.value.numpy(), str(expr.ty.dtype))
        return expr

    def read_tensor(self, expr: Any) -> CTensor:
        value = self.read(expr)
        if not isinstance(value, CTensor):
            raise reject(f"a tensor that {type(expr).__name__} computes")
        return value

    def _read_sizes(self, expr: Any) -> tuple[Any, ...]:
        value = self.read(expr)
        if not isinstance(value, tuple):
            raise reject(f"sizes that {type(expr).__name__} computes")
        return value

    def _read_constant(self, array: np.ndarray, dtype: str) -> CTensor:
        name = self.program.add_constant(np.ascontiguousarray(array).tobytes(), ALIGNMENT)
        return CTensor(f"(void*){name}", tuple(tirx.const(size, "int64") for size in array.shape), dtype)

    def add_symbol(self, symbol: tirx.Var, size: str) -> None:
        """Let a symbol stand for a size, C code, that only the running program knows."""
        self.code.symbols[symbol] = size

    def name_new_size(self, code: str) -> tirx.Var:
        """Return a new symbol for a size, C code."""
        symbol = tirx.Var("size", "int64")
        self.add_symbol(symbol, code)
        return symbol

    def depends_on_data(self, size: Expr) -> bool:
        """Return whether only the running program knows a size."""
        return not isinstance(size, tirx.IntImm)

    # -- bindings -----------------------------------------------------------------------------------------------------

    def emit(self, body: relax.SeqExpr) -> Value:
        """Emit the bindings of a body; return its value."""
        for block in body.blocks:
            for binding in block.bindings:
                value = self._emit_expression(binding.value)
                if isinstance(binding, relax.MatchCast):
                    value = self._match(value, binding.ty, self.program.assertions.get(binding.var.name, _UNEQUAL))
                self.values[binding.var] = value
        return self._emit_expression(body.body)

    def _emit_expression(self, expr: Any) -> Value:
        if isinstance(expr, relax.Call):
            return self._emit_call(expr, expr.ty)
        if isinstance(expr, relax.If):
            return self.emit_branches(expr)
        return self.read(expr)

    def emit_branches(self, branches: relax.If) -> Value:
        """Emit both branches, each of which sets the address of every result."""
        merged = Branches(self)
        with merged.open(self.read_tensor(branches.cond).address):
            value = self.emit(branches.true_branch)
            merged.begin_other()
            return merged.merge(value, self.emit(branches.false_branch))

    def _match(self, source: Value, kind: Any, text: str) -> Value:
        """Check that a value has the shape of a type, which may also name its sizes. `text` is of its error."""
        if isinstance(kind, relax.TupleType) and isinstance(source, tuple):
            return tuple(self._match(*pair, text) for pair in zip(source, kind.fields, strict=True))
        if isinstance(kind, relax.ShapeType) and isinstance(source, tuple):
            return self._match_sizes(source, tuple(kind.values), text)
        if not isinstance(source, CTensor) or kind.shape is None:
            return source
        shape = self._match_sizes(source.shape, tuple(kind.shape.values), text)
        return replace(source, shape=shape)

    def _match_sizes(self, sizes: Sequence[Any], expected: Sequence[Any], text: str) -> tuple[Any, ...]:
        if len(sizes) != len(expected):
            raise reject("a tensor whose rank depends on data")
        shape = []
        for axis, (size, expected_size) in enumerate(zip(sizes, expected)):
            if isinstance(expected_size, ir.Var) and expected_size not in self.code.symbols:
                self.name_size(expected_size, size)
            elif not self.analyzer.can_prove_equal(size, expected_size):
                check = runtime_checks.make_dim_check(self.code.to_c, text, axis, size, expected_size)
                self.add_size_check(check, (size, expected_size))
            shape.append(size if self.depends_on_data(expected_size) else expected_size)
        return tuple(shape)

    def name_size(self, symbol: tirx.Var, size: Expr) -> None:
        """Let a symbol of a match_cast stand for a size."""
        self.code.symbols[symbol] = self.code.to_c(size)

    def read_elements(self, tensor: CTensor) -> tuple[Expr, ...]:
        """Read sizes that are the elements of a tensor of int64, of one axis."""
        (count,) = tensor.shape
        if not isinstance(count, tirx.IntImm):
            raise reject("a shape whose rank depends on data")
        return tuple(self.read_element(tensor, index) for index in range(int(count.value)))

    def read_element(self, tensor: CTensor, index: int) -> Expr:
        """Read a size that is an element of a tensor of int64."""
        name = self.code.choose_name("value")
        self.code.statements.append(f"const int64_t {name} = ((const int64_t*){tensor.address})[{index}];")
        return self.name_new_size(name)

    def _emit_call(self, call: relax.Call, kind: Any) -> Value:
        if isinstance(call.op, ir.GlobalVar):
            if isinstance(self.program.module[call.op], tirx.PrimFunc):
                return self._call_kernel(call.op, call.args)
            return self._call_function(str(call.op.name_hint), call.args, kind)
        if isinstance(call.op, relax.ExternFunc):
            return self._call_external(str(call.op.global_symbol), call.args)
        name = call.op.name
        if name == "relax.call_pure_packed":
            return self._call_external(str(call.args[0].global_symbol), call.args[1:])
        if name == "relax.memory.alloc_storage":
            (size,) = call.args[0].values
            return self.allocate(size)
        if name == "relax.memory.alloc_tensor":
            storage = self.read_tensor(call.args[0])
            shape, dtype = tuple(call.args[2].values), str(call.args[3].value)
            return CTensor(storage.address, shape, dtype, storage.memory, storage.block)
        if name == "relax.reshape":
            source = self.read_tensor(call.args[0])
            return CTensor(source.address, self._read_sizes(call.args[1]), source.dtype, source.memory, source.block)
        if name == "relax.tensor_to_shape":
            return self.read_elements(self.read_tensor(call.args[0]))
        raise reject(f"the operation {name}")

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: Expr) -> CTensor:
        """Return memory of so many bytes, which the function owns."""
        block = self.code.choose_name("block")
        call = f"allocate_block(&frame, {self.code.to_c(size)}, {self.code.to_c(to_float64(size))})"
        self.code.statements += [f"Block* const {block} = {call};", f"if ({block} == NULL) return fail_memory(error);"]
        self.code.owned += 1
        self.program.allocates = True
        return CTensor(f"{block}->data", (size,), "uint8", block=block)

    def add_scratch(self, total: Expr) -> None:
        """Provide so many bytes of scratch memory for each task of a kernel."""
        if not is_int(total, 0):
            call = f"reserve_scratch(&frame, {self.code.to_c(total)}, {self.code.to_c(to_float64(total))})"
            self.code.statements.append(f"if ({call} != 0) return fail_memory(error);")
            self.program.allocates = True

    # -- calls of the runtime -----------------------------------------------------------------------------------------

    def _call_external(self, name: str, args: Sequence[Any]) -> Value:
        to_c = self.code.to_c
        if name == VIEW:
            block, shape, dtype, offset = args
            tensor, address = self.read_tensor(block), self.code.choose_name("tensor")
            self.code.statements.append(f"void* const {address} = (char*){tensor.address} + {to_c(offset)};")
            return CTensor(address, tuple(shape.values), str(dtype.value), tensor.memory, tensor.block)
        if name == FROM_ITS_OFFSET:
            return self.read_tensor(args[0])
        if name == INDICES:
            tensor, bounds = self.read_tensor(args[0]), self._read_sizes(args[1])
            self.add_check(runtime_checks.make_indices_check(to_c, tensor, bounds, *args[2:]))
            return tensor
        if name == SIZES:
            sizes, other_dims = self._read_sizes(args[0]), self._read_sizes(args[1])
            self.add_check(runtime_checks.make_sizes_check(to_c, sizes, other_dims, *args[2:]))
            return sizes
        if name == CONDITION:
            condition, *numbers = self._read_sizes(args[1])
            check = runtime_checks.make_condition_check(to_c, condition, numbers, *args[2:])
            self.add_size_check(check, (condition, *numbers))
            return self.read(args[0])
        if name in REQUESTS:
            return self._check_requests(name, args)
        raise reject(f"the function {name}")

    def _check_requests(self, name: str, args: Sequence[Any]) -> Value:
        first, sizes, node, *rest = args
        values = [self.read(table) for table in (first, *rest)]
        tables = [value if isinstance(value, CTensor) else None for value in values]
        self.add_scratch(runtime_checks.count_span_bytes(tables))
        self.program.checks.setdefault(name)
        check = runtime_checks.make_requests_check(self.code.to_c, name, self._read_sizes(sizes), node, tables)
        self.add_check(check)
        return values[0]

    def add_check(self, check: str) -> None:
        self.code.statements.append(f"if ({check} != 0) return -1;")

    def add_size_check(self, check: str, sizes: Sequence[Expr]) -> None:
        """Add a check of these sizes."""
        self.add_check(check)

    # -- calls of functions -------------------------------------------------------------------------------------------

    def _call_kernel(self, variable: ir.GlobalVar, args: Sequence[Any]) -> Value:
        kernel, name = self.program.module[variable], str(variable.name_hint)
        arguments, sizes = [], {}
        tensors: dict[int, CTensor] = {}
        for number, (parameter, argument) in enumerate(zip(kernel.params, args, strict=True)):
            if is_buffer_var(parameter):
                tensors[number] = self.read_tensor(argument)
                arguments.append(tensors[number].address)
            else:
                sizes[parameter] = argument
                arguments.append(self.code.to_c(sizes[parameter]))
        for number, axis in list_shape_symbols(kernel):
            size = tensors[number].shape[axis]
            sizes[kernel.params[number].shape[axis]] = size
            arguments.append(self.code.to_c(size))
        self.add_scratch(self._sum_scratch(kernel, sizes))
        self.program.kernels.append(name)
        call = f"{name_kernel(name)}({', '.join(arguments)})"
        self.code.statements.append(f"if ({call} != 0) return fail_kernel(error, {quote(name)});")
        return ()

    def _sum_scratch(self, kernel: tirx.PrimFunc, sizes: Mapping[tirx.Var, Expr]) -> Expr:
        total: Expr = tirx.const(0, "int64")
        for shape, itemsize in list_scratch_sizes(kernel):
            size: Expr = tirx.const(itemsize, "int64")
            for extent in shape:
                size = size * substitute(extent.astype("int64"), sizes)
            total = total + tirx.floordiv(size + 2 * ALIGNMENT - 1, ALIGNMENT) * ALIGNMENT
        return self.analyzer.simplify(total)

    def _call_function(self, name: str, args: Sequence[Any], kind: Any) -> Value:
        """Call another function of the model, as loops do. `kind` is the type of its result."""
        function = self.program.find_function(name)
        results = self.code.choose_name("result")
        arguments = ", ".join(["&frame", *map(self._pass, map(self.read, args)), results, "error"])
        self.code.statements.append(f"Tensor {results}[{len(function.results)}];")
        self.add_check(f"{function.name}({arguments})")
        self.code.owned += len(function.results)
        self.program.allocates = True
        kinds = kind.fields if isinstance(kind, relax.TupleType) else (kind,)
        tensors = []
        for number, ((dtype, rank), field_kind) in enumerate(zip(function.results, kinds, strict=True)):
            result = f"{results}[{number}]"
            self.code.statements.append(f"own(&frame, {result}.block);")
            shape = self._read_shape(field_kind) or tuple(
                self.name_new_size(f"{result}.shape[{axis}]") for axis in range(rank)
            )
            tensors.append(CTensor(f"{result}.data", shape, dtype, block=f"{result}.block"))
        return tuple(tensors) if isinstance(kind, relax.TupleType) else tensors[0]

    def _read_shape(self, kind: Any) -> tuple[Any, ...] | None:
        """Return the shape of a type, if it consists of sizes that have C names."""
        if kind.shape is None:
            return None
        symbols = relax.analysis.tir_vars_in_type(kind)
        return tuple(kind.shape.values) if all(symbol in self.code.symbols for symbol in symbols) else None

    def _pass(self, value: Value) -> str:
        """Return C code of an argument."""
        if isinstance(value, CTensor):
            self.program.rank = max(self.program.rank, len(value.shape))
            shape = ", ".join(map(self.code.to_c, value.shape)) or "0"
            return f"&(Tensor){{{value.address}, {value.block}, {{{shape}}}}}"
        if isinstance(value, tuple) and not any(isinstance(size, CTensor | tuple) for size in value):
            return runtime_checks.list_numbers(value, self.code.to_c)
        raise reject("a function with an argument other than tensors and sizes")
