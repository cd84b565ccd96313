"""Which random cases cover which field of the record on which kernel.

`python -m tests.cases.record_cases` writes docs/records.md: the cases of the long runs, of which every one follows
from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lowering.attention.record.cache_layout import GivenRing, Offset, Pages, Whole
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem, Mask
from schedules.cpu.attention.attention_tiles import DecodeTiles
from schedules.cpu.primitives.vector import read_cpu_features
from schedules.cuda.attention.prefill_mma import can_prefill
from tests.cases.attention_cases import TARGET, Case, draw_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "records.md"

CALLS = 5  # of every problem
ON_CPU = range(1000, 1600)
ON_CUDA = range(2000, 2120)
ON_TENSOR_CORES = range(3000, 3120)
SMALL_M = 16  # of the heads that share keys, up to which "CUDA decode" serves here

Field = Callable[[AttentionProblem], bool]

FIELDS: dict[str, Field] = {
    "dense rows": lambda p: not p.is_ragged,
    "packed rows": lambda p: p.is_ragged,
    "slots: the buffer's own": lambda p: isinstance(p.layout.slots, Whole),
    "slots: offsets": lambda p: isinstance(p.layout.slots, Offset),
    "slots: pages by number": lambda p: isinstance(p.layout.slots, Pages) and p.layout.slots.entries == "page",
    "slots: pages by first slot": lambda p: isinstance(p.layout.slots, Pages) and p.layout.slots.entries == "slot",
    "slots: a page for each batch": lambda p: isinstance(p.layout.slots, Pages) and p.layout.slots.size is None,
    "slots: pages of K and V apart": lambda p: isinstance(p.layout.slots, Pages) and p.layout.slots.apart,
    "ring": lambda p: p.layout.ring is not None,
    "ring with sinks": lambda p: getattr(p.layout.ring, "sinks", 0) > 0,
    "ring of the call's numbers": lambda p: isinstance(p.layout.ring, GivenRing),
    "beams": lambda p: p.layout.beams is not None,
    "K and V in one buffer": lambda p: p.layout.is_joint,
    "layers in one buffer": lambda p: "l" in p.layout.axes,
    "int8": lambda p: p.layout.quantization is not None and p.layout.quantization.dtype == "int8",
    "float8_e4m3fn": lambda p: p.layout.quantization is not None and p.layout.quantization.dtype == "float8_e4m3fn",
    "int4": lambda p: p.layout.quantization is not None and p.layout.quantization.dtype == "int4",
    "a scale for the tensor": lambda p: (
        p.layout.quantization is not None and not (p.layout.quantization.group or p.layout.quantization.channels)
    ),
    "a scale for each channel": lambda p: p.layout.quantization is not None and p.layout.quantization.channels,
    "a scale for a group": lambda p: p.layout.quantization is not None and bool(p.layout.quantization.group),
    "window": lambda p: p.window is not None,
    "window with sinks": lambda p: p.window is not None and p.window.left is not None and bool(p.window.sinks),
    "window of the call's numbers": lambda p: p.window is not None and "given" in (p.window.left, p.window.sinks),
    "rows behind the keys": lambda p: p.window is not None and p.window.offset == "behind",
    "batches that see all": lambda p: p.window is not None and p.window.free,
    "lengths": lambda p: p.lengths,
    "bool mask": lambda p: isinstance(p.mask, Mask) and p.mask.dtype == "bool",
    "added mask": lambda p: isinstance(p.mask, Mask) and p.mask.dtype != "bool",
    "mask of packed keys": lambda p: isinstance(p.mask, Mask) and p.mask.starts,
    "formula that selects": lambda p: isinstance(p.mask, Formula) and p.mask.dtype == "bool",
    "formula that adds": lambda p: isinstance(p.mask, Formula) and p.mask.dtype != "bool",
    "scale at run time": lambda p: p.scale is None,
    "soft cap": lambda p: bool(p.softcap),
    "change of scores": lambda p: p.score is not None,
    "sink": lambda p: p.sink,
    "splits of a given number": lambda p: p.splits is not None,
    "qk output": lambda p: p.qk_mode is not None,
    "lse output": lambda p: p.lse,
    "max output": lambda p: p.max,
    "grouped heads": lambda p: p.group > 1,
    "half precision": lambda p: p.dtype in ("float16", "bfloat16"),
    "float64": lambda p: p.acc_dtype == "float64",
}

KERNELS = ("CPU plain", "CPU prefill", "CPU decode", "CUDA plain", "CUDA rows", "CUDA decode", "CUDA mma")
"""wgmma has its own problems instead of random cases: those of tests/cuda/attention/test_prefill_wgmma.py."""


def rows_of(case: Case) -> set[int]:
    """Return how many query rows the batches of a call have, as far as that is fixed before its data are drawn."""
    return {1, case.q_len} if case.problem.is_ragged else {case.q_len}


def on_cpu(case: Case) -> set[str]:
    """Return the kernels that serve a call, next to the plain one, which runs all of them."""
    p = case.problem
    if p.qk_mode is not None:
        return {"CPU plain"}
    limit = DecodeTiles.default(p, read_cpu_features(TARGET)).q_len
    return {"CPU plain", *("CPU decode" if rows <= limit else "CPU prefill" for rows in rows_of(case))}


def on_tensor_cores(case: Case) -> set[str]:
    assert can_prefill(case.problem)
    limit = SMALL_M // case.problem.group
    return {"CUDA decode" if rows <= limit else "CUDA mma" for rows in rows_of(case)}


def on_cuda(case: Case) -> set[str]:
    return {"CUDA plain"} if case.problem.qk_mode is not None else {"CUDA rows"}


def runs() -> Iterator[tuple[Case, set[str]]]:
    """Yield every case of the long runs, and the kernels that it has covered."""
    for seeds, tensor_cores, serving in (
        (ON_CPU, False, on_cpu),
        (ON_CUDA, False, on_cuda),
        (ON_TENSOR_CORES, True, on_tensor_cores),
    ):
        for seed in seeds:
            for case in draw_cases(seed, CALLS, tensor_cores):
                yield case, serving(case)


def page() -> str:
    counts = {field: dict.fromkeys(KERNELS, 0) for field in FIELDS}
    pairs: set[tuple[str, str]] = set()
    total = 0
    for case, kernels in runs():
        total += 1
        present = [name for name, has in FIELDS.items() if has(case.problem)]
        pairs |= {(a, b) for a in present for b in present if a < b}
        for name in present:
            for kernel in kernels:
                counts[name][kernel] += 1
    about = f"the seeds of the long runs (`-m slow`): {total} cases, {len(pairs)} pairs of fields."
    lines = [
        "# The record, field by field",
        "",
        "Every kernel answers the whole of `lowering/attention/record/problem.py`, or rejects by rule, and leaves the",
        "problem to the plain kernel of its target. A number says how many random cases covered a field on a kernel,",
        "against float64, with NaN and infinities in what is not visible. This page is written by",
        "`python -m tests.cases.record_cases` from",
        about,
        "",
        "| field | " + " | ".join(KERNELS) + " |",
        "|---" * (len(KERNELS) + 1) + "|",
    ]
    for name, by_kernel in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(n) if n else "-" for n in by_kernel.values()) + " |")
    lines += ["", *NOTES, ""]
    return "\n".join(lines)


NOTES = (
    "* **qk output**: the matrix of scores exists then, so that there is nothing to tile: plain kernels serve it.",
    "* **CUDA decode, mma**: tensor cores take 16 bits, and codes that become them on the way: keys of multiples of",
    "  16 elements, groups of multiples of 8 and, with scales of float16, an even number of them in a row. Other",
    "  codes and types reject: the kernel of warps by rows (`CUDA rows`) reads them.",
    "* **CUDA wgmma** (Hopper): dense rows and stores. TMA would write whole tiles of Y over rows of the next batch,",
    "  and looks no slot up; such problems run by mma there.",
)

if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
