"""The C code of a static object: its functions, which take the record of the header, around the code of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..passes.memory.plan_memory import ALIGNMENT
from .c_code import name_kernel
from .c_model import CModel
from .kernel_code import declare_kernel
from .model_source import write_model
from .static_fields import FieldNames


def write_source(model: CModel, fields: FieldNames, name: str, one_thread: bool) -> str:
    """Return model.c, which includes model.h.

    Args:
        model: The model.
        fields: The names of the fields of a call's record.
        name: The prefix of its C names.
        one_thread: Whether one call runs at a time, by the calling thread.
    """
    threads = "NULL" if one_thread else "call->threads"
    memory = "call->memory" if model.program.allocates else "NULL"
    weights = "call->weights" if model.manifest.weights else "NULL"
    outputs = [f"(void*)call->{fields.outputs[k]}" if k in fields.outputs else "NULL" for k in _outputs(model)]
    shapes = [f"call->{fields.shapes[k]}" if k in fields.shapes else "NULL" for k in _outputs(model)]
    lines = [
        '#include "model.h"',
        *write_model(model, (declare_kernel(model, kernel, name_kernel(kernel)) for kernel in model.kernels)),
        *_begin_function(f"int64_t {name}_workspace_bytes", name),
        *_declare("const int64_t sizes", [f"call->{field}" for field in fields.sizes]),
        "    Layout layout;",
        f"    const lowering_call sized = {{.sizes = sizes, .threads = {threads}, .thread_count = 1}};",
        "    return lay_out(&sized, &layout, error) != 0 ? -1 : layout.bytes;",
        "}",
        "",
        *_begin_function(f"int {name}_run", name),
        *_declare("const int64_t sizes", [f"call->{field}" for field in fields.sizes]),
        *_declare("void* const inputs", [f"(void*)call->{field}" for field in fields.inputs]),
        *_declare("void* const outputs", outputs),
        *_declare("int64_t* const shapes", shapes),
        "    const lowering_call arrays = {",
        f"        sizes, inputs, outputs, shapes, {weights}, call->workspace, INT64_MAX, {memory}, {threads}, 1, NULL",
        "    };",
        "    return run(&arrays, error);",
        "}",
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


def _outputs(model: CModel) -> range:
    return range(len(model.manifest.outputs))


def _begin_function(signature: str, name: str) -> Iterator[str]:
    yield f"{signature}(const {name}_call* call, lowering_error* error) {{"
    yield '    if (call == NULL) return fail(error, "run.call_missing", "The record of the call is NULL.");'


def _declare(array: str, values: Sequence[str]) -> Iterator[str]:
    """Yield the declaration of an array, of at least one element."""
    yield f"    {array}[] = {{{', '.join(values) or '0'}}};"
