"""C code of functions that `main` calls: the steps of loops."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax

from .c_code import CTensor, FunctionCode, Program, Value, reject
from .function_code import FunctionEmitter


def emit_functions(program: Program) -> None:
    """Emit the functions that are called, and those that they call."""
    while program.pending:
        _emit_function(program, program.pending.pop())


def _emit_function(program: Program, name: str) -> None:
    function, local = program.module[name], program.functions[name]
    code = FunctionCode()
    emitter = FunctionEmitter(program, code)
    parameters = [_add_parameter(emitter, number, parameter) for number, parameter in enumerate(function.params)]
    value = emitter.emit(function.body)
    for number, result in enumerate(value if isinstance(value, tuple) else (value,)):
        code.statements.append(f"results[{number}] = retain({_describe(code, result)});")
    signature = (
        f"static int {local.name}(Frame* caller, {', '.join(parameters)}, Tensor* results, lowering_error* error)"
    )
    program.declarations.append(f"{signature};")
    lines = [
        f"{signature} {{",
        f"    Block* owned[{max(code.owned, 1)}];",
        "    Frame frame = {caller->heap, owned, 0};",
        *(f"    {statement}" for statement in code.statements),
        "    (void)error;",
        "    release_frame(&frame);",
        "    return 0;",
        "}",
        "",
    ]
    program.definitions += lines


def _add_parameter(emitter: FunctionEmitter, number: int, parameter: relax.Var) -> str:
    """Let a parameter have a value; return its declaration."""
    kind: Any = parameter.ty
    if isinstance(kind, relax.ShapeType):
        for axis, size in enumerate(kind.values or ()):
            _add_size(emitter, size, f"parameter{number}[{axis}]")
        emitter.values[parameter] = tuple(kind.values or ())
        return f"const int64_t* parameter{number}"
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        raise reject("a function with a parameter other than a tensor")
    for axis, size in enumerate(kind.shape.values):
        _add_size(emitter, size, f"parameter{number}->shape[{axis}]")
    emitter.values[parameter] = CTensor(
        f"parameter{number}->data", tuple(kind.shape.values), str(kind.dtype), block=f"parameter{number}->block"
    )
    return f"const Tensor* parameter{number}"


def _add_size(emitter: FunctionEmitter, size: Any, code: str) -> None:
    if isinstance(size, ir.Var) and size not in emitter.code.symbols:
        emitter.add_symbol(size, code)


def _describe(code: FunctionCode, result: Value) -> str:
    if not isinstance(result, CTensor):
        raise reject("a function with a result other than a tensor")
    shape = ", ".join(map(code.to_c, result.shape)) or "0"
    return f"(Tensor){{{result.address}, {result.block}, {{{shape}}}}}"
