"""The manifest: inputs, outputs and requirements of a compiled module, as plain data (JSON on disk).

`lowering.compiling.artifact` writes it, and `lowering.runtime` reads it. It has everything that the runtime checks
before a call, so that loading needs no compiler.
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

FORMAT = 11
FILE, CODE, WEIGHTS, HEADER, HOST = "manifest.json", "model.so", "weights.bin", "model.h", "host.hpp"
MODEL, SETUP = "model", "setup"  # prefixes of an artifact's code files
SIGNATURE = "manifest.sig"
OBJECT, WEIGHTS_SOURCE = "model.o", "weights.S"  # of static objects
LOADER = ("lowering.c", "lowering.h", "library.h", "call.h", "types.h")  # of libraries for C
SYMBOL = "__tvm_ffi_"  # prefix of function names in a library

MAX_THREADS = 1024
"""The largest number of threads of a call."""

BLOCK = 2**20
"""Bytes of a block of weights.bin, which has a digest of its own."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    `dtype` is the user's name of the type (`float32`, `bfloat16`, `int4`, `complex64`, `string`). `storage` is the type
    in compiled code (docs/architecture/importing.md). Each entry of `dims` is a size, or the name of a symbolic
    dimension shared with other tensors. For outputs it may be an expression of such names for the reader.
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
    """An input or output of the model's signature: a tensor, a list of tensors, or None."""

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
    argument_list: list[Argument] = []
    end = 0
    for spec in lists:
        argument_list += [Argument(t.name, (t,), "tensor") for t in tensors[end : spec.first]]
        end = spec.first + (spec.count or 0)
        argument_list.append(
            Argument(spec.name, tuple(tensors[spec.first : end]), "none" if spec.count is None else "list")
        )
    return [*argument_list, *(Argument(t.name, (t,), "tensor") for t in tensors[end:])]


@dataclass(frozen=True)
class WeightSpec:
    """A weight and its position in weights.bin; offset is a multiple of 64 bytes."""

    name: str
    storage: str
    dims: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SlotCaches:
    """Caches of static capacity, of which the first rows are valid.

    `length` is the name of the input (int64 []) with the number of valid rows. `tokens` is an input and its axis whose
    size is the number of rows that a call adds; None where no input has it.

    `rings` maps inputs that store only the newest tokens to their number of slots: token t is in slot t % count. `rows`
    is the largest number of rows that a call may add with rings, None without rings.
    """

    capacity: int
    length: str
    tokens: tuple[str, int] | None
    rings: dict[str, int]
    rows: int | None


@dataclass(frozen=True)
class DecoderSpec:
    """The state of `Model.decoder()` between calls, and the inputs that it fills.

    `capacity` is the largest number of tokens of a sequence. `ids`, `mask` and `positions` name inputs, "" where there
    is none. `per_token` names further inputs [B, S] or [B, S, H] with a value for each token, like ids. `states` maps
    each input that is a state of static size to the output with its next value. `starts` and `ends` are for models that
    write their caches with TensorScatter, and "" for others. `starts` names the input, int [B], of the slots that new
    rows go to, and `ends` that of the slots that are valid from then on. `most` is the largest number of tokens of a
    call, None for any.
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
    """A compiled function, for profiling.

    `kind` is "attention", "matmul" or "other". `schedule` is the rule that generated the code (schedules/cpu), "plain"
    for none, "loops" for a tuned schedule (docs/tuning.md). `arguments` are the dims of each tensor argument and the
    name of each scalar argument. `flops` and `bytes` are arithmetic of these names in Python's syntax: floating-point
    operations, and bytes of the arguments that are needed; `volume` is all bytes of the arguments. Those of an
    attention also use `pairs` and `unseen`: the pairs of queries and keys that see each other, and the keys that no
    query sees. The library's function `counter` computes both from the arguments. `rate` is the expected share of the
    machine's peak arithmetic for code of this rule (profiling/expected.py). `source` names the database of the kernel's
    tiles, and their speedup over the defaults there; "" for defaults.
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
"""Input of decoders with a setup, int64 [B]: the number of valid keys [B, H, E, D] of each source."""

SOURCE_TABLE, SOURCE_CACHE, SOURCE_SCALE = "source_table", "source_cache", "source_cache_scale"
"""Inputs of served decoders with sources, and of their setup."""


