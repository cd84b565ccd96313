"""Dynamic shared memory is one variable of the file to C++, whatever kernel names it."""

from __future__ import annotations

import re

import pytest

from tests.cuda.audits.machine_code import emitted, prefill, problem
from tests.cuda.matmul.test_matmul_on_gpus import Case, first_variant

pytestmark = pytest.mark.no_gpu

DECLARED = re.compile(r"extern __shared__ __align__\((\d+)\) (\w+) (\w+)\[\];")
KINDS = {
    "sm_80": {("16", "uint"), ("128", "half")},  # chunks of a thread's own, and tiles for mma.sync
    "sm_90a": {("16", "uint"), ("1024", "uint")},  # and tiles that TMA loads
}


@pytest.mark.parametrize("arch", KINDS)
def test_a_name_is_that_of_one_type(arch: str) -> None:
    """Names depend only on the type, not on other variables that TVM numbers: an artifact's kernels are one file."""
    matmul = first_variant(Case(n=4096, k=1024, b_transposed=True, tiles=None), arch).make()
    attention, _ = prefill(problem(64, True), arch)
    declared = [declaration for func in (matmul, attention) for declaration in DECLARED.findall(emitted(func, arch))]
    types = {name: (align, kind) for align, kind, name in declared}
    assert set(types.values()) == KINDS[arch] and len(declared) >= 3
    assert sorted(types.values()) == sorted(KINDS[arch]), "a name for each type"
