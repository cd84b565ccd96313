"""The manifest: what a compiled module takes, gives and needs, as plain data (JSON on disk).

Written by `lowering.compiling.artifact`, read by `lowering.runtime`. Everything the runtime checks before a call is in
here, so that loading needs no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from .records import decode

FORMAT = 10
FILE, CODE, WEIGHTS, HEADER, HOST = "manifest.json", "model.so", "weights.bin", "model.h", "host.hpp"
MODEL, SETUP = "model", "setup"  # of an artifact: what its files of code begin with
SIGNATURE = "manifest.sig"
SYMBOL = "__tvm_ffi_"  # in front of the names of functions in a library

MOST_THREADS = 1024
"""The largest number of threads that a call may be given."""

BLOCK = 2**20
"""Bytes of weights.bin that have a digest of their own."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    dtype is the name users see (`float32`, `bfloat16`, `int4`, `complex64`, `string`); storage is the type the
    compiled code sees (docs/architecture.md, Element types). Each entry of dims is a size, or the name of a symbolic
    dimension shared with other tensors, or, for outputs, an expression of such names for the reader.
    """

    name: str
    dtype: str
    storage: str
    dims: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class ListSpec:
    """An input or output that is a list of tensors, or None.

    The list is `count` tensors of the manifest's inputs (or outputs) from index `first` on. A count of None says that
    the value is None in every call.
    """

    name: str
    first: int
    count: int | None

    def __str__(self) -> str:
        return f"{self.name}: {'None' if self.count is None else f'list of {self.count}'}"


@dataclass(frozen=True)
class Argument:
    """An input or output as a caller sees it: a tensor, a list of tensors, or None."""

    name: str
    tensors: tuple[TensorSpec, ...]
    kind: Literal["tensor", "list", "none"]

    def __str__(self) -> str:
        if self.kind == "tensor":
            return str(self.tensors[0])
        if self.kind == "none":
            return f"{self.name}: None"
        return f"{self.name}: list of {len(self.tensors)} ({', '.join(map(str, self.tensors))})"


def arguments(tensors: Sequence[TensorSpec], lists: Sequence[ListSpec]) -> list[Argument]:
    """Return the inputs or outputs of a manifest in the order of the model, each list once."""
    found: list[Argument] = []
    end = 0
    for spec in lists:
        found += [Argument(t.name, (t,), "tensor") for t in tensors[end : spec.first]]
        end = spec.first + (spec.count or 0)
        found.append(Argument(spec.name, tuple(tensors[spec.first : end]), "none" if spec.count is None else "list"))
    return [*found, *(Argument(t.name, (t,), "tensor") for t in tensors[end:])]


@dataclass(frozen=True)
class WeightSpec:
    """One weight: its place in weights.bin.

    offset is a multiple of 64 bytes.
    """

    name: str
    storage: str
    dims: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SlotCaches:
    """Caches of a fixed capacity, of which the first rows hold something.

    length is the name of the input (int64 []) that says how many. tokens is an input and its axis whose size is the
    number of rows that a call adds; None where no input has it.

    rings are inputs that hold the newest tokens alone, and how many: token t is in slot t % count. rows is the largest
    number of rows that a call may add then, None without rings.
    """

    capacity: int
    length: str
    tokens: tuple[str, int] | None
    rings: dict[str, int]
    rows: int | None


@dataclass(frozen=True)
class DecoderSpec:
    """What `Model.decoder()` keeps between the calls of a model, and which inputs it fills.

    capacity is the largest number of tokens of a sequence. ids, mask and positions name inputs, "" where there is none.
    per_token names further inputs [B, S] or [B, S, H] that have a value for each token, as ids has.
    states maps each input that holds a state of a fixed size to the output that is its next value. starts names the
    input, int [B], of the slots that new rows go to, and ends that of the slots that count from then on, for models
    that write their caches with TensorScatter; both are "" for others. most is the largest number of tokens of a call,
    None for any.
    """

    capacity: int
    ids: str
    mask: str
    positions: str
    per_token: tuple[str, ...]
    states: dict[str, str]
    starts: str
    ends: str
    most: int | None


@dataclass(frozen=True)
class KernelSpec:
    """One compiled function, for those who measure it.

    kind is "attention", "matmul" or "other"; schedule is the rule that made the code (schedules/cpu), "plain" for none,
    "loops" for a schedule that was tuned (docs/tuning.md). arguments are the dims of each tensor and the name of each
    scalar that it takes. flops and bytes are arithmetic of these names in Python's syntax: floating-point operations,
    and bytes of the arguments that are needed; `volume` is all bytes of the arguments. Those of an attention also use
    `pairs` and `unseen`: the pairs of queries and keys that see each other, and the keys that no query sees. The
    library's function `counter` finds both from the arguments.
    rate is the share of the machine's arithmetic that code of this rule is expected to reach (profiling/expected.py).
    source says which database the kernel's tiles are from, and how many times faster than the defaults they were there;
    "" for defaults.
    """

    name: str
    kind: str
    schedule: str
    arguments: tuple[tuple[str, ...] | str, ...]
    flops: str
    bytes: str
    rate: float
    counter: str | None = None
    source: str = ""


ROW_STARTS, PAST_LENGTHS, BLOCK_TABLE = "row_starts", "past_lengths", "block_table"
STATE_SLOTS = "state_slots"
CACHE, SCALE, STATES = "kv_cache", "kv_cache_scale", "states"
"""Inputs of served decoders."""

SOURCE_LENGTHS = "source_lengths"
"""Input of decoders with a setup, int64 [B]: how many of the keys [B, H, E, D] of each source count."""

SOURCE_TABLE, SOURCE_CACHE, SOURCE_SCALE = "source_table", "source_cache", "source_cache_scale"
"""Inputs of served decoders with sources, and of their setup."""


@dataclass(frozen=True)
class CachePool:
    """Keys and values of the layers with so many heads of that size: the input name [blocks, layers, 2, kv_heads,
    tokens_per_block, head_dim], and the input of its scales, "" where it has none."""

    name: str
    scale: str
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class StatePool:
    """States of the layers that have one of that shape and type: the input name [slots, layers, *shape]."""

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SourceCache:
    """Where a served decoder keeps the keys and values of sources, such as an encoder's output.

    pools are like those of ServedCache, with a block table of their own. The setup writes them, once per request. rows
    is an input of the setup and its axis that is over the rows of a source: one token of the pools each."""

    pools: tuple[CachePool, ...]
    rows: tuple[str, int]


@dataclass(frozen=True)
class ServedCache:
    """What a decoder that was compiled with `serve` keeps of its requests.

    pools are those of its paged cache, of one dtype, of which a block has the same tokens in each; () where it has
    none. If scales is not 0 a pool has so many float32 scales in place of head_dim. states are pools of states, of
    which a slot has those of one request in each. A request has at most `context` tokens; `ids` is the input of the
    packed tokens [1, N] or [1, N, H], and per_token names further ones. fixed names inputs that are the same for all
    requests and all calls. vocabularies has the number of rows of the table that an input of ids picks rows of. sources
    is None for a decoder whose requests are tokens alone."""

    context: int
    tokens_per_block: int
    pools: tuple[CachePool, ...]
    dtype: str
    scales: int
    ids: str
    states: tuple[StatePool, ...] = ()
    sources: SourceCache | None = None
    per_token: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    vocabularies: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CallSpec:
    """A call of a kernel: the kernel's name, and which ONNX nodes it computes, as far as that is known."""

    kernel: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """All there is to know about an artifact.

    donated maps the name of a consumed input to the output that takes over its memory. cpu_features are Linux
    /proc/cpuinfo names that the machine must have. ranges gives the smallest and largest legal size of symbolic
    dimensions by name; any size is legal for those it does not mention, and where both are equal the dimension was
    fixed by `compile` and is a number in all dims. derived has the symbolic dimensions of inputs that the model's nodes
    require to be sums of others: the factor of each by its name, and by "" what is added. strings is the dictionary of
    a model's string constants; code k is strings[k]. hashes are SHA-256 of every file by name, and `digest` for the
    manifest itself; weights_blocks are those of the blocks of weights.bin, by which a load finds what is damaged
    (`block_digests`). architectures are those of the GPUs that it was built for, () for CPUs. threads is the default
    worker count, None for the caller's affinity. scheme and precision are the `weights` and the `precision` that it was
    compiled with. input_lists and output_lists say which inputs and outputs are lists of tensors, or None.

    setup is the part of a decoder that runs once per sequence (graph/setup_part.py): those of its outputs that are
    inputs here, by name, are the same in every call. With `serve` it writes the pools of sources. It lies in the same
    folder, whose hashes are here; its files of code have the name of its `part`.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    donated: dict[str, str]
    weights: tuple[WeightSpec, ...]
    target: str
    cpu_features: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    threads: int | None = None
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    derived: dict[str, dict[str, int]] = field(default_factory=dict)
    strings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    weights_blocks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelSpec, ...] = ()
    calls: tuple[CallSpec, ...] = ()  # in the order of execution
    slots: SlotCaches | None = None  # with static_cache: then `donated` holds the caches
    decoder: DecoderSpec | None = None
    served: ServedCache | None = None  # with serve, likewise
    scheme: str | None = None
    precision: str | None = None
    input_lists: tuple[ListSpec, ...] = ()
    output_lists: tuple[ListSpec, ...] = ()
    part: str = MODEL
    setup: Manifest | None = None
    format: int = FORMAT

    def code(self) -> dict[str, str]:
        """The files of code by architecture, which is "" on CPUs."""
        if len(self.architectures) < 2:
            return dict.fromkeys(self.architectures or ("",), f"{self.part}.so")
        return {a: f"{self.part}.{a}.so" for a in self.architectures}

    def parts(self) -> tuple[Manifest, ...]:
        """The manifest itself, and that of the setup."""
        return (self,) if self.setup is None else (self, self.setup)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def digest(self) -> str:
        """SHA-256 of the manifest without its own digest."""
        others = {name: h for name, h in self.hashes.items() if name != FILE}
        return hashlib.sha256(dataclasses.replace(self, hashes=others).to_json().encode()).hexdigest()

    @staticmethod
    def from_dict(data: Any) -> Manifest:
        """The manifest held in `data`, as JSON gives it; raises ValueError for data of any other form."""
        return decode(Manifest, data, "manifest")


def digest(data: bytes | memoryview) -> str:
    """SHA-256."""
    return hashlib.sha256(data).hexdigest()


def block_digests(size: int, read: Callable[[int, int], bytes | memoryview], blocks: Iterable[int]) -> Iterator[str]:
    """Digests of some blocks of weights.bin, of BLOCK bytes each but the last. read(position, count) gives bytes."""

    def of_one(block: int) -> str:
        content = read(block * BLOCK, min(BLOCK, size - block * BLOCK))
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(of_one, blocks)
