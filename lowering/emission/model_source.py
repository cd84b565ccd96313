"""The C code of a model: a function that checks sizes and lays out memory, and one that checks a call and runs it.

Both take the record in call.h. A static object and a library put their own functions around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tvm import DataType
from tvm.ir import prim
from tvm.sym import Analyzer

from ..arithmetic import LARGEST_SIZE
from ..importing.values import MAX_TENSOR_BYTES
from ..passes.memory.plan_memory import ALIGNMENT
from ..passes.memory.size_classes import to_float64
from ..tensorir.expressions import is_int
from .c_model import CModel
from .c_names import quote

_MOST_BYTES = f"{float(MAX_TENSOR_BYTES):.1f}"


def write_model(model: CModel, kernels: Iterable[str]) -> list[str]:
    """Return the lines of `lay_out` and `run`, with what they need. `kernels` are those of kernels (`name_kernel`)."""
    program = model.program
    return [
        f"#define LOWERING_MOST_BYTES {_MOST_BYTES} /* of a tensor */",
        f"#define LOWERING_RANK {program.rank}",
        f'#include "{"model_memory.h" if program.allocates else "model_checks.h"}"',
        *(['#include "requests_call.h"'] if program.checks else []),
        *(f"LOWERING_HIDDEN int {check}(const Requests* requests);" for check in program.checks),
        "",
        *kernels,
        "",
        *program.constants,
        "",
        *program.declarations,
        "",
        *program.definitions,
        *_write_layout(model),
        *_write_compute(model),
        *_write_run(model),
    ]


def declare_sizes(model: CModel) -> Iterator[str]:
    """Yield declarations of the symbolic sizes of a call."""
    for number in range(len(model.code.sizes)):
        yield f"    const int64_t size{number} = call->sizes[{number}];"
        yield f"    (void)size{number};"


def bound_size(model: CModel, size: str) -> tuple[int, int]:
    """Return the smallest and the largest legal value of a symbolic size."""
    lower, upper = model.manifest.ranges.get(size, (0, LARGEST_SIZE))
    return max(0, lower), min(upper, LARGEST_SIZE)


def _write_layout(model: CModel) -> Iterator[str]:
    """Yield the function that checks sizes and lays out the workspace."""
    code = model.code
    blocks = [block for block in code.workspace if block not in _assign_outputs(model)]
    yield "/* Offsets of blocks in the workspace, and of the scratch memory of tasks. */"
    yield "typedef struct {"
    yield "    int64_t " + ", ".join([*blocks, "scratch", "scratch_bytes", "bytes"]) + ";"
    yield "} Layout;"
    yield ""
    yield "/* Check sizes and threads of a call, and lay out its workspace. */"
    yield "static int lay_out(const lowering_call* call, Layout* layout, lowering_error* error) {"
    yield from declare_sizes(model)
    for number, size in enumerate(code.sizes):
        lower, upper = bound_size(model, size)
        bounds = f"INT64_C({lower}), INT64_C({upper})"
        yield f"    if (check_size(error, {quote(size)}, size{number}, {bounds}) != 0) return -1;"
    yield "    if (check_threads(error, call) != 0) return -1;"
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
    yield "    layout->bytes = bytes + scratch * count_tasks(call->threads, call->thread_count);"
    yield "    return 0;"
    yield "}"
    yield ""


def _write_compute(model: CModel) -> Iterator[str]:
    """Yield the function of `main`."""
    code = model.code
    outputs = _assign_outputs(model)
    heap = "Heap* heap, " if model.program.allocates else ""
    yield f"static int compute(const lowering_call* call, const Layout* layout, {heap}lowering_error* error) {{"
    yield from declare_sizes(model)
    if model.program.allocates:
        yield f"    Block* owned[{max(code.owned, 1)}];"
        yield "    Frame frame = {heap, owned, 0};"
        yield "    (void)frame;"
    for number in range(len(model.manifest.inputs)):
        yield f"    void* const input{number} = call->inputs[{number}];"
        yield f"    (void)input{number};"
    for block in code.workspace:
        if block in outputs:
            yield f"    void* const {block} = call->outputs[{outputs[block]}];"
        else:
            yield f"    void* const {block} = (char*)call->workspace + layout->{block};"
    yield from (f"    {statement}" for statement in code.statements)
    yield from _write_allocated_outputs(model)
    for number, _, tensor in model.list_own_outputs():
        if outputs.get(tensor.memory) != number and number not in code.allocated:
            size = code.to_c(tensor.count_bytes())
            yield f"    if ({size} > 0) memcpy(call->outputs[{number}], {tensor.address}, (size_t)({size}));"
    yield "    (void)call, (void)layout, (void)error;"
    yield "    return 0;"
    yield "}"
    yield ""


def _write_allocated_outputs(model: CModel) -> Iterator[str]:
    """Yield the code that allocates outputs whose size depends on data, and sets their addresses and shapes."""
    code = model.code
    if not code.allocated:
        return
    tensors = [(number, tensor) for number, _, tensor in model.list_own_outputs() if number in code.allocated]
    new_outputs = ", ".join(
        f"{{{tensor.address}, {code.to_c(tensor.count_bytes())}, (void**)call->outputs[{number}]}}"
        for number, tensor in tensors
    )
    yield f"    const NewOutput new_outputs[] = {{{new_outputs}}};"
    yield f"    if (allocate_outputs(heap, new_outputs, {len(tensors)}) != 0) return fail_memory(error);"
    for number, tensor in tensors:
        for axis, size in enumerate(tensor.shape):
            yield f"    call->shapes[{number}][{axis}] = {code.to_c(size)};"


def _write_run(model: CModel) -> Iterator[str]:
    """Yield the function that checks a call and runs it."""
    allocates = model.program.allocates
    yield "static int run(const lowering_call* call, lowering_error* error) {"
    yield "    Layout layout;"
    yield "    if (lay_out(call, &layout, error) != 0) return -1;"
    yield from declare_sizes(model)
    for title, address, size, alignment in _list_memory(model):
        yield f"    if (check_memory(error, {quote(title)}, {address}, {size}, {alignment}) != 0) return -1;"
    yield "    if (check_workspace(error, call, layout.bytes) != 0) return -1;"
    if allocates:
        yield "    Heap heap = {choose_memory(error, call->memory), NULL, NULL};"
        yield "    if (heap.memory == NULL) return -1;"
    yield "    const Context before = lowering_context;"
    yield "    char* const scratch = (char*)call->workspace + layout.scratch;"
    threads = "call->threads, call->thread_count"
    yield f"    lowering_context = (Context){{{threads}, scratch, layout.scratch_bytes, 0, call->observer, 0}};"
    yield f"    const int status = compute(call, &layout, {'&heap, ' if allocates else ''}error);"
    if allocates:
        yield "    release_heap(&heap);"
    yield "    lowering_context = before;"
    yield "    return status;"
    yield "}"
    yield ""


def _list_memory(model: CModel) -> Iterator[tuple[str, str, str, int]]:
    """Yield the name, address, bytes and alignment of the memory of a call, as C code."""
    code, manifest = model.code, model.manifest
    for number, (spec, tensor) in enumerate(zip(manifest.inputs, code.inputs)):
        itemsize = DataType(spec.storage).itemsize
        yield spec.name, f"call->inputs[{number}]", code.to_c(tensor.count_bytes()), itemsize
    for number, spec, tensor in model.list_own_outputs():
        if number in code.allocated:
            yield spec.name, f"call->outputs[{number}]", "8", 8
            yield spec.name, f"call->shapes[{number}]", "8", 8
        else:
            size, itemsize = code.to_c(tensor.count_bytes()), DataType(spec.storage).itemsize
            yield spec.name, f"call->outputs[{number}]", size, itemsize
    if manifest.weights:
        yield "weights", "call->weights", str(sum(weight.nbytes for weight in manifest.weights)), ALIGNMENT


def _assign_outputs(model: CModel) -> dict[str, int]:
    """Return the numbers of outputs, by the block that is computed in their memory; other outputs are copied."""
    outputs: dict[str, int] = {}
    for number, _, tensor in model.list_own_outputs():
        size = model.code.workspace.get(tensor.memory)
        if number in model.code.allocated:
            continue
        if tensor.address == tensor.memory and Analyzer().can_prove_equal(size, tensor.count_bytes()):
            outputs.setdefault(tensor.memory, number)
    return outputs
