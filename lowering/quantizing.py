"""Matmuls of a float model in 8 bits, by onnxruntime's tool, whose models other runtimes run too; and what that costs.

onnxruntime's `quantization` is the tool that most quantized models were made with. It needs no training framework, and
keeps to operators of ai.onnx for matmuls; what it makes, this compiler multiplies in 8 bits. It is not installed with
this package: `pip install onnxruntime`.

    report = quantize("model.onnx", "model.int8.onnx", calls=[{"x": x}, ...])      # static: scales from these calls
    report = quantize("model.onnx", "model.int8.onnx")                             # dynamic: scales from each call
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx

from .checking.references import session_options
from .errors import InputError
from .machine import not_installed

Call: TypeAlias = Mapping[str, np.ndarray]

MATMULS = ("MatMul", "Gemm", "Conv")
"""What is quantized."""

_MOST_BYTES = 2**31 - 2**20  # of a protobuf


@dataclass(frozen=True)
class NodeError:
    """How far a matmul, or an output of the model, is from the float model's: root mean square of the differences over
    that of the numbers, over all calls."""

    tensor: str
    operator: str
    node: str
    error: float


@dataclass(frozen=True)
class Report:
    """Bytes of both files, how many matmuls there were and how many are in 8 bits, and errors by node, the largest
    first, and of the outputs; both empty without calls."""

    form: str
    bytes_before: int
    bytes_after: int
    matmuls: int
    quantized: int
    nodes: tuple[NodeError, ...]
    outputs: tuple[NodeError, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.quantized} of {self.matmuls} matmuls in 8 bits ({self.form}), "
            f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        ]
        lines += [f"output {each.tensor}: error {each.error:.2e}" for each in self.outputs]
        if self.nodes:
            lines.append("matmuls with the largest errors (leave some out by --exclude NAME):")
            lines += [
                f"  {each.error:.2e}  {each.operator} '{each.node}' giving '{each.tensor}'" for each in self.nodes[:10]
            ]
        return "\n".join(lines)


def quantize(
    model: str | Path,
    output: str | Path,
    calls: Sequence[Call] | None = None,
    form: Literal["static", "dynamic"] | None = None,
    weights: Literal["int8", "uint8"] = "int8",
    by_column: bool = True,
    exclude: Sequence[str] = (),
) -> Report:
    """Writes the model with its matmuls in 8 bits to the file `output`, whole or not at all, and says what it costs.

    calls are inputs by name; with them the form is static by default: scales of activations are what the calls ask for,
    written between QuantizeLinear and DequantizeLinear. Dynamic scales are computed in every call. weights are int8 or
    uint8, with a scale for each column, or for the whole matrix. exclude names nodes that stay floats. Errors are those
    on the calls.

    Raises InputError for a model or calls that the tool or onnxruntime refuse, or without onnxruntime.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError(not_installed("onnxruntime")) from error
    source, target = Path(model), Path(output)
    form = form or ("static" if calls else "dynamic")
    if form not in ("static", "dynamic") or weights not in ("int8", "uint8"):
        raise InputError(f"form={form!r} and weights={weights!r}: use 'static' or 'dynamic', 'int8' or 'uint8'.")
    if form == "static" and not calls:
        raise InputError("static scales are those of calls: give some (--calls FILE.npz), or quantize dynamically.")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder '{target.parent}' to write '{target.name}' to.")
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"'{target}' is the model itself: name another file.")
    try:
        graph = onnx.load(source, load_external_data=False).graph
    except OSError as error:
        raise InputError(f"the model '{source}' cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        raise InputError(f"'{source}' is no ONNX model: {error}.") from error
    excluded = _names_of(graph, exclude)
    with tempfile.TemporaryDirectory(prefix=".quantize-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            _by_tool(_named(source, graph, Path(folder)), made, calls or (), form, weights, by_column, excluded)
        except Exception as error:
            raise InputError(f"onnxruntime's tool cannot quantize the model: {error}") from error
        report = _report(source, made, graph, calls or (), form)
        os.replace(made, target)
    return report


def _names_of(graph: onnx.GraphProto, exclude: Sequence[str]) -> list[str]:
    """Name matmuls and convolutions without a name by their first outputs, in place, and return the names of those that
    are excluded, by name or by output. Raises InputError for others."""
    nodes = [node for node in graph.node if node.op_type in MATMULS]
    names: dict[str, str] = {}
    for node in nodes:
        node.name = node.name or node.output[0]
        names |= {node.name: node.name, node.output[0]: node.name}
    for name in exclude:
        if name not in names:
            known = [node.name for node in nodes]
            few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise InputError(f"exclude: the model has no {', '.join(MATMULS)} called '{name}'. It has {few or 'none'}.")
    return [names[name] for name in exclude]


def _named(source: Path, graph: onnx.GraphProto, folder: Path) -> Path:
    """Return a file of the model whose nodes have the names of the graph's: itself, or a copy in the folder."""
    model = onnx.load(source, load_external_data=False)
    if [node.name for node in model.graph.node] == [node.name for node in graph.node]:
        return source
    onnx.external_data_helper.load_external_data_for_model(model, str(source.parent))
    for node, named in zip(model.graph.node, graph.node):
        node.name = named.name
    onnx.save(model, folder / "named.onnx", save_as_external_data=model.ByteSize() > _MOST_BYTES)
    return folder / "named.onnx"


def _by_tool(
    source: Path, made: Path, calls: Sequence[Call], form: str, weights: str, by_column: bool, exclude: Sequence[str]
) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    given: dict[str, Any] = {
        "weight_type": QuantType.QInt8 if weights == "int8" else QuantType.QUInt8,
        "per_channel": by_column,
        "op_types_to_quantize": [*MATMULS] if form == "static" else ["MatMul", "Gemm"],
        "nodes_to_exclude": list(exclude),
    }
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the tool asks for a pass before it that changes nothing here
    try:
        if form == "dynamic":
            quantize_dynamic(source, made, **given)
        else:
            given |= {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8}
            quantize_static(source, made, _Calls(calls), **given)
    finally:
        root.setLevel(level)


class _Calls:
    """What the tool's calibration reads."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._left: Iterator[Call] = iter(calls)

    def get_next(self) -> dict[str, np.ndarray] | None:
        call = next(self._left, None)
        return None if call is None else dict(call)


def _report(source: Path, made: Path, graph: onnx.GraphProto, calls: Sequence[Call], form: str) -> Report:
    after = onnx.load(made).graph
    left = {name for node in after.node if node.op_type in MATMULS for name in node.output}
    coded = {name for node in after.node if node.op_type == "DequantizeLinear" for name in node.output}
    floats = [
        node
        for node in after.node
        if node.op_type in MATMULS and not {*node.input[:2]} <= coded and {*node.output} & left
    ]
    matmuls = [node for node in graph.node if node.op_type in MATMULS]
    nodes: list[NodeError] = []
    outputs: list[NodeError] = []
    if calls:
        kept = {name for node in after.node for name in node.output}
        wanted = {node.output[0]: node for node in matmuls if node.output[0] in kept}
        names = [*wanted, *(value.name for value in graph.output if value.name not in wanted)]
        errors = _errors(source, made, names, calls)
        nodes = [NodeError(name, node.op_type, node.name, errors[name]) for name, node in wanted.items()]
        outputs = [NodeError(value.name, "", "", errors[value.name]) for value in graph.output]
    size = source.stat().st_size + sum(path.stat().st_size for path in _external(source, graph))
    return Report(
        form, size, made.stat().st_size, len(matmuls), len(matmuls) - len(floats),
        tuple(sorted(nodes, key=lambda each: -each.error)), tuple(outputs),
    )  # fmt: skip


def _external(source: Path, graph: onnx.GraphProto) -> set[Path]:
    """Files beside the model that hold its weights."""
    places = (entry for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location")
    return {path for entry in places if (path := source.parent / entry.value).is_file()}


def _errors(source: Path, made: Path, names: Sequence[str], calls: Sequence[Call]) -> dict[str, float]:
    """Of each tensor that both models compute."""
    sessions = [_with_outputs(path, names) for path in (source, made)]
    squares = {name: [0.0, 0.0] for name in names}
    for call in calls:
        try:
            results = [session.run(list(names), dict(call)) for session in sessions]
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model on these calls: {error}") from error
        for name, right, found in zip(names, *results):
            wide = np.asarray(right, np.float64)
            squares[name][0] += float(np.square(np.asarray(found, np.float64) - wide).sum())
            squares[name][1] += float(np.square(wide).sum())
    return {name: float(np.sqrt(wrong / all_)) if all_ else float(wrong > 0) for name, (wrong, all_) in squares.items()}


def _with_outputs(path: Path, names: Sequence[str]) -> Any:
    import onnxruntime

    model = onnx.load(path)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = session_options()
    if model.ByteSize() < _MOST_BYTES:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "model.onnx", save_as_external_data=True)
        return onnxruntime.InferenceSession(Path(folder) / "model.onnx", options, ["CPUExecutionProvider"])
