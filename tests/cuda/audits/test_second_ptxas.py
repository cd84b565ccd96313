"""The audits of machine code pass with another ptxas: that of $PTXAS, or the newest of the package index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.audits import second_ptxas, test_machine_code
from tests.cuda.matmul import test_matmul_on_gpus

pytestmark = [
    pytest.mark.no_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("ptxas")), reason="needs nvcc, which writes the PTX"),
]


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    configured = os.environ.get("PTXAS")
    path = Path(configured) if configured else second_ptxas.installed(tmp_path_factory.mktemp("ptxas"))
    if path is None:
        pytest.skip("the package index is not reached, and PTXAS is not set")
    if second_ptxas.version(path) == second_ptxas.version("ptxas"):
        pytest.skip("it is the installed version")
    return path


@pytest.fixture(autouse=True)
def used(another: Path) -> Iterator[None]:
    with second_ptxas.used(another):
        yield


@pytest.mark.parametrize(("arch", "head_dim", "causal"), test_machine_code.ALL)
def test_prefill(arch: str, head_dim: int, causal: bool) -> None:
    test_machine_code.check(arch, test_machine_code.problem(head_dim, causal))


@pytest.mark.parametrize("name", test_matmul_on_gpus.AUDITED)
def test_matmuls(name: str) -> None:
    test_matmul_on_gpus.test_machine_code(name)
