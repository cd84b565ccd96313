"""The C code of a static object: the size function and the function of the model, around the code of `main`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import DataType
from tvm.ir import prim
from tvm.sym import Analyzer

from ..arithmetic import LARGEST_SIZE
from ..importing.values import MAX_TENSOR_BYTES
from ..manifest import TensorSpec
from ..passes.memory.plan_memory import ALIGNMENT
from ..passes.memory.size_classes import to_float64
from ..tensorir.expressions import is_int
from .c_code import CTensor, name_kernel
from .c_names import quote
from .kernel_signature import declare
from .static_model import StaticModel, list_own_outputs

_MOST_BYTES = f"{float(MAX_TENSOR_BYTES):.1f}"


def write_source(model: StaticModel, symbols: Mapping[str, str]) -> str:
    """Return model.c, which includes model.h and static_main.h. `symbols` are the kernels' names in their code."""
    declarations = [
        f'{declare(kernel, name_kernel(kernel_name))[:-1]} __asm__("{symbols[kernel_name]}");'
        for kernel_name, kernel in model.kernels.items()
    ]
    lines = [
        '#include "model.h"',
        *(["#define LOWERING_ONE_THREAD"] if model.one_thread else []),
        f"#define LOWERING_MOST_BYTES {_MOST_BYTES} /* of a tensor */",
        f"#define LOWERING_RANK {model.program.rank}",
        f'#include "{"static_memory.h" if model.program.allocates else "static_main.h"}"',
        *(['#include "requests_call.h"'] if model.program.checks else []),
        *(f"LOWERING_HIDDEN int {check}(const Requests* requests);" for check in model.program.checks),
        "",
        *declarations,
        "",
        *model.program.constants,
        "",
        *model.program.declarations,
        "",
        *model.program.definitions,
        *_write_layout(model),
        *_write_compute(model),
        *_write_run(model),
    ]
    return "\n".join(lines) + "\n"


def write_weights_source(name: str) -> str:
    """Return weights.S, which makes weights.bin a part of a program."""
    return f"""\
/* cc -I FOLDER -c FOLDER/weights.S, with this file's folder: {name}_weights is the content of weights.bin. */
    .section .rodata
    .balign {ALIGNMENT}
    .global {name}_weights
{name}_weights:
    .incbin "weights.bin"
    .byte 0
    .section .note.GNU-stack,"",%progbits
"""


# -- parts of model.c -------------------------------------------------------------------------------------------------


def _write_layout(model: StaticModel) -> Iterator[str]:
    """Yield the function that checks sizes and lays out the workspace."""
    code = model.code
    blocks = [block for block in code.workspace if block not in _assign_outputs(model)]
    yield "/* Offsets of blocks in the workspace, and of the scratch memory of tasks. */"
    yield "typedef struct {"
    yield "    int64_t " + ", ".join([*blocks, "scratch", "scratch_bytes", "bytes"]) + ";"
    yield "} Layout;"
    yield ""
    yield f"static int lay_out(const {model.name}_call* call, Layout* layout, lowering_error* error) {{"
    yield '    if (call == NULL) return fail(error, "run.call_missing", "The record of the call is NULL.");'
    yield from _declare_sizes(model)
    for size, field in zip(model.code.sizes, model.fields.sizes):
        lower, upper = model.manifest.ranges.get(size, (0, LARGEST_SIZE))
        bounds = f"INT64_C({max(0, lower)}), INT64_C({min(upper, LARGEST_SIZE)})"
        yield f"    if (check_size(error, {quote(size)}, call->{field}, {bounds}) != 0) return -1;"
    if not model.one_thread:
        yield "    const int64_t tasks = call->threads != NULL ? call->threads->count : 1;"
        yield "    if (check_threads(error, call->threads) != 0) return -1;"
    outputs = (tensor for k, tensor in enumerate(code.outputs) if k not in code.allocated)
    tensors = (tensor.count_bytes() for tensor in (*code.inputs, *outputs))
    totals = [
        total for total in (*code.workspace.values(), *code.scratch, *tensors) if not isinstance(total, prim.IntImm)
    ]
    for total in dict.fromkeys(code.to_c(to_float64(total)) for total in totals):  # int64 may wrap
        yield f"    if (!({total} <= LOWERING_MOST_BYTES)) return fail_memory(error);"
    yield from (f"    {check}" for check in code.size_checks)
    yield "    int64_t bytes = 0, scratch = 0;"
    for block in blocks:
        yield f"    layout->{block} = bytes;"
        yield f"    bytes += round_up({code.to_c(code.workspace[block])});"
    yield from (f"    scratch = max_of(scratch, {code.to_c(size)});" for size in code.scratch if not is_int(size, 0))
    yield "    layout->scratch = bytes, layout->scratch_bytes = scratch;"
    yield f"    layout->bytes = bytes + scratch{'' if model.one_thread else ' * tasks'};"
    yield "    return 0;"
    yield "}"
    yield ""


