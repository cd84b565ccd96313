"""The expected time of a kernel: from its work, the rule that scheduled it, and the machine's limits.

A guard against cliffs: a matmul that no matmul rule accepts is a hundred times slower than it could be, and nothing
else would show that. The compiler warns of it, and `bench` shows expectation and measurement side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..arithmetic import evaluate, list_names
from ..manifest import CallSpec, KernelSpec
from .limits import Limits

# By kind and rule, "" for any other: the share of the machine's float32 matrix rate that such code reaches. A function
# such as exp counts as one operation and takes about twenty.
_RATES = {
    ("matmul", "matmul"): 0.9,
    ("matmul", "winograd"): 1.5,
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

_TYPICAL = 64  # the size assumed for a symbolic one
_BALANCE = 4  # operations in the time of a byte, on a core of today
_LARGE = 10**6  # operations that are worth a warning
SLOW = 0.3  # of the limit: below it, a kernel can be improved


def lookup_rate(kind: str, schedule: str) -> float:
    """Return the share of the machine's arithmetic rate that the code of a rule reaches (KernelSpec)."""
    return _RATES.get((kind, schedule), _RATES[kind, ""])


def seconds(kernel: KernelSpec, flops: int, size: int, limits: Limits) -> float:
    """Return the time that a call of `flops` operations and `size` bytes should take."""
    arithmetic = flops / (kernel.rate * limits.flops) if limits.flops else 0.0
    return _START + max(arithmetic, size / limits.bandwidth)


def has_no_rule(kernel: KernelSpec) -> bool:
    """Return whether no rule scheduled the kernel, or it is a matmul that no matmul rule accepts."""
    return (kernel.kind, kernel.schedule) not in _RATES


def list_slow_kernels(kernels: Iterable[KernelSpec], calls: Sequence[CallSpec]) -> list[str]:
    """Return a sentence for every kernel that is large and far from the limit of any machine."""
    sentences = []
    for kernel in filter(has_no_rule, kernels):
        flops, size = (_typical(text) for text in (kernel.flops, kernel.bytes))
        if flops is None or size is None or flops < _LARGE:
            continue
        share = max(flops, _BALANCE * size) / max(flops / kernel.rate, _BALANCE * size)
        if share < SLOW:
            nodes = ", ".join(dict.fromkeys(n for call in calls if call.kernel == kernel.name for n in call.nodes))
            reason = "no kernel for matmuls takes it" if kernel.kind == "matmul" else "no rule takes it"
            sentences.append(
                f"{nodes or kernel.name} runs by the rule '{kernel.schedule}' at about {share:.0%} of what a machine "
                f"can do, as {reason}."
            )
    return sentences


def _typical(text: str) -> int | None:
    """Return the work for sizes of the usual order, or None if it depends on more than sizes."""
    values = dict.fromkeys(list_names(text), _TYPICAL)
    return None if values.keys() & {"pairs", "unseen", "volume"} else evaluate(text, values)
