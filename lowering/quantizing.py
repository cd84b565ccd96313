"""Quantization of a float model's matmuls to 8 bits, by onnxruntime's tool, and the resulting error.

onnxruntime's `quantization` is the tool that most quantized models were made with. Other runtimes run its models too.
It needs no training framework, and uses operators of ai.onnx for matmuls, which this compiler computes in 8 bits. It is
not installed with this package: `pip install onnxruntime`.

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

from .checking.references import create_session_options
from .errors import InputError
from .machine import describe_missing_package

Call: TypeAlias = Mapping[str, np.ndarray]

MATMULS = ("MatMul", "Gemm", "Conv")
"""The operators that are quantized."""

_MAX_BYTES = 2**31 - 2**20  # bytes of a protobuf


@dataclass(frozen=True)
class NodeAccuracy:
    """The relative rms error of a matmul, or of an output of the model, against the float model over all calls."""

    tensor: str
    operator: str
    node: str
    error: float


@dataclass(frozen=True)
class QuantizationReport:
    """The result of `quantize`.

    It has the bytes of both files, the number of matmuls, and the number of those in 8 bits. `nodes` are errors by
    node, the largest first, and `outputs` those of the outputs; both are empty without calls.
    """

    form: str
    bytes_before: int
    bytes_after: int
    matmuls: int
    quantized: int
    nodes: tuple[NodeAccuracy, ...]
    outputs: tuple[NodeAccuracy, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.quantized} of {self.matmuls} matmuls in 8 bits ({self.form}), "
            f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        ]
        lines += [f"output {accuracy.tensor}: error {accuracy.error:.2e}" for accuracy in self.outputs]
        if self.nodes:
            lines.append("matmuls with the largest errors (leave some out by --exclude NAME):")
            lines += [
                f"  {accuracy.error:.2e}  {accuracy.operator} '{accuracy.node}' giving '{accuracy.tensor}'"
                for accuracy in self.nodes[:10]
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
) -> QuantizationReport:
    """Write the model with its matmuls in 8 bits to a file, whole or not at all, and report the error.

    Args:
        model: The float model.
        output: The file to write.
        calls: Inputs by name, for calibration and for the errors of the report.
        form: "static" scales of activations follow from the calls, and are written between QuantizeLinear and
            DequantizeLinear. "dynamic" scales are computed in every call. The default is static if there are calls.
        weights: int8 or uint8.
        by_column: Whether weights have a scale for each column, or one for the whole matrix.
        exclude: Names of nodes that stay in floats.

    Returns:
        The sizes and the errors on the calls.

    Raises:
        InputError: The tool or onnxruntime rejects the model or the calls, or onnxruntime is not installed.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError("toolchain.package_missing", describe_missing_package("onnxruntime")) from error
    source, target = Path(model), Path(output)
    form = form or ("static" if calls else "dynamic")
    if form not in ("static", "dynamic") or weights not in ("int8", "uint8"):
        raise InputError(
            "quantize.option_unknown",
            f"form={form!r} and weights={weights!r} are not supported. Use 'static' or 'dynamic' as form, and 'int8' "
            "or 'uint8' as weights.",
        )
    if form == "static" and not calls:
        raise InputError(
            "quantize.calls_missing",
            "static scales are computed from calls, and none are given. Give some (--calls FILE.npz), or quantize "
            "dynamically.",
        )
    if not target.parent.is_dir():
        raise InputError(
            "quantize.folder_missing", f"there is no folder '{target.parent}' to write '{target.name}' to."
        )
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError("quantize.output_is_model", f"'{target}' is the model itself. Name another file.")
    try:
        graph = onnx.load(source, load_external_data=False).graph
    except OSError as error:
        raise InputError(
            "model.file_unreadable", f"the model '{source}' cannot be read: {error.strerror or error}."
        ) from error
    except Exception as error:
        raise InputError("model.invalid_onnx", f"'{source}' is not an ONNX model: {error}.") from error
    excluded = _name_nodes(graph, exclude)
    with tempfile.TemporaryDirectory(prefix=".quantize-", dir=target.parent) as folder:
        quantized_path = Path(folder) / target.name
        try:
            _run_tool(
                _save_named(source, graph, Path(folder)),
                quantized_path,
                calls or (),
                form,
                weights,
                by_column,
                excluded,
            )
        except Exception as error:
            raise InputError(
                "quantize.onnxruntime_failed", f"onnxruntime's tool cannot quantize the model: {error}"
            ) from error
        report = _make_report(source, quantized_path, graph, calls or (), form)
        os.replace(quantized_path, target)
    return report


def _name_nodes(graph: onnx.GraphProto, exclude: Sequence[str]) -> list[str]:
    """Name unnamed matmuls and convolutions by their first outputs, in place; return the names of excluded nodes.

    `exclude` has names of nodes or outputs.

    Raises:
        InputError: There is no such node.
    """
    nodes = [node for node in graph.node if node.op_type in MATMULS]
    names: dict[str, str] = {}
    for node in nodes:
        node.name = node.name or node.output[0]
        names |= {node.name: node.name, node.output[0]: node.name}
    for name in exclude:
        if name not in names:
            node_names = [node.name for node in nodes]
            shown_names = ", ".join(node_names[:8]) + (", ..." if len(node_names) > 8 else "")
            raise InputError(
                "quantize.node_unknown",
                f"exclude: the model has no {', '.join(MATMULS)} called '{name}'. It has {shown_names or 'none'}.",
            )
    return [names[name] for name in exclude]


