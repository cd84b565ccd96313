"""Measures many graphs, each in a process of its own, and keeps what was found, so that a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

TIMEOUT = 900  # seconds a graph


def graph_key(path: Path) -> str:
    """Return what graphs have in common that differ in their weights alone."""
    model = onnx.load(path)
    found = hashlib.sha256()
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.functions):
        found.update(part.SerializeToString(deterministic=True))
    for weight in model.graph.initializer:
        found.update(f"{weight.name} {weight.data_type} {list(weight.dims)}".encode())
        if weight.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32):
            found.update(onnx.numpy_helper.to_array(weight).tobytes())
    return found.hexdigest()[:16]


def alike(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the graphs that are the same but for their weights, by their key."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        groups[graph_key(path)].append(path)
    return groups


Row = tuple[list[Path], dict[str, Any]]


def measure_all(script: str, paths: Iterable[Path], records: Path, can_measure: bool = True) -> Iterator[Row]:
    """Yield graphs that are alike, most of them first, and what was found of the first: kept in `records`, or new.

    What is not kept is left out if nothing can be measured.
    """
    groups = alike(paths)
    for key in sorted(groups, key=lambda key: -len(groups[key])):
        record = records / f"{key}.json"
        if record.is_file():
            yield groups[key], json.loads(record.read_text())
        elif can_measure:
            yield groups[key], _measured(script, groups[key][0], record)


def _measured(script: str, path: Path, record: Path) -> dict[str, Any]:
    """Return what `script --one path` prints last, as JSON; "failed" if it does not."""
    try:
        done = subprocess.run([sys.executable, script, "--one", path], capture_output=True, text=True, timeout=TIMEOUT)
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": one_line(done.stderr[-300:])}
    except subprocess.TimeoutExpired:
        found = {"failed": f"more than {TIMEOUT} s"}
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(found))
    return found


def cell(reason: str) -> str:
    """Return what a table says of a reason: its first sentence, without bars and paths."""
    return re.sub(r"(Load model from )?(?<!\S)/\S+( failed:)? ?", "", reason.replace("|", "/").split(". ")[0])[:200]


def one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())[:400]
