"""`compile`: from an ONNX model to a module that runs. The compiler itself is imported where a model is new to it."""

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
    """Compiles an ONNX model ahead of time; the result runs at once and can be saved.

    * `model` is a path, bytes, an `onnx.ModelProto` or an `onnx_ir.Model`; files with external data are read lazily.
    * `target` is `cpu` for this machine, or `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64` for others, with features
      that these names do not promise behind them (`cpu:x86-64-v4+avx512vnni`, `cpu:aarch64+dotprod`), or `cuda:` and
      a list of architectures of GPUs, such as `cuda:sm_80,sm_90a`, or `cuda` for the GPU here.
    * `donate` holds regular expressions that match whole names of inputs to be consumed: the matching output takes over
      their memory. Of what `serve` replaces nothing is donated but its pools, without being asked for.
    * `threads` is the default number of workers, at most 1024; None means the CPUs the calling thread may use.
    * `cc` names the compiler that links.
    * `dims` says what is known of symbolic dimensions: `{"batch": 1}` makes one a number, at which sizes and branches
      (If) that it decides are computed now, and `{"tokens": (1, 512)}` bounds one, which calls then check. Of an input
      that is a sequence it says the number of its tensors, `{"frames": 3}`, and of an optional one whether it is None,
      0, or has an element, 1 (graph/list_inputs.py).
    * `static_cache=N` makes a decoder's growing past a cache of N slots, written in place, whose length is a new input
      (graph/static_cache.py); `Model.decoder` keeps it.
    * `weights="int8"` (a scale for each column), "int4" (a float16 scale for each column and 32 rows) or "f16"
      compresses the constant matrices of matmuls, and tables of embeddings by rows, in 8 bits for int4 too
      (graph/compressed_tables.py). Sums stay float32; biases and convolutions stay as they are. What it costs is a note
      of the manifest.
    * `database` is a folder of `tune`, whose records for this target pick the tiles of kernels, before presets do; the
      manifest says which.
    * `serve=Serve(context=N)` makes a decoder with a growing past one for packed tokens of many requests over one paged
      cache (graph/paged_decoder.py), which a `Batcher` runs.
    * `dump` is called with ("given", the `onnx_ir.Model` as it was read), ("fused", the one to import), then with (name
      of the pass, module) after each pass.
    * `checks=False` leaves out what runs look at in the tables of serving operators (starts, lengths, pages, blocks):
      no request is refused then, and kernels still touch no memory but their arrays; docs/serving.md has the rules and
      their cost.
    * `precision="float16"` or "bfloat16" computes the matmuls of a model of float32 in that type, and stores their
      weights and a decoder's caches so; norms, softmax and sums stay float32, as do inputs and outputs
      (graph/precision.py). "fast" computes those of a model of float32 or float16 in bfloat16 where every target
      multiplies that faster, and leaves inputs, outputs and caches as they are. "tf32" and "3xtf32" leave the model
      float32, and have the GPU's tensor cores multiply matrices of it, with an error of 2^-11 of each operand, or in
      two parts with about none (schedules/cuda/tensor_types.py). "float32" computes in floats what a model quantizes
      while it runs, such as DynamicQuantizeLSTM (graph/float_activations.py).
    * `calls` are some calls, each arrays by the names of inputs, that show which numbers float16 cannot hold: what
      reads or makes them stays wide.
    * `seed` is that of random operators without an attribute `seed`: a number, by which every call draws the same
      numbers again, or the name of a new input (int64 scalar), from which each call takes its seed
      (graph/random_seed.py).

    What this machine cannot run, code for a GPU or for another CPU, is a model that can be looked at and saved, and
    says why when it is called (ArtifactError).

    Raises ModelError, NodeError (a node that cannot be lowered), TargetError or InputError (an unknown way to hold
    weights, a donate pattern that matches no input, an input without a matching output, or a dimension that no input
    has).
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
    # What is loaded holds its files open, and needs no folder.
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        module = Path(folder) / "module"
        _write(module, model, options, dump)
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
    """Compiles straight into an artifact folder, also for machines that cannot run it.

    Parameters as for `compile`, and sign_key as for `Model.save`. A folder or a key that will not do is refused before
    the model is compiled.
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
    return _write(Path(folder), model, options, dump, sign_key)


def _write(
    folder: Path, model: ModelLike, options: Options, dump: Dump | None, sign_key: SigningKey | None = None
) -> Manifest:
    key = None
    if isinstance(model, (str, os.PathLike)):
        check_model_file(Path(model))  # before anything that takes time is imported
    if isinstance(model, (str, os.PathLike)) and dump is None:  # who looks inside wants to see all that is done
        with progress.stage("looking whether it is known"):
            key = artifact_cache.key(Path(model), options)
            known = None if key is None else artifact_cache.get(key, folder, sign_key)
        if known is not None:
            progress.LOG.info("the same file was compiled before: copied from %s", artifact_cache.folder())
            return known
    with _seldom_collected():
        from . import artifact
        from .compilation import compiled

        done = compiled(model, options, dump=dump)
    with progress.stage("writing"):
        manifest = artifact.write(folder, done.parts, sign_key)
        if key is not None:
            artifact_cache.put(key, folder)
    return manifest


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """While what is made mostly stays: looking through all of it for garbage takes a tenth of a compile."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and 20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
