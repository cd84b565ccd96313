"""How long a kernel should take: from its work, the rule that made its code, and what the machine can do.

A guard against cliffs: a matmul that no rule for matmuls takes is a hundred times slower than it could be, and
nothing else would say so. Compiling warns of it, and `bench` shows expectation and measurement side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..arithmetic import evaluate, names
from ..manifest import CallSpec, KernelSpec
from .limits import Limits

# By kind and rule, "" for any other: the share of the machine's float32 matrix rate that such code reaches. A function
# such as exp counts as one operation and takes about twenty.
_RATES = {
    ("matmul", "matmul"): 0.9,
    ("matmul", "prologue_matmul"): 0.9,
    ("matmul", "epilogue_matmul"): 0.9,
    ("matmul", "windows"): 0.4,
    ("matmul", "row_blocks"): 0.2,
    ("matmul", "loops"): 0.3,
    ("matmul", ""): 0.03,
    ("attention", "attention"): 0.8,
    ("attention", ""): 0.01,
    ("other", "elementwise"): 0.08,
    ("other", "concat"): 0.08,
    ("other", "windows"): 0.08,
    ("other", "reduction"): 0.08,
    ("other", "several"): 0.08,
    ("other", "recurrence"): 0.5,
    ("other", "loops"): 0.08,
    ("other", ""): 0.01,
}

_START = 2e-6  # seconds until a kernel runs

_TYPICAL = 64  # what a size that is not known is taken for
_BALANCE = 4  # operations in the time of a byte, of a core of today
_LARGE = 10**6  # operations that are worth a warning
SLOW = 0.3  # of the limit: below, there is something to be gained


def rate(kind: str, schedule: str) -> float:
    """The share of the machine's arithmetic that the code of a rule reaches (KernelSpec)."""
    return _RATES.get((kind, schedule), _RATES[kind, ""])


def seconds(kernel: KernelSpec, flops: int, size: int, limits: Limits) -> float:
    """The time that a call of so many operations and bytes should take."""
    arithmetic = flops / (kernel.rate * limits.flops) if limits.flops else 0.0
    return _START + max(arithmetic, size / limits.bandwidth)


def is_left_over(kernel: KernelSpec) -> bool:
    """Whether no rule made its code, or it is a matmul that the rule for matmuls does not take."""
    return (kernel.kind, kernel.schedule) not in _RATES


def warnings(kernels: Iterable[KernelSpec], calls: Sequence[CallSpec]) -> list[str]:
    """A sentence for every kernel that is large and far from what a machine can do, whatever the machine."""
    found = []
    for kernel in filter(is_left_over, kernels):
        flops, size = (_typical(text) for text in (kernel.flops, kernel.bytes))
        if flops is None or size is None or flops < _LARGE:
            continue
        share = max(flops, _BALANCE * size) / max(flops / kernel.rate, _BALANCE * size)
        if share < SLOW:
            nodes = ", ".join(dict.fromkeys(n for call in calls if call.kernel == kernel.name for n in call.nodes))
            why = "no kernel for matmuls takes it" if kernel.kind == "matmul" else "no rule takes it"
            found.append(
                f"{nodes or kernel.name} runs by the rule '{kernel.schedule}' at about {share:.0%} of what a machine "
                f"can do, as {why}."
            )
    return found


def _typical(text: str) -> int | None:
    """The work for sizes of the usual order, None where it depends on more than sizes."""
    values = dict.fromkeys(names(text), _TYPICAL)
    return None if values.keys() & {"pairs", "unseen", "volume"} else evaluate(text, values)
