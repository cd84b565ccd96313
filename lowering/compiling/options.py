"""The options of the compiler, validated in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..choices import PRECISIONS, SCHEMES, Precision, Scheme
from ..errors import InputError
from ..runtime.checks import check_integer, check_threads

if TYPE_CHECKING:
    from ..graph.declared_sizes import Dims
    from ..graph.serve import Serve
    from .overflow import Call


@dataclass(frozen=True)
class Options:
    """The parameters of `compile`, as fields of the same names.

    Raises InputError for invalid values; checks that depend on the model or target are made where the value is used.
    """

    target: str = "cpu"
    donate: Sequence[str] = ()
    threads: int | None = None
    cc: str | None = None
    dims: Dims | None = None
    static_cache: int | None = None
    weights: Scheme | None = None
    database: str | Path | None = None
    serve: Serve | None = None
    checks: bool = True
    precision: Precision | None = None
    calls: Sequence[Call] = ()
    seed: int | str = 0

    def __post_init__(self) -> None:
        # Python's own numbers instead of NumPy's.
        object.__setattr__(self, "threads", check_threads(self.threads))
        if not isinstance(self.seed, str):
            object.__setattr__(self, "seed", check_integer(self.seed, "seed", 0, 2**63 - 1))
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
        if self.weights is not None and self.weights not in SCHEMES:
            raise InputError(
                "weights.scheme_unknown",
                f"weights={self.weights!r} is not a supported compression of weights. Use {', '.join(SCHEMES)}, or "
                "leave it out.",
            )
