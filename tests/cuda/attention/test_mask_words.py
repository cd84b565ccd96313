"""Mask tensors on tensor cores: two adjacent elements by one load, for any size, and never one after the end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tvm import tirx

from lowering.attention.codegen.mask_pairs import MaskPairs
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from schedules.cuda.attention.mask_fragment import KeySpan
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import CAUSAL, Arrays, Kernels, close, close_to, draw, expected, problem
from tests.cuda.audits.machine_code import decode_alone, prefill
from tests.cuda_emulation import Access, EmulationError

# The kernel, the GPU's architecture, and the number of query rows.
KERNELS: dict[str, tuple[str, int]] = {"mma": ("sm_80", 37), "wgmma": ("sm_90a", 37), "decode": ("sm_80", 3)}
TYPES = ("bool", "float32", "float16", "bfloat16")
MASKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "each pair": lambda dtype: {"mask": Mask(dtype, (None, None, None, None), pad=False)},
    "causal, one of all batches": lambda dtype: {
        "mask": Mask(dtype, (1, None, None, None), pad=False),
        "window": CAUSAL,
    },
    "shorter, one of all heads": lambda dtype: {"mask": Mask(dtype, (None, 1, None, None))},
    "window": lambda dtype: {"mask": Mask(dtype, (1, 1, None, None), pad=False), "window": Window(21, 3, "past")},
    "one of all rows": lambda dtype: {"mask": Mask(dtype, (None, None, 1, None), pad=False), "lse": True},
}
SIZES = [(2, 150), (1, 131), (1, 130)]
"""Batches and keys. Windows begin at odd keys, too, and the shorter masks have the other parity."""
EVERY = [
    (kernel, dim, dtype, mask) for mask, dim, dtype, kernel in itertools.product(MASKS, (64, 128, 256), TYPES, KERNELS)
]


def make_problem(dim: int, dtype: str, mask: str) -> AttentionProblem:
    return problem(head_dim=dim, **MASKS[mask](dtype))


def make_kernel(kernel: str, p: AttentionProblem) -> tirx.PrimFunc:
    arch, _ = KERNELS[kernel]
    return decode_alone(p, arch) if kernel == "decode" else prefill(p, arch)[0]


def kernels(kernel: str, p: AttentionProblem) -> Kernels:
    return Kernels({kernel: p}, lambda _: make_kernel(kernel, p), KERNELS[kernel][0])


@pytest.mark.sampled(31)
@pytest.mark.parametrize(("kernel", "dim", "dtype", "mask"), EVERY)
def test_equals_the_reference(kernel: str, dim: int, dtype: str, mask: str) -> None:
    rows = KERNELS[kernel][1]
    kernels(kernel, make_problem(dim, dtype, mask)).check(kernel, [(batch, rows, keys) for batch, keys in SIZES])


def mask_reads(kernel: str, dtype: str, keys: int) -> Counter[int]:
    """Count a warp's loads of mask elements, by bytes of a thread, over two batches, and check the result."""
    p = make_problem(64, dtype, "each pair")
    inputs = draw(p, 2, KERNELS[kernel][1], keys)
    with emulated.counting() as accesses:
        y, _ = kernels(kernel, p).call(kernel, inputs, 0)
    close_to(inputs, y, expected(p, inputs)[0], p)
    return sum((Counter({a.bytes: a.requests}) for a in accesses if of_mask(a)), Counter())


def of_mask(access: Access) -> bool:
    return access.memory == "global" and "mask_ptr" in access.source


@pytest.mark.sampled(10)
@pytest.mark.no_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_two_elements_are_one_load(kernel: str, dtype: str) -> None:
    size = {"bool": 1, "float32": 4}.get(dtype, 2)
    even, odd = mask_reads(kernel, dtype, 130), mask_reads(kernel, dtype, 129)
    assert set(even) == {2 * size} and set(odd) == {size}
    assert odd[size] > 1.9 * even[2 * size]


# Faults.


def whatever_the_size(pairs: MaskPairs, b: Any, j: Any) -> Any:
    return (j % 2).equal(0)


def whatever_the_key(pairs: MaskPairs, b: Any, j: Any) -> Any:
    return (pairs.buffer.shape[3] % 2).equal(0)


WRONG: dict[str, tuple[str, Any, str, int]] = {
    "rows of an odd size": ("whole", whatever_the_size, "each pair", 131),
    "an odd first key": ("whole", whatever_the_key, "window", 132),
}


def is_right(kernel: str, p: AttentionProblem, inputs: Arrays) -> bool:
    want, _ = expected(p, inputs)
    try:
        y, _ = kernels(kernel, p).call(kernel, inputs, 0)
        close(y, want, p)
    except (AssertionError, EmulationError):
        return False
    return True


@pytest.mark.sampled(4)
@pytest.mark.no_gpu
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pair_that_is_none_is_noticed(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, instead, mask, keys = WRONG[name]
    p = make_problem(64, "float32", mask)
    inputs = draw(p, 1, KERNELS[kernel][1], keys)
    assert is_right(kernel, p, inputs)
    monkeypatch.setattr(MaskPairs, method, instead)
    assert not is_right(kernel, p, inputs)


@pytest.mark.no_gpu
@pytest.mark.parametrize("keys", [41, 42])
def test_nothing_is_read_after_the_last_key(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator knows the end of the mask: it notices where all elements of a tile are read."""
    p = make_problem(64, "bool", "each pair")
    inputs = draw(p, 1, 3, keys)
    assert is_right("decode", p, inputs)
    monkeypatch.setattr(KeySpan, "holds", lambda span, first, last: tirx.const(True, "bool"))
    with pytest.raises(EmulationError):
        kernels("decode", p).call("decode", inputs, 0)
