"""The options of the compiler, validated in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..choices import BITS, INT8_ROWS, PRECISIONS, SCHEMES, Precision, Scheme, Schemes
from ..errors import InputError
from ..runtime.artifact.checks import check_integer, check_threads

if TYPE_CHECKING:
    from ..graph.loading.declared_sizes import Dims
    from ..graph.paged.serve import Serve
    from .overflow import Call


class KernelArguments(TypedDict, total=False):
    """The fields of CompileOptions that determine a model's kernels, as keyword arguments."""

    donate: Sequence[str]
    dims: Dims | None
    static_cache: int | None
    weights: Scheme | Schemes | None
    accuracy_level: int | None
    precision: Precision | None


class CompileArguments(KernelArguments, total=False):
    """The fields of CompileOptions but target and seed, as keyword arguments."""

    threads: int | None
    cc: str | None
    database: str | Path | None
    serve: Serve | None
    checks: bool
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a model is compiled: the keyword arguments of `compile`.

    Checks that depend on the model or the target are made where a value is used.

    Attributes:
        target: `cpu` for this machine, or `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64` for others, with additional
            features after the name (`cpu:x86-64-v4+avx512vnni`, `cpu:aarch64+dotprod`). `cpu:riscv64` is for static
            objects. Or `cuda:` and a list of GPU
            architectures, such as `cuda:sm_80,sm_90a`, or `cuda` for the GPU of this machine.
        donate: Regular expressions that match whole names of inputs to be consumed: the matching output takes over
            their memory. Of the inputs that `serve` replaces only its pools are donated, always.
        threads: The default number of workers, at most 1024; None means the CPUs the calling thread may use.
        cc: The compiler that links.
        dims: Facts about symbolic dimensions. `{"batch": 1}` makes one a number; sizes and branches (If) that it
            decides are computed at compile time. `{"tokens": (1, 512)}` bounds one, which calls then check. For an
            input that is a sequence it is the number of tensors, `{"frames": 3}`. For an optional input it is 0 if
            the input is None, 1 if it has an element (graph/loading/list_inputs.py).
        static_cache: `static_cache=N` turns a decoder's growing past into a cache of N slots, written in place, whose
            length is a new input (graph/caches/static_cache.py); `Model.decoder` manages it.
        weights: "int8" (a scale for each column), "int4" (a float16 scale for each column and 32 rows) or "f16"
            compresses the constant matrices of matmuls. It also compresses embedding tables by rows, in 8 bits for
            int4 too (graph/options/compressed_tables.py). Accumulators stay float32; biases and convolutions are
            unchanged. The manifest has a note about the error. `{"lm_head*": "int8", "*.v_proj*": None, "*": "int4"}`
            chooses by names of initializers, nodes and PyTorch modules: the first pattern that matches decides, and
            what None or no pattern matches stays as it is (graph/options/weight_schemes.py).
        accuracy_level: How accurately the rows of a matmul by a quantized matrix are represented, counted as in
            MatMulNBits: 4 quantizes them to int8 by blocks of k, where the CPU multiplies bytes faster than floats
            (schedules/cpu/matmul/int8_rows.py); a lower level, from 0, keeps them as they are. None is what each node
            says, and 0 for matrices that `weights` compresses.
        database: A folder of `tune`, whose records for this target choose the tiles of kernels before presets do; the
            manifest names the records.
        serve: `serve=Serve(context=N)` turns a decoder with a growing past into one for a ragged batch of many
            requests over one paged cache (graph/paged/paged_decoder.py), which a `Batcher` runs.
        checks: False omits the run-time checks of the tables of serving operators (starts, lengths, pages, blocks).
            Then no request is rejected, and kernels still touch no memory but their arrays; docs/serving.md has the
            rules and their cost.
        precision: "float16" or "bfloat16" computes the matmuls of a float32 model in that type, and stores their
            weights and a decoder's caches in it. Norms, softmax and accumulators stay float32, as do inputs and
            outputs (graph/options/precision.py). "fast" computes the matmuls of a float32 or float16 model in bfloat16
            where that is faster on every target, and leaves inputs, outputs and caches unchanged. "tf32" and "3xtf32"
            leave the model float32, and multiply its matrices on the GPU's tensor cores. Their error is 2^-11 of each
            operand, or about none with operands split in two (schedules/cuda/matmul/tensor_types.py). "float32"
            computes in floats what a model quantizes at run time, such as DynamicQuantizeLSTM
            (graph/options/float_activations.py).
        calls: Sample calls, each a dictionary of arrays by input name, that show which numbers float16 cannot
            represent: nodes that read or compute those stay wide.
        seed: The seed of random operators without an attribute `seed`. A number makes every call draw the same
            numbers. A string is the name of a new input (int64 scalar), from which each call takes its seed
            (graph/options/random_seed.py).

    Raises:
        InputError: A value is invalid.
    """

    target: str = "cpu"
    donate: Sequence[str] = ()
    threads: int | None = None
    cc: str | None = None
    dims: Dims | None = None
    static_cache: int | None = None
    weights: Scheme | Schemes | None = None
    accuracy_level: int | None = None
    database: str | Path | None = None
    serve: Serve | None = None
    checks: bool = True
    precision: Precision | None = None
    calls: Sequence[Call] = ()
    seed: int | str = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "donate", tuple(self.donate))
        # Python's own numbers instead of NumPy's.
        object.__setattr__(self, "threads", check_threads(self.threads))
        if not isinstance(self.seed, str):
            object.__setattr__(self, "seed", check_integer(self.seed, "seed", 0, 2**63 - 1))
        if self.accuracy_level is not None:
            level = check_integer(self.accuracy_level, "accuracy_level", 0, INT8_ROWS)
            object.__setattr__(self, "accuracy_level", level)
        if self.static_cache is not None:
            slots = check_integer(self.static_cache, "static_cache", 1, 2**31 - 1)
            object.__setattr__(self, "static_cache", slots)
        if self.static_cache is not None and self.serve is not None:
            raise InputError(
                "option.static_cache_with_serve",
                "static_cache and serve are both given, but only one of them can manage the caches. Choose one of "
                "them.",
            )
        if self.checks not in (True, False):
            raise InputError("option.checks_invalid", f"checks={self.checks!r} is neither True nor False.")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise InputError(
                "precision.name_unknown",
                f"precision={self.precision!r} is not a supported precision. Use {', '.join(PRECISIONS)}, or leave "
                "it out: then every node is computed in the model's own type.",
            )
        if isinstance(self.calls, Mapping) or not all(isinstance(call, Mapping) for call in self.calls):
            raise InputError(
                "option.calls_invalid", "calls= must be a list of calls, each a dictionary of arrays by input name."
            )
        if self.calls and self.precision != "float16":
            raise InputError(
                "option.calls_unused",
                "calls= are only for precision='float16', to find the numbers that float16 cannot represent. Leave "
                "them out for other precisions.",
            )
        self._check_weights()

    @property
    def schemes(self) -> Schemes:
        """The patterns of `weights`; one for all matrices if it is a scheme, and none without it."""
        if self.weights is None:
            return {}
        return {"*": self.weights} if isinstance(self.weights, str) else self.weights

    @property
    def narrowest_scheme(self) -> Scheme | None:
        """The scheme of `weights` with the fewest bits."""
        schemes = [scheme for scheme in self.schemes.values() if scheme is not None]
        return min(schemes, key=BITS.__getitem__, default=None)

    def _check_weights(self) -> None:
        if isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", dict(self.weights))
        is_choice = self.weights is None or isinstance(self.weights, (str, Mapping))
        unknown = [scheme for scheme in self.schemes.values() if scheme not in (None, *SCHEMES)] if is_choice else True
        if unknown or not all(isinstance(pattern, str) for pattern in self.schemes):
            raise InputError(
                "weights.scheme_unknown",
                f"weights={self.weights!r} is not a supported compression of weights. Use {', '.join(SCHEMES)}, a "
                "dictionary of them by patterns of names, or leave it out.",
            )
        if "*" in [*self.schemes][:-1]:
            raise InputError(
                "weights.pattern_unreached",
                "weights: the pattern '*' matches every name, and so those after it decide nothing. Put it last.",
            )
