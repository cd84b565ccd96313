"""Compile ONNX's node cases that compile for CPUs for CUDA, and write the result to docs/cuda_cases.json.

`python -m tests.cuda.elementwise.node_sweep [OPERATOR ...]` compiles every case, without nvcc: what a GPU cannot do
fails before, in TVM's lowering and code generation. docs/operators.md has the result as a column.
"""

from __future__ import annotations

import argparse
import json
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import lowering
from lowering.target.cubin import skip_machine_code
from tests.cases import node_cases
from tests.cases.node_cases import Case

RECORD = Path(__file__).parents[3] / "docs" / "cuda_cases.json"
TARGET = "cuda:sm_90a"


@dataclass(frozen=True)
class Found:
    """The result for an operator's cases that compile for CPUs: how many compile for CUDA, and why others do not."""

    compiled: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def sweep(operator: str) -> Found:
    """Compile the cases of an operator."""
    compiled, refused = 0, {}
    with skip_machine_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in node_cases.every_case()[operator]:
            if node_cases.refusal(case) is None:
                reason = _failure(case)
                compiled += reason is None
                refused |= {} if reason is None else {case.name: reason}
    return Found(compiled, refused)


def _failure(case: Case) -> str | None:
    try:
        model, dims = node_cases.fitted(case.model, case.named_inputs)
        lowering.compile(model, target=TARGET, dims=dims)
    except Exception as error:  # whatever TVM raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def recorded() -> dict[str, Found]:
    """Return the results of the last sweep, by operator."""
    return {operator: Found(**fields) for operator, fields in json.loads(RECORD.read_text()).items()}


def record(results: dict[str, Found]) -> None:
    """Write the results of sweeps, for operators with cases that compile for CPUs."""
    text = {operator: asdict(results[operator]) for operator in sorted(results) if results[operator] != Found()}
    RECORD.write_text(json.dumps(text, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", help="sweep these alone; the record of the others stays")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    results = recorded() if arguments.operators else {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        runs = {pool.submit(sweep, operator): operator for operator in arguments.operators or node_cases.every_case()}
        for run in as_completed(runs):
            results[runs[run]] = run.result()
            print(runs[run], run.result().compiled, run.result().refused, flush=True)
            record(results)


if __name__ == "__main__":
    main()
