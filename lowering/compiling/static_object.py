"""Static objects: a model as one object file and a header, for programs without a loader, a runtime or an operating
system.

The folder has model.o, model.h, weights.bin and weights.S, which makes the weights a part of the program.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path

from ..emission.static_fields import name_fields
from ..emission.static_header import write_header
from ..emission.static_source import write_source, write_weights_source
from ..errors import InputError
from ..graph.loading.model import ModelLike
from ..manifest import HEADER, OBJECT, WEIGHTS_SOURCE, Manifest
from ..runtime.artifact.folders import replace_folder
from ..target import Target
from . import progress
from .bundled_sources import ONE_THREAD
from .c_model import CObjects, compile_c_model, compile_objects, lower_to_c, run_tool, write_c_weights
from .interrupts import preserve_interrupts
from .options import CompileOptions
from .pipeline import Dump

_TOOLS = ("objcopy", "nm")
_OF_LINKERS = {"_GLOBAL_OFFSET_TABLE_", "__tls_get_addr"}
"""Names that linkers define or, in programs, remove."""


@preserve_interrupts()
def write_static_object(
    folder: Path, model: ModelLike, options: CompileOptions, name: str = "model", dump: Dump | None = None
) -> Manifest:
    """Compile a model into a folder with its static object; return the model's description.

    Args:
        folder: The folder, which is replaced in one step if it exists.
        model: The model.
        options: As for an artifact. With one thread, one call of the model runs at a time.
        name: The prefix of its C names.
        dump: As for `compile`.

    Raises:
        InputError: The name is not a C identifier, or as for `lower_to_c`.
        ModelError: As for `lower_to_c` and `compile_c_model`.
        TargetError: The C compiler or the linker is missing or fails.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise InputError(
            "static.name_invalid", f"'{name}' cannot begin C names. Use letters, digits and _, a letter first."
        )
    target, lowered = lower_to_c(model, options, dump)
    one_thread = options.threads == 1
    with replace_folder(folder) as new:
        lowered = write_c_weights(lowered, new)
        objects = compile_c_model(lowered)
        fields = name_fields(objects.model)
        header = partial(write_header, objects.model, fields, name, one_thread)
        files = {HEADER: header(), "model.c": write_source(objects.model, fields, name, one_thread)}
        with progress.stage("linking"):
            content, functions = _link(target, objects, files, name, one_thread)
        (new / OBJECT).write_bytes(content)
        (new / HEADER).write_text(header(functions), "ascii")
        if lowered.manifest.weights:
            (new / WEIGHTS_SOURCE).write_text(write_weights_source(name), "ascii")
    return lowered.manifest


def _link(
    target: Target, objects: CObjects, files: dict[str, str], name: str, one_thread: bool
) -> tuple[bytes, list[str]]:
    """Return the object of the C code and the kernels, and the functions that it calls.

    Its only global names are those of the header.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = compile_objects(target, folder, objects, files, [ONE_THREAD] if one_thread else [])
        objcopy, nm = (run_tool(target, folder, [target.linker, f"-print-prog-name={tool}"]).strip() for tool in _TOOLS)
        run_tool(target, folder, [target.linker, "-r", "-nostdlib", *names, "-o", OBJECT])
        exported = [f"--keep-global-symbol={name}_{function}" for function in ("run", "workspace_bytes")]
        run_tool(target, folder, [objcopy, *exported, OBJECT])
        undefined = run_tool(target, folder, [nm, "-u", OBJECT]).splitlines()
        return (folder / OBJECT).read_bytes(), sorted({line.split()[-1] for line in undefined} - _OF_LINKERS)
