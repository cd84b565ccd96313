"""Measure many graphs, each in a process of its own, and cache the results, so that a stopped run goes on."""

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
    """Return a key that is equal for graphs that differ only in their weights."""
    model = onnx.load(path)
    digest = hashlib.sha256()
    for message in (*model.graph.node, *model.graph.input, *model.graph.output, *model.functions):
        digest.update(message.SerializeToString(deterministic=True))
    for weight in model.graph.initializer:
        digest.update(f"{weight.name} {weight.data_type} {list(weight.dims)}".encode())
        if weight.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32):
            digest.update(onnx.numpy_helper.to_array(weight).tobytes())
    return digest.hexdigest()[:16]


def alike(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the graphs that are the same but for their weights, by their key."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        groups[graph_key(path)].append(path)
    return groups


Row = tuple[list[Path], dict[str, Any]]


def measure_all(script: str, paths: Iterable[Path], records: Path, can_measure: bool = True) -> Iterator[Row]:
    """Yield groups of equal graphs, the largest first, and the result of the first graph: from `records`, or new.

    Results that are not cached are left out if nothing can be measured.
    """
    groups = alike(paths)
    for key in sorted(groups, key=lambda key: -len(groups[key])):
        record = records / f"{key}.json"
        if record.is_file():
            yield groups[key], json.loads(record.read_text())
        elif can_measure:
            yield groups[key], _measured(script, groups[key][0], record)


def _measured(script: str, path: Path, record: Path) -> dict[str, Any]:
    """Return the last line that `script --single path` prints, as JSON; "failed" if it fails."""
    try:
        command = [sys.executable, "-m", f"tests.exports.{script}", "--single", path]
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        lines = process.stdout.splitlines()
        result = (
            json.loads(lines[-1]) if process.returncode == 0 and lines else {"failed": one_line(process.stderr[-300:])}
        )
    except subprocess.TimeoutExpired:
        result = {"failed": f"more than {TIMEOUT} s"}
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(result))
    return result


def cell(reason: str) -> str:
    """Return the text of a reason in a table: its first sentence, without bars and paths."""
    return re.sub(r"(Load model from )?(?<!\S)/\S+( failed:)? ?", "", reason.replace("|", "/").split(". ")[0])[:200]


def one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())[:400]
