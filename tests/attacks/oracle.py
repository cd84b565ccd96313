"""The expected outcome of a call, an answer or an error, and its comparison with the actual one.

The answer is that of onnx's reference evaluator, unless the rule of the attack gives one itself; each rule that does
says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from lowering.errors import LoweringError

from .attack import Arrays, Case, Illegal, Unspecified, contradiction

# Relative; where additions cancel, relative to the largest element.
_TOLERANCE = {"float16": 6e-3, "bfloat16": 5e-2, "float32": 5e-5, "float64": 1e-9}

# Terms of the compiler and of Python, which users do not know.
_FOREIGN = re.compile(
    r"\b((?<!apache-)tvm\w*|relax|tirx?|tvm_ffi|match_cast|heap_data|shape_heap|InternalError|Traceback|RuntimeError|ValueError"
    r"|TypeError|IndexError|KeyError|AttributeError|AssertionError|NoneType|PrimFunc|PrimExpr|IntImm|Check failed"
    r"|storage allocation|bad_alloc|T\.int64|numpy\.\w+|object at 0x|Divide by zero|object cannot be"
    r"|object is not|object has no)\b"
    r"|std::|\.cc:\d|\.py\b|0x[0-9a-f]{8}",
    re.IGNORECASE,
)
_LONGEST = 700
# Names and contents of the user's, which may be any text.
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'|\"[^\"\n]*\"")


# Legal models that the compiler rejects, by the code of the error.
_LIMITATIONS = frozenset(
    [
        "concat_from_sequence.sequence_empty",
        "constant_of_shape.shape_unsupported",
        "conv.shape_unsupported",
        "node.constant_required",
        "node.result_too_large",
        "node.static_length_required",
        "node.static_size_required",
        "node.string_at_run_time",
        "rotary_embedding.static_size_required",
        "sequence_at.rank_mismatch",
        "split_to_sequence.split_unsupported",
        "squeeze.axes_ambiguous",
        "squeeze.axes_changed",
    ]
)
# The same, by the text of the error, for codes that other causes share.
_LIMITATION_TEXTS = re.compile(r"dimension of X is d\w+\. |computed at run time")


@dataclass(frozen=True)
class Verdict:
    """answer is None where an error must follow (legal is False) or anything may (legal is None).

    stretched: a symbolic size would have to be 1 next to another one, which a compiled module may reject.
    """

    legal: bool | None
    answer: Sequence[np.ndarray] | None = None
    reason: str = ""
    stretched: bool = False

    def may_refuse(self, error: LoweringError) -> bool:
        is_limitation = error.code in _LIMITATIONS or bool(_LIMITATION_TEXTS.search(error.text))
        return not self.legal or self.stretched or is_limitation


class NoOracleError(Exception):
    """The rule allows what the reference cannot evaluate: a fault of the attack itself."""


def judge_call(case: Case, arrays: Arrays) -> Verdict:
    other = contradiction(case, arrays)
    if other:
        return Verdict(False, reason=other)
    try:
        with np.errstate(all="ignore"):
            answer = case.attack.rule(*arrays)
    except Illegal as error:
        return Verdict(False, reason=_one_line(error))
    except Unspecified as error:
        return Verdict(None, reason=_one_line(error))
    answer = _evaluate_reference(case.model, case.feeds(arrays)) if answer is None else answer
    return Verdict(True, answer, stretched=_is_stretched(case, arrays))


def _is_stretched(case: Case, arrays: Arrays) -> bool:
    """Return whether a symbolic size is 1 where another input has more, counted from the last dimension."""
    sizes: dict[int, set[int]] = {}
    for array in arrays:
        for position, size in enumerate(reversed(() if array is None else array.shape)):
            sizes.setdefault(position, set()).add(size)
    return any(
        isinstance(dim, str) and array.shape[axis] == 1 and sizes[array.ndim - 1 - axis] != {1}
        for k, array in enumerate(arrays)
        if array is not None
        for axis, dim in enumerate(case.declared.get(k, ()))
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _evaluate_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(r) for r in ReferenceEvaluator(model).run(None, feeds)]
    except Exception as error:
        raise NoOracleError(f"the reference: {type(error).__name__}: {error}") from error


def difference(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], close: float) -> str | None:
    """Return how the outputs differ from the answer, None if they do not."""
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        e = np.asarray(e)
        if a.dtype != e.dtype:
            return f"output {k} is {a.dtype} instead of {e.dtype}"
        if a.shape != e.shape:
            return f"output {k} has shape {list(a.shape)} instead of {list(e.shape)}"
        wrong = _wrong(a, e, close)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"output {k} is {a[at]} instead of {e[at]} at {list(at)} ({int(wrong.sum())} of {a.size} differ)"
    return None


def _wrong(a: np.ndarray, e: np.ndarray, close: float) -> np.ndarray:
    name = e.dtype.name
    if "float" not in name:
        return np.asarray(a != e)
    tolerance = max(_TOLERANCE.get(name, 0.0), close)
    with np.errstate(all="ignore"):
        a, e = a.astype(np.float64), e.astype(np.float64)
        finite = np.abs(e[np.isfinite(e)])
        # Cancellation is relative to the largest element, as long as it is not an outlier.
        largest = min(float(finite.max()), 1e3) if finite.size else 0.0
        same = np.abs(a - e) <= tolerance * (np.abs(e) + largest)
        return np.asarray(~(same | (a == e) | (np.isnan(a) & np.isnan(e))))


def find_foreign_terms(message: str) -> str | None:
    """Return the first term of the compiler's or of Python's in the text of an error."""
    match = _FOREIGN.search(_QUOTED.sub("''", message))
    return match.group() if match else None


def unclear(message: str, names: Sequence[str]) -> str | None:
    """Return the fault of the text of an error, or None; it must name one of `names`."""
    terms = find_foreign_terms(message)
    if terms:
        return f"says '{terms}'"
    if len(message) > _LONGEST:
        return f"has {len(message)} characters"
    if not any(n in message for n in names) and "more memory than there is" not in message:  # which is of no node alone
        return "names neither the node nor an input"
    return None