@dataclass(frozen=True)
class CachePool:
    """Keys and values of the layers with this number and size of heads.

    `name` is the input [blocks, layers, 2, kv_heads, tokens_per_block, head_dim], and `scale` the input of its scales,
    "" where it has none.
    """

    name: str
    scale: str
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class StatePool:
    """States of the layers with this state shape and type: `name` is the input [slots, layers, *shape]."""

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SourceCache:
    """The cached keys and values of sources, such as an encoder's output, in a served decoder.

    `pools` are like those of ServedCache, with a block table of their own. The setup writes them, once per request.
    `rows` is an input of the setup and its axis over the rows of a source; each row is one token of the pools.
    """

    pools: tuple[CachePool, ...]
    rows: tuple[str, int]


@dataclass(frozen=True)
class ServedCache:
    """The cached data of requests in a decoder that was compiled with `serve`.

    `pools` are the pools of the paged cache, of one dtype; a block has the same tokens in each pool. They are ()
    without a cache. If `scales` is not 0 a pool has this number of float32 scales in place of head_dim. `states` are
    pools of states; a slot has those of one request in each pool. A request has at most `context` tokens. `ids` is the
    input of the packed tokens [1, N] or [1, N, H], and `per_token` names further ones. `fixed` names inputs that are
    the same for all requests and all calls. `vocabularies` has the number of rows of the table that an input of ids
    indexes. `sources` is None for a decoder whose requests consist of tokens only.
    """

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
    """A call of a kernel: the kernel's name, and the ONNX nodes that it computes, as far as they can be traced."""

    kernel: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The complete description of an artifact.

    `donated` maps the name of a consumed input to the output that reuses its memory. `cpu_features` are Linux
    /proc/cpuinfo names that the machine must have. `ranges` has the smallest and largest legal size of symbolic
    dimensions by name. Any size is legal for dimensions without an entry. Where both are equal `compile` made the
    dimension static, and it is a number in all dims. `derived` has the symbolic dimensions of inputs that the model's
    nodes require to be sums of other ones: the factor of each by its name, and by "" the constant term. `strings` is
    the dictionary of a model's string constants; value k stands for strings[k]. `hashes` are SHA-256 of every file by
    name, and `digest` for the manifest itself. `weights_blocks` are those of the blocks of weights.bin, by which a load
    finds damaged blocks (`compute_block_digests`). `architectures` are those of the GPUs that it was built for, () for
    CPUs. `threads` is the default worker count, None for the caller's affinity. `scheme` and `precision` are the
    `weights` and the `precision` of the compilation. `accuracy_level` is 4 if matmuls quantize their rows to int8, else
    0. `input_lists` and `output_lists` are the inputs and outputs that
    are lists of tensors, or None.

    `setup` is the part of a decoder that runs once per sequence (graph/caches/setup_split.py). Its outputs that are
    inputs here, by name, are the same in every call. With `serve` it writes the pools of sources. It is in the same
    folder, whose hashes are here; its code files have the name of its `part`.
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
    slots: SlotCaches | None = None  # with static_cache: then `donated` has the caches
    decoder: DecoderSpec | None = None
    served: ServedCache | None = None  # with serve, likewise
    scheme: str | None = None
    precision: str | None = None
    accuracy_level: int = 0
    input_lists: tuple[ListSpec, ...] = ()
    output_lists: tuple[ListSpec, ...] = ()
    part: str = MODEL
    setup: Manifest | None = None
    format: int = FORMAT

    def code(self) -> dict[str, str]:
        """Return the code files by architecture, which is "" on CPUs."""
        if len(self.architectures) < 2:
            return dict.fromkeys(self.architectures or ("",), f"{self.part}.so")
        return {a: f"{self.part}.{a}.so" for a in self.architectures}

    def parts(self) -> tuple[Manifest, ...]:
        """Return the manifest itself, and that of the setup."""
        return (self,) if self.setup is None else (self, self.setup)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def digest(self) -> str:
        """Return SHA-256 of the manifest without its own digest."""
        other_hashes = {name: h for name, h in self.hashes.items() if name != FILE}
        return hashlib.sha256(dataclasses.replace(self, hashes=other_hashes).to_json().encode()).hexdigest()

    @staticmethod
    def from_dict(data: Any) -> Manifest:
        """Return the manifest of JSON data.

        Raises:
            ValueError: The data has another form.
        """
        return decode(Manifest, data, "manifest")


def digest(data: bytes | memoryview) -> str:
    """Return SHA-256 of the data."""
    return hashlib.sha256(data).hexdigest()


def compute_block_digests(
    size: int, read: Callable[[int, int], bytes | memoryview], blocks: Iterable[int]
) -> Iterator[str]:
    """Yield digests of some blocks of weights.bin, of BLOCK bytes each but the last.

    read(position, count) returns bytes.
    """

    def hash_block(block: int) -> str:
        content = read(block * BLOCK, min(BLOCK, size - block * BLOCK))
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(hash_block, blocks)
