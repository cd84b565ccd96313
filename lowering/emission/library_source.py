"""The C code of a library: its description of the model, and its functions, around the code of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvm import DataType, ir, tirx

from ..manifest import TensorSpec
from ..tensorir.expressions import Expr
from ..version import VERSION
from .c_code import CTensor
from .c_model import CModel
from .c_names import quote
from .kernel_code import write_observed_kernels
from .model_source import bound_size, declare_sizes, write_model


def write_source(model: CModel, counters: Mapping[str, str]) -> str:
    """Return model.c of a library (runtime/native/library.h). `counters` are as for `write_observed_kernels`."""
    lines = [
        '#include "library.h"',
        '#include "heap.h"',
        '#include "observer.h"',
        '#include "pool.h"',
        *write_model(model, write_observed_kernels(model, counters)),
        *_write_plan(model),
        "static int32_t run_call(const lowering_call* call, lowering_error* error) {",
        "    return run(call, error);",
        "}",
        "",
        "static int32_t count_threads(void) { return count_cpus(); }",
        "",
        *_write_description(model),
    ]
    return "\n".join(lines) + "\n"


def _write_plan(model: CModel) -> Iterator[str]:
    yield "static int64_t plan(const lowering_call* call, int64_t* output_sizes, lowering_error* error) {"
    yield "    Layout layout;"
    yield "    if (lay_out(call, &layout, error) != 0) return -1;"
    yield "    if (output_sizes == NULL) return layout.bytes;"
    yield from declare_sizes(model)
    for number, tensor in enumerate(model.code.outputs):
        for size in tensor.shape:
            value = "LOWERING_COMPUTED" if number in model.code.allocated else model.code.to_c(size)
            yield f"    *output_sizes++ = {value};"
    yield "    return layout.bytes;"
    yield "}"
    yield ""


def _write_description(model: CModel) -> Iterator[str]:
    """Yield the record that the library exports."""
    code, manifest = model.code, model.manifest
    inputs = [
        _describe_tensor(model, spec, tensor, -1, False)
        for spec, tensor in zip(manifest.inputs, code.inputs, strict=True)
    ]
    replaced = {manifest.donated.get(spec.name): number for number, spec in enumerate(manifest.inputs)}
    outputs = [
        _describe_tensor(model, spec, tensor, replaced.get(spec.name, -1), number in code.allocated)
        for number, (spec, tensor) in enumerate(zip(manifest.outputs, code.outputs, strict=True))
    ]
    sizes = [_describe_size(model, size) for size in code.sizes]
    yield from _write_array("lowering_tensor", "inputs", inputs)
    yield from _write_array("lowering_tensor", "outputs", outputs)
    yield from _write_array("lowering_size", "sizes", sizes)
    yield '__attribute__((visibility("default"))) const lowering_library lowering_description = {'
    features = ", ".join([*map(quote, manifest.cpu_features), "NULL"])
    yield f"    LOWERING_INTERFACE, sizeof(lowering_library), {quote(VERSION)}, {quote(manifest.target)},"
    yield f"    (const char* const[]){{{features}}},"
    yield f"    {len(sizes)}, {len(inputs)}, {len(outputs)}, sizes, inputs, outputs,"
    yield f"    {_count_weight_bytes(model)}, {int(model.program.allocates)},"
    yield "    count_threads, lowering_release, plan, run_call,"
    yield "};"


def _write_array(kind: str, name: str, entries: Sequence[str]) -> Iterator[str]:
    yield f"static const {kind} {name}[] = {{"
    yield from (f"    {{{entry}}}," for entry in entries or ["0"])
    yield "};"
    yield ""


def _describe_tensor(model: CModel, spec: TensorSpec, tensor: CTensor, replaced: int, is_allocated: bool) -> str:
    shape = ", ".join(_describe_dim(model, size, is_allocated) for size in tensor.shape) or "0"
    itemsize = DataType(tensor.dtype).itemsize
    return (
        f"{quote(spec.name)}, {quote(tensor.dtype)}, {itemsize}, {len(tensor.shape)}, "
        f"(const int64_t[]){{{shape}}}, {replaced}, {int(is_allocated)}"
    )


def _describe_dim(model: CModel, size: Expr, is_allocated: bool) -> str:
    if isinstance(size, tirx.IntImm):
        return f"INT64_C({int(size.value)})"
    names = [f"size{number}" for number in range(len(model.code.sizes))]
    name = model.code.symbols.get(size) if isinstance(size, ir.Var) and not is_allocated else None
    return str(-1 - names.index(name)) if name in names else "LOWERING_COMPUTED"


def _describe_size(model: CModel, size: str) -> str:
    lower, upper = bound_size(model, size)
    number, element = model.code.elements.get(size, (-1, -1))
    return f"{quote(size)}, INT64_C({lower}), INT64_C({upper}), {number}, {element}"


def _count_weight_bytes(model: CModel) -> int:
    return max((weight.offset + weight.nbytes for weight in model.manifest.weights), default=0)
