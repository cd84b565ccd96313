"""`compile`: the whole way from an ONNX model to a module that runs."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tvm import tirx

from ..errors import InputError
from ..fusion import fuse
from ..graph.compressed_tables import compress_tables
from ..graph.declared_sizes import Dims, ranges, with_sizes
from ..graph.donation import donated_pairs
from ..graph.model import ModelLike, load_model
from ..graph.paged_decoder import batch_of, serve_decoder
from ..graph.precision import TF32, Precision, use_precision
from ..graph.serve import Serve
from ..graph.static_cache import LENGTH, use_static_caches
from ..graph.written_inputs import name_written_inputs
from ..importing.imported import Port
from ..importing.importer import import_model
from ..importing.quantised import Scheme
from ..importing.values import storage_dtype
from ..manifest import Manifest, SlotCaches, TensorSpec
from ..profiling.expected import warnings
from ..runtime.folders import check_replaceable
from ..runtime.signature import SigningKey, private_key
from ..target import Target, resolve
from ..tuning.lookup import Records
from ..version import VERSION
from . import artifact, progress
from .build import build, check_linker
from .interrupts import interrupts_kept
from .objects import Kernels
from .options import Options
from .overflow import Call, overflowing
from .pipeline import Dump, lower

if TYPE_CHECKING:
    from ..runtime import Model


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
) -> Model:
    """Compiles an ONNX model ahead of time; the result runs at once and can be saved.

    * `model` is a path, bytes, an `onnx.ModelProto` or an `onnx_ir.Model`; files with external data are read lazily.
    * `target` is `cpu` for this machine, or `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64` for others, or `cuda:` and
      a list of architectures of GPUs, such as `cuda:sm_80,sm_90a`, or `cuda` for the GPU here.
    * `donate` holds regular expressions that match whole names of inputs to be consumed: the matching output takes over
      their memory.
    * `threads` is the default number of workers, at most 1024; None means the CPUs the calling thread may use.
    * `cc` names the compiler that links.
    * `dims` says what is known of symbolic dimensions: `{"batch": 1}` makes one a number, at which sizes and branches
      (If) that it decides are computed now, and `{"tokens": (1, 512)}` bounds one, which calls then check.
    * `static_cache=N` makes a decoder's growing past a cache of N slots, written in place, whose length is a new input
      (graph/static_cache.py); `Model.decoder` keeps it.
    * `weights="int8"` (a scale for each column), "int4" (a float16 scale for each column and 32 rows) or "f16"
      compresses the constant matrices of products, and tables of embeddings by rows, in 8 bits for int4 too
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
    * `precision="float16"` or "bfloat16" computes the products of a model of float32 in that type, and stores their
      weights and a decoder's caches so; norms, softmax and sums stay float32, as do inputs and outputs
      (graph/precision.py). "fast" computes those of a model of float32 or float16 in bfloat16 where every target
      multiplies that faster, and leaves inputs, outputs and caches as they are. "tf32" and "3xtf32" leave the model
      float32, and have the GPU's tensor cores multiply matrices of it, with an error of 2^-11 of each operand, or in
      two parts with about none (schedules/cuda/tensor_types.py).
    * `calls` are some calls, each arrays by the names of inputs, that show which numbers float16 cannot hold: what
      reads or makes them stays wide.

    What this machine cannot run, code for a GPU or for another CPU, is a model that can be looked at and saved, and
    says why when it is called (ArtifactError).

    Raises ModelError, NodeError (a node that cannot be lowered), TargetError or InputError (an unknown way to hold
    weights, a donate pattern that matches no input, an input without a matching output, or a dimension that no input
    has).
    """
    from ..runtime import open_compiled

    options = Options(
        target, donate, threads, cc, dims, static_cache, weights, database, serve, checks, precision, calls
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
) -> Manifest:
    """Compiles straight into an artifact folder, also for machines that cannot run it.

    Parameters as for `compile`, and sign_key as for `Model.save`. A folder or a key that will not do is refused before
    the model is compiled.
    """
    check_replaceable(Path(os.path.realpath(folder)))
    if sign_key is not None:
        sign_key = private_key(sign_key)
    options = Options(
        target, donate, threads, cc, dims, static_cache, weights, database, serve, checks, precision, calls
    )
    return _write(Path(folder), model, options, dump, sign_key)


def _write(
    folder: Path, model: ModelLike, options: Options, dump: Dump | None, sign_key: SigningKey | None = None
) -> Manifest:
    done = compiled(model, options, dump=dump)
    with progress.stage("writing"):
        return artifact.write(folder, done.libraries, done.manifest, done.weights, sign_key)


@dataclass(frozen=True)
class Compiled:
    """What an artifact is made of, and what a tuner needs to know: the targets that the libraries are for, and by
    target the functions that were scheduled as they were before, by the name of the kernel.
    """

    manifest: Manifest
    libraries: tuple[bytes, ...]
    weights: dict[str, np.ndarray]
    targets: tuple[Target, ...]
    unscheduled: tuple[dict[str, tirx.PrimFunc], ...]


@interrupts_kept()
def compiled(model: ModelLike, options: Options, stand_in: Target | None = None, dump: Dump | None = None) -> Compiled:
    """The way itself. stand_in is a CPU that runs the functions of a GPU in its place, by kernels of its own; dump is
    as for `compile`."""
    dims = options.dims or {}
    targets = resolve(options.target, options.cc)
    for each in targets:
        check_linker(each)
    products = options.precision if options.precision in TF32 else None
    if products is not None and not all(target.architecture for target in targets):
        raise InputError(
            f"precision='{products}' is how tensor cores of GPUs multiply float32, and target='{options.target}' has "
            "none. Leave it out: a CPU computes such products in float32."
        )
    with progress.stage("reading the model"):
        loaded = with_sizes(load_model(model), dims)
    if options.serve is not None and (batch := batch_of(loaded, options.serve)) is not None:
        loaded = with_sizes(loaded, {batch: 1})
    written = name_written_inputs(loaded)
    if dump is not None:
        dump("given", loaded)
    donated = donated_pairs(loaded.graph, options.donate) | written
    notes: list[str] = []
    with progress.stage("fusing"):
        fused = fuse(loaded)
    if options.precision is not None and products is None:
        fused = fused.clone() if fused is loaded else fused
        linker = options.cc if options.target == "cpu" else None  # calls run here
        slower = set.intersection(*(set(target.slower_than_bfloat16) for target in targets))
        beyond = overflowing(fused, options.calls, functools.partial(compile, cc=linker)) if options.calls else ()
        notes.append(use_precision(fused, options.precision, slower, beyond))
    if options.weights is not None:
        fused = fused.clone() if fused is loaded else fused
        notes += filter(None, [compress_tables(fused, options.weights)])
    slots = served = None
    if options.serve is not None:
        fused = fused.clone() if fused is loaded else fused
        decoder = serve_decoder(fused, options.serve)
        donated |= decoder.donated
        served = decoder.cache
    if options.static_cache is not None:
        fused = fused.clone() if fused is loaded else fused
        static = use_static_caches(fused, options.static_cache)
        donated |= static.caches
        slots = SlotCaches(options.static_cache, LENGTH, static.tokens)
    if dump is not None:
        dump("fused", fused)
    legal = ranges(dims, fused)
    # What a GPU has in its memory the host does not read.
    checks = options.checks and not any(target.architecture for target in targets)
    with progress.stage("importing"):
        imported = import_model(fused, () if slots is None else (LENGTH,), checks)
    inputs, outputs = [p.name for p in imported.inputs], [p.name for p in imported.outputs]
    pairs = {inputs.index(i): outputs.index(o) for i, o in donated.items()}
    notes += imported.warnings
    libraries, unscheduled = [], []
    for each in targets:
        choose = Records(None if options.database is None else Path(options.database), each).choose
        runs_on = stand_in or each
        kernels = Kernels(runs_on)
        known = kernels if dump is None else None  # who looks inside wants to see all that is scheduled
        with progress.stage("lowering"):
            lowered = lower(imported, each, pairs, notes, dump, options.weights, choose, runs_on, products, known)
        libraries.append(build(lowered.module, runs_on, kernels))
        unscheduled.append(lowered.unscheduled)
        if not each.architecture:
            notes += warnings(lowered.kernels, lowered.calls)
    manifest = Manifest(
        inputs=tuple(_spec(p) for p in imported.inputs),
        outputs=tuple(_spec(p) for p in imported.outputs),
        donated=donated,
        weights=(),
        target=options.target,
        cpu_features=targets[0].cpu_features,
        architectures=tuple(each.architecture for each in targets if each.architecture and stand_in is None),
        threads=options.threads,
        ranges=legal,
        strings=tuple(imported.strings),
        versions={"onnx-lowering": VERSION} | {n: version(n) for n in ("apache-tvm", "apache-tvm-ffi", "onnx")},
        notes=tuple(dict.fromkeys(notes)),
        kernels=lowered.kernels,
        calls=lowered.calls,
        slots=slots,
        served=served,
        scheme=options.weights,
        precision=options.precision,
    )
    return Compiled(manifest, tuple(libraries), lowered.weights, targets, tuple(unscheduled))


def _spec(port: Port) -> TensorSpec:
    return TensorSpec(port.name, port.dtype, storage_dtype(port.dtype), port.dims)
