"""Calls of static objects for other machines: a program of the object, under an emulator."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lowering.manifest import Manifest
from tests.support.static_objects import StaticHeader

_PROGRAM = """\
#include <stdio.h>
#include <stdlib.h>
#include "model.h"

static void* reserve(int64_t bytes) { return aligned_alloc(64, ((size_t)bytes + 64) / 64 * 64); }
static void* allocate(void* owner, size_t bytes) { (void)owner; return malloc(bytes); }
static void release(void* owner, void* memory) { (void)owner; free(memory); }
static void* read_array(size_t bytes) {
    void* data = reserve((int64_t)bytes);
    if (fread(data, 1, bytes, stdin) != bytes) exit(2);
    return data;
}
static void write_array(const void* data, size_t bytes) {
    if (fwrite(data, 1, bytes, stdout) != bytes) exit(3);
}

int main(void) {
    lowering_error error = {"", ""};
    lowering_memory memory = {NULL, allocate, release};
    model_call call = {0};
    (void)memory;
STATEMENTS
    return 0;
}
"""


def run_elsewhere(
    folder: Path,
    manifest: Manifest,
    inputs: Mapping[str, np.ndarray],
    like: Mapping[str, np.ndarray],
    cc: str,
    emulator: Sequence[str],
) -> dict[str, np.ndarray]:
    """Run the object in `folder` on inputs by name; return outputs with the shapes and types of `like`.

    Args:
        folder: What `compile_static` has written.
        manifest: What it returned.
        inputs: Arrays, by name.
        like: Arrays with the shapes and types of outputs, by name.
        cc: The C compiler of the machine.
        emulator: The command that runs a program.
    """
    header = StaticHeader(folder, manifest, "model")
    input_fields, output_fields = header.tensor_fields()
    lines = [f"call.{field} = {size};" for field, size in header.read_sizes(inputs).items()]
    lines += [f"call.{field} = read_array({inputs[name].nbytes});" for name, field in input_fields.items()]
    for name, field in output_fields.items():
        if field in header.allocated:
            shape = header.allocated[field]
            lines += [f"void* {field} = NULL; call.{field} = (void*)&{field};"]
            lines += [f"int64_t {shape}[9]; call.{shape} = {shape};"]
        else:
            lines.append(f"void* {field} = call.{field} = reserve({like[name].nbytes});")
    if manifest.weights:
        lines.append("call.weights = model_weights;")
    if "memory" in header.fields:
        lines.append("call.memory = &memory;")
    lines += [
        "const int64_t bytes = model_workspace_bytes(&call, &error);",
        "call.workspace = reserve(bytes < 0 ? 0 : bytes);",
        "if (bytes < 0 || model_run(&call, &error) != 0) {",
        '    fprintf(stderr, "[%s] %s", error.code, error.text);',
        "    exit(1);",
        "}",
    ]
    lines += [f"write_array({field}, {like[name].nbytes});" for name, field in output_fields.items()]
    (folder / "program.c").write_text(_PROGRAM.replace("STATEMENTS", "\n".join(f"    {line}" for line in lines)))
    sources = [str(folder / file) for file in ("program.c", "model.o", "weights.S") if (folder / file).exists()]
    program = str(folder / "program")
    subprocess.run([cc, "-O1", f"-I{folder}", "-static", *sources, "-lm", "-o", program], check=True)
    data = b"".join(np.ascontiguousarray(inputs[name]).tobytes() for name in input_fields)
    done = subprocess.run([*emulator, program], input=data, capture_output=True, check=True, timeout=300)
    outputs, position = {}, 0
    for name in output_fields:
        array = like[name]
        content = done.stdout[position : position + array.nbytes]
        outputs[name] = np.frombuffer(content, array.dtype).reshape(array.shape)
        position += array.nbytes
    assert position == len(done.stdout)
    return outputs
