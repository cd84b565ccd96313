"""A model as the importer takes it: fused, in the precision that was asked for, with caches of slots or pages.

ONNX in, ONNX out. The order matters: caches are brought to one form before a precision narrows them, and rewritten
after.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ..choices import TF32
from ..fusion import fuse
from ..graph.cache_forms import unify_caches
from ..graph.compressed_tables import compress_tables
from ..graph.declared_sizes import Dims, with_sizes
from ..graph.donation import donated_pairs
from ..graph.experts import group_experts
from ..graph.float_activations import keep_floats
from ..graph.kept_caches import KeptCaches, keep_caches
from ..graph.list_inputs import SplitInputs, split_list_inputs
from ..graph.model import ModelLike, load_model
from ..graph.paged_decoder import serve_decoder
from ..graph.precision import use_precision
from ..graph.random_seed import add_seed_input
from ..graph.scattered_caches import grow_scattered_caches
from ..graph.served_inputs import batch_of
from ..graph.setup_part import Setup, split_setup
from ..graph.source_pasts import drop_source_pasts
from ..graph.written_inputs import name_written_inputs
from ..manifest import ListSpec, ServedCache
from ..runtime.lists import flatten_lists
from ..target import Target
from . import progress
from .compiler import compile
from .options import Options
from .overflow import Call, overflowing
from .pipeline import Dump


@dataclass(frozen=True)
class PreparedModel:
    """donated: output by input whose memory it takes over. notes are for the reader of the manifest. setup is what
    runs once per sequence. lists are the inputs that are lists of tensors, and dims is what was said of dimensions."""

    model: ir.Model
    lists: tuple[ListSpec, ...]
    dims: Dims
    setup: Setup | None
    donated: dict[str, str]
    kept: KeptCaches
    served: ServedCache | None
    notes: tuple[str, ...]


def prepare_model(model: ModelLike, options: Options, targets: Sequence[Target], dump: Dump | None) -> PreparedModel:
    """Rewrite a model for what `compile` was asked for; the model that was given stays as it is."""
    split = _load(model, options)
    loaded = split.model
    written = name_written_inputs(loaded)
    if dump is not None:
        dump("given", loaded)
    donated = donated_pairs(loaded.graph, options.donate) | written
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
    notes = _narrow(fused, options, targets, calls)
    served = setup = None
    if options.serve is not None:
        decoder = serve_decoder(fused, options.serve)
        donated = decoder.donated  # of pools, which have taken the place of all caches and states
        served, setup = decoder.cache, decoder.setup
    kept = keep_caches(fused, options.static_cache, donated)
    group_experts(fused)
    if isinstance(options.seed, str):
        add_seed_input(fused, options.seed)
    if options.static_cache is not None and kept.decoder is not None:
        once = split_setup(fused, kept.called | donated.keys())
        setup = None if once is None else Setup(once)
    if dump is not None:
        dump("fused", fused)
        if setup is not None:
            dump("setup", setup.model)
    lists, dims = split.lists, split.dims
    return PreparedModel(fused, lists, dims, setup, donated | kept.donated, kept, served, tuple(notes))


def _load(model: ModelLike, options: Options) -> SplitInputs:
    with progress.stage("reading the model"):
        split = split_list_inputs(load_model(model), options.dims or {})
    batch = None if options.serve is None else batch_of(split.model, options.serve)
    return split if batch is None else replace(split, model=with_sizes(split.model, {batch: 1}))


def _narrow(fused: ir.Model, options: Options, targets: Sequence[Target], calls: Sequence[Call]) -> list[str]:
    """Narrow what is computed and stored, and return what there is to say of it. calls are those of the options."""
    notes: list[str | None] = []
    if options.precision == "float32":
        notes.append(keep_floats(fused))
    elif options.precision is not None and options.precision not in TF32:
        linker = options.cc if options.target == "cpu" else None  # calls run here
        slower = set.intersection(*(set(target.slower_than_bfloat16) for target in targets))
        beyond = overflowing(fused, calls, functools.partial(compile, cc=linker)) if calls else ()
        notes.append(use_precision(fused, options.precision, slower, beyond))
    if options.weights is not None:
        notes.append(compress_tables(fused, options.weights))
    return [note for note in notes if note]
