"""`compile`: from an ONNX model to a runnable module. The compiler is imported only for models not in the cache."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import scratch
from ..graph.loading.model_file import check_model_file
from ..manifest import Manifest
from ..runtime.artifact.folders import check_replaceable
from ..runtime.artifact.signature import SigningKey, read_private_key
from . import progress
from .cache import artifact_cache
from .options import CompileArguments, CompileOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..graph.loading.model import ModelLike
    from ..runtime import Model
    from .pipeline import Dump


def compile(
    model: ModelLike,
    target: str = "cpu",
    *,
    seed: int | str = 0,
    dump: Dump | None = None,
    **arguments: Unpack[CompileArguments],
) -> Model:
    """Compile an ONNX model ahead of time; the result can run at once and be saved.

    If this machine cannot run the code, which is for a GPU or another CPU, the result can be inspected and saved;
    calling it raises ArtifactError.

    Args:
        model: A path, bytes, an `onnx.ModelProto` or an `onnx_ir.Model`; files with external data are read lazily.
        target: The machine that runs the code, such as `cpu`, `cpu:x86-64-v4` or `cuda:sm_80,sm_90a`.
        seed: The seed of random operators.
        dump: Called with ("given", the `onnx_ir.Model` as it was read), ("fused", the one to import), then with (name
            of the pass, module) after each pass.
        arguments: The other fields of `CompileOptions`, which describes all of them: donate, threads, cc, dims,
            static_cache, weights, database, serve, checks, precision, calls.

    Returns:
        The compiled model.

    Raises:
        ModelError: The model is invalid.
        NodeError: A node cannot be lowered.
        TargetError: The target is unsupported, or its compiler is missing.
        InputError: An option is invalid for this model, such as a donate pattern that matches no input.
    """
    from ..runtime import open_compiled

    options = CompileOptions(target=target, seed=seed, **arguments)
    # A loaded model keeps its files open, and does not need the folder.
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        module = Path(folder) / "module"
        _compile_into(module, model, options, dump)
        return open_compiled(module)


def compile_to(
    folder: str | Path,
    model: ModelLike,
    target: str = "cpu",
    *,
    seed: int | str = 0,
    dump: Dump | None = None,
    sign_key: SigningKey | None = None,
    **arguments: Unpack[CompileArguments],
) -> Manifest:
    """Compile straight into an artifact folder, also for machines that cannot run it.

    Parameters are as for `compile`, and sign_key as for `Model.save`. An unsuitable folder or key is rejected before
    the model is compiled.

    Returns:
        The manifest of the artifact.
    """
    check_replaceable(Path(os.path.realpath(folder)))
    if sign_key is not None:
        sign_key = read_private_key(sign_key)
    options = CompileOptions(target=target, seed=seed, **arguments)
    return _compile_into(Path(folder), model, options, dump, sign_key)


def compile_static(
    folder: str | Path,
    model: ModelLike,
    target: str = "cpu",
    *,
    name: str = "model",
    seed: int | str = 0,
    dump: Dump | None = None,
    **arguments: Unpack[CompileArguments],
) -> Manifest:
    """Compile into a folder with a static object: C functions without a loader, a runtime or an operating system.

    Parameters are as for `compile`. name is the prefix of its C names. With threads=1 the code needs no thread-local
    memory, and one call of the model runs at a time.

    Returns:
        The description of the model.

    Raises:
        InputError: The name is not a C identifier, or the target is a GPU.
        ModelError: It has loops, or memory whose size depends on data.
    """
    check_replaceable(Path(os.path.realpath(folder)))
    options = CompileOptions(target=target, seed=seed, **arguments)
    if isinstance(model, (str, os.PathLike)):
        check_model_file(Path(model))  # before slow imports
    with _collect_garbage_rarely(), scratch.use_folder(Path(os.path.realpath(folder)).parent):
        from .static_object import write_static_object

        return write_static_object(Path(folder), model, options, name, dump)


def compile_library(
    folder: str | Path,
    model: ModelLike,
    target: str = "cpu",
    *,
    seed: int | str = 0,
    dump: Dump | None = None,
    **arguments: Unpack[CompileArguments],
) -> Manifest:
    """Compile into a folder with a library for C, and the source of its loader (lowering.h).

    Parameters are as for `compile`.

    Returns:
        The description of the model.

    Raises:
        InputError: The target is a GPU, the model has a setup, or serve is not None.
        ModelError: It has strings.
    """
    check_replaceable(Path(os.path.realpath(folder)))
    options = CompileOptions(target=target, seed=seed, **arguments)
    if isinstance(model, (str, os.PathLike)):
        check_model_file(Path(model))  # before slow imports
    with _collect_garbage_rarely(), scratch.use_folder(Path(os.path.realpath(folder)).parent):
        from .library import write_library

        return write_library(Path(folder), model, options, dump)


def _compile_into(
    folder: Path, model: ModelLike, options: CompileOptions, dump: Dump | None, sign_key: SigningKey | None = None
) -> Manifest:
    key = None
    if isinstance(model, (str, os.PathLike)):
        check_model_file(Path(model))  # before slow imports
    if isinstance(model, (str, os.PathLike)) and dump is None:  # a dump must show every pass
        with progress.stage("looking whether it is known"):
            key = artifact_cache.key(Path(model), options)
            cached = None if key is None else artifact_cache.get(key, folder, sign_key)
        if cached is not None:
            progress.LOG.info("the same file was compiled before: copied from %s", artifact_cache.folder())
            return cached
    with _collect_garbage_rarely(), scratch.use_folder(Path(os.path.realpath(folder)).parent):
        from . import artifact
        from .compilation import compiled

        compiled_model = compiled(model, options, dump=dump)
    with progress.stage("writing"):
        manifest = artifact.write_artifact(folder, compiled_model.artifacts, sign_key)
        if key is not None:
            artifact_cache.put(key, folder)
    return manifest


@contextmanager
def _collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage rarely, since most objects of a compile survive: collection takes a tenth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and 20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
