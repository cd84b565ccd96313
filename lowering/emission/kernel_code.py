"""C code around kernels: their declarations and, in libraries, what tells an observer of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tvm
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var

from ..tensorir.expressions import Expr
from .c_code import name_kernel
from .c_expressions import to_c
from .c_model import CModel
from .c_names import quote
from .kernel_signature import declare, list_shape_symbols

_ADDRESS_AND_BYTES = 2  # values of a tensor before its shape (call.h)


def declare_kernel(model: CModel, kernel: str, name: str) -> str:
    """Return the declaration of a kernel under a C name."""
    return f'{declare(model.kernels[kernel], name)[:-1]} __asm__("{model.symbols[kernel]}");'


def write_observed_kernels(model: CModel, counters: Mapping[str, str]) -> Iterator[str]:
    """Yield functions of kernels that tell the observer of their calls.

    Args:
        model: The model, which has the counters among its kernels.
        counters: The counter of kernels that have one, by name.
    """
    for kernel in model.kernels:
        if kernel in counters.values():
            continue
        counter = counters.get(kernel)
        if counter is not None:
            yield from _write_counter(model, kernel, counter)
        yield from _write_kernel(model, kernel, "NULL" if counter is None else f"count_{kernel}")


def _write_kernel(model: CModel, kernel: str, count: str) -> Iterator[str]:
    function, name = model.kernels[kernel], name_kernel(kernel)
    names = [f"argument{number}" for number in range(len(function.params) + len(list_shape_symbols(function)))]
    arguments = ", ".join(names)
    yield declare_kernel(model, kernel, f"code_{kernel}")
    yield f"static const lowering_kernel description_{kernel} = {{{quote(kernel)}, {count}}};"
    yield f"{_define(function, name, names)} {{"
    yield f"    if (lowering_context.observer == NULL) return code_{kernel}({arguments});"
    yield f"    const int64_t values[] = {{{', '.join(_list_values(function, names)) or '0'}}};"
    yield f"    tell_observer(&description_{kernel}, 1, values);"
    yield f"    const int32_t status = code_{kernel}({arguments});"
    yield f"    tell_observer(&description_{kernel}, 0, values);"
    yield "    return status;"
    yield "}"
    yield ""


def _define(function: tirx.PrimFunc, name: str, names: list[str]) -> str:
    """Return the head of a function with the parameters of a kernel."""
    declaration = declare(function, name)
    types = declaration[declaration.index("(") + 1 : declaration.rindex(")")].split(", ")
    parameters = ", ".join(map(" ".join, zip(types, names))) or "void"
    return f"static int32_t {name}({parameters})"


def _list_values(function: tirx.PrimFunc, names: list[str]) -> Iterator[str]:
    """Yield the values of a call that an observer gets."""
    symbols = {parameter: name for parameter, name in zip(function.params, names) if not is_buffer_var(parameter)}
    for (number, axis), name in zip(list_shape_symbols(function), names[len(function.params) :]):
        symbols[function.params[number].shape[axis]] = name
    for parameter, name in zip(function.params, names):
        if not is_buffer_var(parameter):
            yield f"(int64_t){name}"
            continue
        size: Expr = tirx.const(tvm.DataType(parameter.dtype).itemsize, "int64")
        for extent in parameter.shape:
            size = size * extent.astype("int64")
        yield f"(int64_t)(intptr_t){name}"
        yield from (to_c(value, symbols.__getitem__) for value in (size, *parameter.shape))


def _write_counter(model: CModel, kernel: str, counter: str) -> Iterator[str]:
    """Yield the function that counts the pairs of an attention, by the values of a call."""
    function = model.kernels[counter]
    starts, position = [], 0
    for parameter in model.kernels[kernel].params:
        starts.append(position)
        position += _ADDRESS_AND_BYTES + len(parameter.shape) if is_buffer_var(parameter) else 1
    arguments = [
        f"(void*)(intptr_t)values[{start}]" if is_buffer_var(parameter) else f"values[{start}]"
        for parameter, start in zip(function.params, starts)
    ]
    sizes = [f"values[{starts[number] + _ADDRESS_AND_BYTES + axis}]" for number, axis in list_shape_symbols(function)]
    yield declare_kernel(model, counter, f"code_{counter}")
    yield f"static int32_t count_{kernel}(const int64_t* values, int64_t* counts) {{"
    yield f"    return code_{counter}({', '.join([*arguments, 'counts', *sizes])});"
    yield "}"
    yield ""