def _save_named(source: Path, graph: onnx.GraphProto, folder: Path) -> Path:
    """Return a file of the model whose nodes have the names of the graph: itself, or a copy in the folder."""
    model = onnx.load(source, load_external_data=False)
    if [node.name for node in model.graph.node] == [node.name for node in graph.node]:
        return source
    onnx.external_data_helper.load_external_data_for_model(model, str(source.parent))
    for node, source_node in zip(model.graph.node, graph.node):
        node.name = source_node.name
    onnx.save(model, folder / "named.onnx", save_as_external_data=model.ByteSize() > _MAX_BYTES)
    return folder / "named.onnx"


def _run_tool(
    source: Path,
    quantized_path: Path,
    calls: Sequence[Call],
    form: str,
    weights: str,
    by_column: bool,
    exclude: Sequence[str],
) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    options: dict[str, Any] = {
        "weight_type": QuantType.QInt8 if weights == "int8" else QuantType.QUInt8,
        "per_channel": by_column,
        "op_types_to_quantize": [*MATMULS] if form == "static" else ["MatMul", "Gemm"],
        "nodes_to_exclude": list(exclude),
    }
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the tool recommends a preprocessing pass that has no effect here
    try:
        if form == "dynamic":
            quantize_dynamic(source, quantized_path, **options)
        else:
            options |= {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8}
            quantize_static(source, quantized_path, _CallReader(calls), **options)
    finally:
        root.setLevel(level)


class _CallReader:
    """The data reader of the tool's calibration."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._remaining: Iterator[Call] = iter(calls)

    def get_next(self) -> dict[str, np.ndarray] | None:
        call = next(self._remaining, None)
        return None if call is None else dict(call)


def _make_report(
    source: Path, quantized_path: Path, graph: onnx.GraphProto, calls: Sequence[Call], form: str
) -> QuantizationReport:
    quantized_graph = onnx.load(quantized_path).graph
    remaining = {name for node in quantized_graph.node if node.op_type in MATMULS for name in node.output}
    dequantized = {name for node in quantized_graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    floats = [
        node
        for node in quantized_graph.node
        if node.op_type in MATMULS and not {*node.input[:2]} <= dequantized and {*node.output} & remaining
    ]
    matmuls = [node for node in graph.node if node.op_type in MATMULS]
    nodes: list[NodeAccuracy] = []
    outputs: list[NodeAccuracy] = []
    if calls:
        computed = {name for node in quantized_graph.node for name in node.output}
        compared = {node.output[0]: node for node in matmuls if node.output[0] in computed}
        names = [*compared, *(value.name for value in graph.output if value.name not in compared)]
        errors = _measure_errors(source, quantized_path, names, calls)
        nodes = [NodeAccuracy(name, node.op_type, node.name, errors[name]) for name, node in compared.items()]
        outputs = [NodeAccuracy(value.name, "", "", errors[value.name]) for value in graph.output]
    size = source.stat().st_size + sum(path.stat().st_size for path in _list_external_files(source, graph))
    return QuantizationReport(
        form, size, quantized_path.stat().st_size, len(matmuls), len(matmuls) - len(floats),
        tuple(sorted(nodes, key=lambda accuracy: -accuracy.error)), tuple(outputs),
    )  # fmt: skip


def _list_external_files(source: Path, graph: onnx.GraphProto) -> set[Path]:
    """Return the files next to the model that have its weights."""
    locations = (entry for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location")
    return {path for entry in locations if (path := source.parent / entry.value).is_file()}


def _measure_errors(
    source: Path, quantized_path: Path, names: Sequence[str], calls: Sequence[Call]
) -> dict[str, float]:
    """Return the relative rms error of each tensor that both models compute."""
    sessions = [_create_session(path, names) for path in (source, quantized_path)]
    squares = {name: [0.0, 0.0] for name in names}
    for call in calls:
        try:
            results = [session.run(list(names), dict(call)) for session in sessions]
        except Exception as error:
            raise InputError(
                "quantize.onnxruntime_run_failed", f"onnxruntime cannot run the model on these calls: {error}"
            ) from error
        for name, float_result, quantized_result in zip(names, *results):
            exact = np.asarray(float_result, np.float64)
            squares[name][0] += float(np.square(np.asarray(quantized_result, np.float64) - exact).sum())
            squares[name][1] += float(np.square(exact).sum())
    return {
        name: float(np.sqrt(error_square / norm_square)) if norm_square else float(error_square > 0)
        for name, (error_square, norm_square) in squares.items()
    }


def _create_session(path: Path, names: Sequence[str]) -> Any:
    import onnxruntime

    model = onnx.load(path)
    model_outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in model_outputs)
    options = create_session_options()
    if model.ByteSize() < _MAX_BYTES:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "model.onnx", save_as_external_data=True)
        return onnxruntime.InferenceSession(Path(folder) / "model.onnx", options, ["CPUExecutionProvider"])
