"""Two ways to write a kernel for an operator that moves or selects data, with symbolic sizes as parameters.

`compute` defines one element of the result: TVM fuses such a kernel with its neighbors. `emit_loops` is for operators
that are not a map over the result (scatter, sort, running sum). Its statements are written with the IRBuilder, and
nothing is fused into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_empty, storage_dtype, storage_shape
from ...tensorir.regions import full_region

ElementReader = Callable[..., Any]


def compute(
    node: Node,
    name: str,
    body: Callable[..., Any],
    tensors: Sequence[Value],
    shape: Shape,
    sizes: Sequence[Size] = (),
    dtype: str | None = None,
) -> Value:
    """Emit the tensor of `shape` whose element at index i is body(i, *reads, *sizes).

    i is a tuple of int64 expressions. reads[k](*index) is an element of tensors[k]. sizes are the given integers as the
    kernel sees them: body must use them and no other symbols. dtype is the ONNX type of the result, by default that of
    the first tensor. complex128 elements, which are stored as pairs, are read and written whole.
    """
    dtype = dtype or tensors[0].dtype
    node.check_volume(shape, dtype)
    if is_empty(shape):  # nothing to compute, and TVM rejects a division by such a size
        (result,) = emit_loops(node, name, lambda *_: T.evaluate(0), tensors, [(shape, dtype)])
        return result

    def kernel(arrays: Sequence[te.Tensor], extents: Sequence[Any], scalars: Sequence[Any]) -> te.Tensor:
        def element(*index: Any) -> Any:
            index, component = (index[:-1], index[-1:]) if dtype == "complex128" else (index, ())
            reads = [_make_reader(a, component if v.dtype == "complex128" else ()) for a, v in zip(arrays, tensors)]
            return body(index, *reads, *scalars)

        return te.compute(list(extents), element, name=name)

    extents = node.shape_expr(storage_shape(dtype, shape))
    return node.emit_te(
        kernel, [node.tensor(v) for v in tensors], extents, list(sizes), primfunc_name_hint=name, dtype=dtype
    )


def _make_reader(array: te.Tensor, component: tuple[Any, ...]) -> ElementReader:
    """Return a function that reads an element of the array, or its given complex component."""
    return lambda *index: array(*index, *component)


def emit_loops(
    node: Node,
    name: str,
    body: Callable[..., None],
    tensors: Sequence[Value],
    outputs: Sequence[tuple[Shape, str]],
    sizes: Sequence[Size] = (),
    scratch: Sequence[tuple[Shape, str]] = (),
    attributes: Mapping[str, str] | None = None,
) -> tuple[Value, ...]:
    """Emit the tensors (shape, ONNX dtype) that statements compute.

    body(*inputs, *outputs, *scratch) is called with buffers inside an open PrimFunc of the IRBuilder. It may use the
    symbols of the shapes and of `sizes`. The function gets the attributes, by which schedule rules recognize it.
    """

    def block(inputs: list[Any], results: list[Any]) -> None:
        with T.sblock(name):
            T.reads([full_region(b) for b in inputs])
            T.writes([full_region(b) for b in results])
            temporary = [T.sblock_alloc_buffer(_to_extents(storage_shape(d, s)), storage_dtype(d)) for s, d in scratch]
            for buffer in temporary:
                _store_first(buffer)
            body(*inputs, *results, *temporary)

    used_sizes = [*sizes, *(d for s, _ in scratch for d in s)]
    return _emit_primfunc(node, name, block, tensors, outputs, used_sizes, attributes or {})


def _store_first(buffer: Any) -> None:
    """Write to a buffer before all loops.

    TVM allocates a buffer in the innermost loop that contains all its uses (CompactBufferAllocation). It treats the
    contents as private to an iteration, even where an iteration reads the values of an earlier one.
    """
    first = tirx.const(0, buffer.dtype)
    with T.If(tirx.all(*(extent > 0 for extent in buffer.shape))), T.Then():
        T.buffer_store(buffer, first, [0] * len(buffer.shape))


def emit_blocks(
    node: Node, name: str, body: Callable[..., None], tensors: Sequence[Value], output: tuple[Shape, str]
) -> Value:
    """Emit one tensor (shape, ONNX dtype) from several schedulable blocks.

    body(*inputs, output) opens a block for each region of the tensor.
    """

    def inside(inputs: list[Any], results: list[Any]) -> None:
        body(*inputs, *results)

    (result,) = _emit_primfunc(node, name, inside, tensors, [output], [], {})
    return result


def serial(extent: Size) -> Any:
    """Open a serial loop from 0 to extent - 1; its variable is int64, as all indices are."""
    return T.serial(tirx.IntImm("int64", extent) if isinstance(extent, int) else extent)


def let(value: Any) -> Any:
    """Return the value, computed once and stored in memory.

    TVM's simplification passes inline a variable bound to a value everywhere. This multiplies a chain of floats that
    are used twice. Of bound variables, the passes analyze only integers.
    """
    buffer = T.alloc_buffer((1,), str(value.ty.dtype))
    T.buffer_store(buffer, value, [0])
    return buffer[0]


@contextmanager
def grid(shape: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Open loops over all indices of a shape of any rank."""
    if not len(shape):
        yield ()
        return
    with T.grid(*shape) as loop:
        yield (loop,) if len(shape) == 1 else tuple(loop)


def _emit_primfunc(
    node: Node,
    name: str,
    body: Callable[[list[Any], list[Any]], None],
    tensors: Sequence[Value],
    outputs: Sequence[tuple[Shape, str]],
    sizes: Sequence[Size],
    attributes: Mapping[str, str],
) -> tuple[Value, ...]:
    input_types = [(storage_shape(v.dtype, v.shape), storage_dtype(v.dtype)) for v in tensors]
    output_types = [(storage_shape(d, s), storage_dtype(d)) for s, d in outputs]
    shapes = [s for s, _ in (*input_types, *output_types)]
    scalars = _collect_parameters([*sizes, *(d for s in shapes for d in s)], shapes)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"op_pattern": 8, "tirx.noalias": True, **attributes})
        inputs = [T.arg(f"x{k}", T.Buffer(_to_extents(s), d)) for k, (s, d) in enumerate(input_types)]
        for scalar in scalars:
            T.arg(scalar.name, scalar)
        body(inputs, [T.arg(f"y{k}", T.Buffer(_to_extents(s), d)) for k, (s, d) in enumerate(output_types)])
    return node.call_tir(builder.get(), [*(node.tensor(v) for v in tensors), *scalars], outputs, name)


def _collect_parameters(used: Sequence[Size], bound: Sequence[Shape]) -> list[Any]:
    """Return the symbols in `used` that are not a dimension of a tensor in `bound`.

    These symbols must be passed as parameters.
    """
    free: list[Any] = []
    bound_variables = [d for shape in bound for d in shape if isinstance(d, tirx.Var)]
    for size in used:
        for variable in [] if isinstance(size, int) else tirx.analysis.undefined_vars(size):
            if not any(variable.same_as(v) for v in (*bound_variables, *free)):
                free.append(variable)
    return free


def _to_extents(shape: Shape) -> list[Any]:
    return [tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape]
