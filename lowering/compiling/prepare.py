"""Preparation of a model for the importer: fusion, precision, and caches of slots or pages.

It is a transformation of ONNX to ONNX. The order matters: caches are unified before a precision narrows them, and
rewritten after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ..choices import TF32
from ..fusion import fuse
from ..graph.caches.cache_forms import unify_caches
from ..graph.caches.decoder_caches import DecoderCaches, convert_caches
from ..graph.caches.donation import find_donated_pairs
from ..graph.caches.scattered_caches import grow_scattered_caches
from ..graph.caches.setup_split import Setup, split_setup
from ..graph.caches.source_pasts import drop_source_pasts
from ..graph.experts.experts import group_experts
from ..graph.loading.declared_sizes import Dims, set_sizes
from ..graph.loading.list_inputs import SplitInputs, split_list_inputs
from ..graph.loading.model import ModelLike, load_model
from ..graph.loading.written_inputs import name_written_inputs
from ..graph.options.compressed_tables import compress_tables
from ..graph.options.float_activations import use_float_activations
from ..graph.options.precision import use_precision
from ..graph.options.random_seed import add_seed_input
from ..graph.options.weight_schemes import check_schemes
from ..graph.paged.paged_decoder import serve_decoder
from ..graph.paged.served_inputs import find_batch_dimension
from ..manifest import ListSpec, ServedCache
from ..runtime import Model
from ..runtime.arrays.lists import flatten_lists
from ..target import Target
from . import progress
from .options import CompileOptions
from .overflow import Call, find_overflowing_values
from .pipeline import Dump

CompileModel = Callable[[ir.Model, CompileOptions], Model]
"""Compiles a model, and loads it."""


@dataclass(frozen=True)
class PreparedModel:
    """A model ready to be imported.

    lists are the inputs that are lists of tensors, and dims the declared facts about dimensions. setup is the model
    that runs once per sequence. donated maps an input to the output that takes over its memory. notes are for the
    reader of the manifest.
    """

    model: ir.Model
    lists: tuple[ListSpec, ...]
    dims: Dims
    setup: Setup | None
    donated: dict[str, str]
    caches: DecoderCaches
    served: ServedCache | None
    notes: tuple[str, ...]


def prepare_model(
    model: ModelLike, options: CompileOptions, targets: Sequence[Target], dump: Dump | None, compile_model: CompileModel
) -> PreparedModel:
    """Rewrite a model as the options of `compile` say; the original model is unchanged.

    `compile_model` compiles a copy that observes the calls of the options.
    """
    split = _load(model, options)
    loaded = split.model
    written = name_written_inputs(loaded)
    if dump is not None:
        dump("given", loaded)
    donated = find_donated_pairs(loaded.graph, options.donate) | written
    with progress.stage("fusing"):
        fused = fuse(loaded)
    fused = fused.clone() if fused is loaded else fused
    if options.serve is not None:
        grow_scattered_caches(fused)
    if options.serve is not None or options.static_cache is not None:
        drop_source_pasts(fused)
        unify_caches(fused)
    names = [value.name or "" for value in loaded.graph.inputs if value.name not in loaded.graph.initializers]
    calls = [flatten_lists(call, names, split.lists, "input") for call in options.calls]
    notes = _narrow(fused, options, targets, calls, compile_model)
    served = setup = None
    if options.serve is not None:
        decoder = serve_decoder(fused, options.serve)
        donated = decoder.donated  # the pools, which replace all caches and states
        served, setup = decoder.cache, decoder.setup
    caches = convert_caches(fused, options.static_cache, donated)
    group_experts(fused)
    if isinstance(options.seed, str):
        add_seed_input(fused, options.seed)
    if options.static_cache is not None and caches.decoder is not None:
        setup_model = split_setup(fused, caches.changing_inputs | donated.keys())
        setup = None if setup_model is None else Setup(setup_model)
    if dump is not None:
        dump("fused", fused)
        if setup is not None:
            dump("setup", setup.model)
    lists, dims = split.lists, split.dims
    return PreparedModel(fused, lists, dims, setup, donated | caches.donated, caches, served, tuple(notes))


def _load(model: ModelLike, options: CompileOptions) -> SplitInputs:
    with progress.stage("reading the model"):
        split = split_list_inputs(load_model(model), options.dims or {})
    batch = None if options.serve is None else find_batch_dimension(split.model, options.serve)
    return split if batch is None else replace(split, model=set_sizes(split.model, {batch: 1}))


def _narrow(
    fused: ir.Model,
    options: CompileOptions,
    targets: Sequence[Target],
    calls: Sequence[Call],
    compile_model: CompileModel,
) -> list[str]:
    """Narrow types of computation and storage, and return notes about it; calls are those of the options."""
    notes: list[str | None] = []
    if options.precision == "float32":
        notes.append(use_float_activations(fused))
    elif options.precision is not None and options.precision not in TF32:
        linker = options.cc if options.target == "cpu" else None  # calls run here
        slower = set.intersection(*(set(target.slower_than_bfloat16) for target in targets))
        here = CompileOptions(cc=linker)
        overflows = find_overflowing_values(fused, calls, lambda copy: compile_model(copy, here)) if calls else ()
        notes.append(use_precision(fused, options.precision, slower, overflows))
    check_schemes(fused, options.schemes)
    notes += compress_tables(fused, options.schemes)
    return [note for note in notes if note]
