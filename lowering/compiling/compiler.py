"""`compile`: from an ONNX model to a runnable module. The compiler is imported only for models not in the cache."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..graph.model_file import check_model_file
from ..manifest import Manifest
from ..runtime.folders import check_replaceable
from ..runtime.signature import SigningKey, read_private_key
from . import artifact_cache, progress
from .options import Options

if TYPE_CHECKING:
    from ..choices import Precision, Scheme
    from ..graph.declared_sizes import Dims
    from ..graph.model import ModelLike
    from ..graph.serve import Serve
    from ..runtime import Model
    from .overflow import Call
    from .pipeline import Dump


def compile(
    model: ModelLike,
    target: str = "cpu",
    donate: Sequence[str] = (),
    threads: int | None = None,
    cc: str | None = None,
    dims: Dims | None = None,
    static_cache: int | None = None,
    weights: Scheme | None = None,
    database: str | Path | None = None,
    serve: Serve | None = None,
    dump: Dump | None = None,
    checks: bool = True,
    precision: Precision | None = None,
    calls: Sequence[Call] = (),
    seed: int | str = 0,
) -> Model:
    """Compile an ONNX model ahead of time; the result can run at once and be saved.

    If this machine cannot run the code, which is for a GPU or another CPU, the result can be inspected and saved;
    calling it raises ArtifactError.

    Args:
        model: A path, bytes, an `onnx.ModelProto` or an `onnx_ir.Model`; files with external data are read lazily.
        target: `cpu` for this machine, or `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64` for others, with additional
            features after the name (`cpu:x86-64-v4+avx512vnni`, `cpu:aarch64+dotprod`). Or `cuda:` and a list of GPU
            architectures, such as `cuda:sm_80,sm_90a`, or `cuda` for the GPU of this machine.
        donate: Regular expressions that match whole names of inputs to be consumed: the matching output takes over
            their memory. Of the inputs that `serve` replaces only its pools are donated, always.
        threads: The default number of workers, at most 1024; None means the CPUs the calling thread may use.
        cc: The compiler that links.
        dims: Facts about symbolic dimensions. `{"batch": 1}` makes one a number; sizes and branches (If) that it
            decides are computed at compile time. `{"tokens": (1, 512)}` bounds one, which calls then check. For an
            input that is a sequence it is the number of tensors, `{"frames": 3}`. For an optional input it is 0 if
            the input is None, 1 if it has an element (graph/list_inputs.py).
        static_cache: `static_cache=N` turns a decoder's growing past into a cache of N slots, written in place, whose
            length is a new input (graph/static_cache.py); `Model.decoder` manages it.
        weights: "int8" (a scale for each column), "int4" (a float16 scale for each column and 32 rows) or "f16"
            compresses the constant matrices of matmuls. It also compresses embedding tables by rows, in 8 bits for
            int4 too (graph/compressed_tables.py). Accumulators stay float32; biases and convolutions are unchanged.
            The manifest has a note about the error.
        database: A folder of `tune`, whose records for this target choose the tiles of kernels before presets do; the
            manifest names the records.
        serve: `serve=Serve(context=N)` turns a decoder with a growing past into one for a ragged batch of many
            requests over one paged cache (graph/paged_decoder.py), which a `Batcher` runs.
        dump: Called with ("given", the `onnx_ir.Model` as it was read), ("fused", the one to import), then with (name
            of the pass, module) after each pass.
        checks: False omits the run-time checks of the tables of serving operators (starts, lengths, pages, blocks).
            Then no request is rejected, and kernels still touch no memory but their arrays; docs/serving.md has the
            rules and their cost.
        precision: "float16" or "bfloat16" computes the matmuls of a float32 model in that type, and stores their
            weights and a decoder's caches in it. Norms, softmax and accumulators stay float32, as do inputs and
            outputs (graph/precision.py). "fast" computes the matmuls of a float32 or float16 model in bfloat16 where
            that is faster on every target, and leaves inputs, outputs and caches unchanged. "tf32" and "3xtf32" leave
            the model float32, and multiply its matrices on the GPU's tensor cores. Their error is 2^-11 of each
            operand, or about none with operands split in two (schedules/cuda/tensor_types.py). "float32" computes in
            floats what a model quantizes at run time, such as DynamicQuantizeLSTM (graph/float_activations.py).
        calls: Sample calls, each a dictionary of arrays by input name, that show which numbers float16 cannot
            represent: nodes that read or compute those stay wide.
        seed: The seed of random operators without an attribute `seed`. A number makes every call draw the same
            numbers. A string is the name of a new input (int64 scalar), from which each call takes its seed
            (graph/random_seed.py).

    Returns:
        The compiled model.

    Raises:
        ModelError: if the model is invalid.
        NodeError: if a node cannot be lowered.
        TargetError: if the target is unsupported, or its compiler is missing.
        InputError: for an unsupported weights scheme, a donate pattern that matches no input, an input without a
            matching output, or a dimension that no input has.
    """
    from ..runtime import open_compiled

    options = Options(
        target,
        donate,
        threads,
        cc,
        dims,
        static_cache,
        weights,
        database,
        serve,
        checks,
        precision,
        calls,
        seed,
    )
    # A loaded model keeps its files open, and does not need the folder.
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        module = Path(folder) / "module"
        _compile_into(module, model, options, dump)
        return open_compiled(module)


def compile_to(
    folder: str | Path,
    model: ModelLike,
    target: str = "cpu",
    donate: Sequence[str] = (),
    threads: int | None = None,
    cc: str | None = None,
    dims: Dims | None = None,
    static_cache: int | None = None,
    weights: Scheme | None = None,
    database: str | Path | None = None,
    serve: Serve | None = None,
    dump: Dump | None = None,
    sign_key: SigningKey | None = None,
    checks: bool = True,
    precision: Precision | None = None,
    calls: Sequence[Call] = (),
    seed: int | str = 0,
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
    options = Options(
        target,
        donate,
        threads,
        cc,
        dims,
        static_cache,
        weights,
        database,
        serve,
        checks,
        precision,
        calls,
        seed,
    )
    return _compile_into(Path(folder), model, options, dump, sign_key)


def _compile_into(
    folder: Path, model: ModelLike, options: Options, dump: Dump | None, sign_key: SigningKey | None = None
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
    with _collect_garbage_rarely():
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