def _write_compute(model: StaticModel) -> Iterator[str]:
    """Yield the function of `main`."""
    code = model.code
    outputs = _assign_outputs(model)
    heap = "Heap* heap, " if model.program.allocates else ""
    yield f"static int compute(const {model.name}_call* call, const Layout* layout, {heap}lowering_error* error) {{"
    yield from _declare_sizes(model)
    if model.program.allocates:
        yield f"    Block* owned[{max(code.owned, 1)}];"
        yield "    Frame frame = {heap, owned, 0};"
        yield "    (void)frame;"
    for number, field in enumerate(model.fields.inputs):
        yield f"    void* const input{number} = (void*)call->{field};"
        yield f"    (void)input{number};"
    for block in code.workspace:
        if block in outputs:
            yield f"    void* const {block} = call->{model.fields.outputs[outputs[block]]};"
        else:
            yield f"    void* const {block} = (char*)call->workspace + layout->{block};"
    yield from (f"    {statement}" for statement in code.statements)
    yield from _write_allocated_outputs(model)
    for spec, tensor in _pair_own_outputs(model):
        if outputs.get(tensor.memory) != spec.name and spec.name not in model.fields.shapes:
            size, field = code.to_c(tensor.count_bytes()), model.fields.outputs[spec.name]
            yield f"    if ({size} > 0) memcpy(call->{field}, {tensor.address}, (size_t)({size}));"
    yield "    (void)call, (void)layout, (void)error;"
    yield "    return 0;"
    yield "}"
    yield ""


def _write_allocated_outputs(model: StaticModel) -> Iterator[str]:
    """Yield the code that allocates outputs whose size depends on data, and sets their addresses and shapes."""
    code, fields = model.code, model.fields
    pairs = [(spec.name, tensor) for spec, tensor in _pair_own_outputs(model) if spec.name in fields.shapes]
    if not pairs:
        return
    new_outputs = ", ".join(
        f"{{{tensor.address}, {code.to_c(tensor.count_bytes())}, (void**)call->{fields.outputs[name]}}}"
        for name, tensor in pairs
    )
    yield f"    const NewOutput new_outputs[] = {{{new_outputs}}};"
    yield f"    if (allocate_outputs(call->memory, new_outputs, {len(pairs)}) != 0) return fail_memory(error);"
    for name, tensor in pairs:
        for axis, size in enumerate(tensor.shape):
            yield f"    call->{fields.shapes[name]}[{axis}] = {code.to_c(size)};"


def _write_run(model: StaticModel) -> Iterator[str]:
    """Yield the functions of the header."""
    name, manifest, code = model.name, model.manifest, model.code
    yield f"int64_t {name}_workspace_bytes(const {name}_call* call, lowering_error* error) {{"
    yield "    Layout layout;"
    yield "    return lay_out(call, &layout, error) != 0 ? -1 : layout.bytes;"
    yield "}"
    yield ""
    yield f"int {name}_run(const {name}_call* call, lowering_error* error) {{"
    yield "    Layout layout;"
    yield "    if (lay_out(call, &layout, error) != 0) return -1;"
    yield from _declare_sizes(model)
    inputs = zip(model.fields.inputs, manifest.inputs, code.inputs)
    outputs = [(model.fields.outputs[spec.name], spec, tensor) for spec, tensor in _pair_own_outputs(model)]
    checked = [
        (spec.name, field, code.to_c(tensor.count_bytes()), DataType(spec.storage).itemsize)
        for field, spec, tensor in (*inputs, *outputs)
        if spec.name not in model.fields.shapes
    ]
    for output, field in model.fields.shapes.items():
        checked += [(output, model.fields.outputs[output], "8", 8), (output, field, "8", 8)]
    if manifest.weights:
        checked.append(("weights", "weights", str(sum(weight.nbytes for weight in manifest.weights)), ALIGNMENT))
    checked.append(("workspace", "workspace", "layout.bytes", ALIGNMENT))
    for title, field, size, alignment in checked:
        yield f"    if (check_memory(error, {quote(title)}, call->{field}, {size}, {alignment}) != 0) return -1;"
    if model.program.allocates:
        yield "    if (check_callers_memory(error, call->memory) != 0) return -1;"
        yield "    Heap heap = {call->memory, NULL, NULL};"
    yield "    const Context before = context;"
    threads = "NULL" if model.one_thread else "call->threads"
    yield f"    context = (Context){{{threads}, (char*)call->workspace + layout.scratch, layout.scratch_bytes, 0, 0}};"
    heap = "&heap, " if model.program.allocates else ""
    yield f"    const int status = compute(call, &layout, {heap}error);"
    if model.program.allocates:
        yield "    release_heap(&heap);"
    yield "    context = before;"
    yield "    return status;"
    yield "}"


def _declare_sizes(model: StaticModel) -> Iterator[str]:
    for number, field in enumerate(model.fields.sizes):
        yield f"    const int64_t size{number} = call->{field};"
        yield f"    (void)size{number};"


def _assign_outputs(model: StaticModel) -> dict[str, str]:
    """Return the names of outputs, by the block that is computed in their memory; other outputs are copied."""
    outputs: dict[str, str] = {}
    for spec, tensor in _pair_own_outputs(model):
        size = model.code.workspace.get(tensor.memory)
        if spec.name in model.fields.shapes:
            continue
        if tensor.address == tensor.memory and Analyzer().can_prove_equal(size, tensor.count_bytes()):
            outputs.setdefault(tensor.memory, spec.name)
    return outputs


def _pair_own_outputs(model: StaticModel) -> list[tuple[TensorSpec, CTensor]]:
    own = list_own_outputs(model.manifest)
    return [(spec, tensor) for spec, tensor in zip(model.manifest.outputs, model.code.outputs) if spec in own]
