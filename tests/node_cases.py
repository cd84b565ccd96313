"""The ONNX backend node cases, collected from the installed onnx package, through compile -> save -> load -> run.

A case belongs to the operator of its one node; an expanded case (the operator's function body as a graph) belongs to
the operator of the case it was made from. Cases are chosen by operator and element type, never by name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test.case.node as case_package

import lowering
from lowering.graph.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import registered

# Operators of transformers.
OPERATORS = (
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Clip", "Concat", "Constant", "ConstantOfShape",
    "Conv", "ConvInteger", "Cos", "CumSum", "DequantizeLinear", "Div", "DynamicQuantizeLinear", "Equal", "Erf",
    "Exp", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual",
    "Identity", "If", "IsNaN", "LayerNormalization", "Less", "LessOrEqual", "Log", "MatMul", "MatMulInteger", "Max",
    "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Pow", "QLinearConv", "QLinearMatMul",
    "QuantizeLinear", "RMSNormalization", "Range", "Reciprocal", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "ScatterND", "Shape",
    "Sigmoid", "Sin", "Size", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Swish", "Tanh", "Tile",
    "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
)  # fmt: skip

# Operators whose cases must pass on every type; for the others, floats, integers and bools of 8 bits or more count.
EVERY_TYPE = ("Attention", "FlexAttention", "TensorScatter")

# Domains of the standard with operators that have cases here.
DOMAINS = ("", "ai.onnx", "ai.onnx.preview")

# Whose expected values are rounded sums of float32: zeros among them are noise.
NOISE = {"DFT": 1e-6, "STFT": 1e-6}

# Two units in the last place, relative.
TWO_UNITS = {"bfloat16": 2**-6, "float16": 2**-9}
_WIDE_ENOUGH = {
    getattr(onnx.TensorProto, name)
    for name in (
        "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FLOAT16", "BFLOAT16",
        "FLOAT", "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0",
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, its inputs and expected outputs in the order of the graph, and how close they must be."""

    name: str
    operator: str
    model: onnx.ModelProto
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    rtol: float
    atol: float

    @property
    def expanded(self) -> bool:
        """Whether the operator is written out, as the standard's function of it is."""
        return "_expanded" in self.name

    @property
    def is_random(self) -> bool:
        """Whether the expected values are draws of another generator, of which types and shapes alone count."""
        ratio = self.inputs[1] if len(self.inputs) > 1 else 0.5
        training = self.operator == "Dropout" and len(self.inputs) > 2 and bool(self.inputs[2]) and ratio != 0
        return training or self.operator == "Bernoulli"

    @property
    def wide_enough(self) -> bool:
        """Whether all inputs and outputs are tensors of elements of 8 bits or more, and numbers."""
        return all(
            v.type.HasField("tensor_type") and v.type.tensor_type.elem_type in _WIDE_ENOUGH
            for v in (*self.model.graph.input, *self.model.graph.output)
        )


SEQUENCES = {"SequenceInsert", "SplitToSequence"}
"""Operators whose cases all have sequences as inputs or outputs of the model."""


def operators() -> list[str]:
    """The operators above, and all others of the standard that have a lowering and cases of tensors."""
    others = {name for domain, name in registered() if domain in DOMAINS and name in _modules()}
    return sorted({*OPERATORS, *EVERY_TYPE, *others} - SEQUENCES)


def expandable() -> set[str]:
    """The operators that the standard writes out as functions: those with expanded cases."""
    schemas = (schema for schema in onnx.defs.get_all_schemas() if schema.domain in DOMAINS)
    return {schema.name for schema in schemas if schema.has_function or schema.has_context_dependent_function}


def cases(operator: str) -> list[Case]:
    """The cases of an operator of the standard, on the types that count."""
    modules = _modules()
    for module in [modules[operator]] if operator in modules else modules.values():
        _import(module)
    return [c for c in _found().get(operator, []) if operator in EVERY_TYPE or c.wide_enough]


def every_case() -> dict[str, list[Case]]:
    """All cases of the installed onnx package by operator, whatever their types are."""
    for module in _modules().values():
        _import(module)
    return dict(sorted(_found().items()))


@functools.cache
def _modules() -> dict[str, str]:
    """By operator, the module of onnx's that makes its cases. It has a class of the operator's name, which makes them
    when it is imported: those of pooling take seconds."""
    folder = Path(case_package.__file__).parent
    return {
        name: ".".join((case_package.__name__, *path.relative_to(folder).with_suffix("").parts))
        for path in sorted(folder.rglob("*.py"))
        for name in re.findall(r"^class (\w+)\(Base\)", path.read_text(), re.MULTILINE)
    }


@functools.cache
def _import(module: str) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases divide by zero and overflow on purpose
        importlib.import_module(module)


def _found() -> dict[str, list[Case]]:
    """The cases that were made until now, by operator: no two have one name."""
    for case in case_package._NodeTestCases[_READ.cases :]:
        _READ.cases += 1
        stem = case.name.partition("_expanded")[0]
        if stem == case.name:
            nodes = case.model.graph.node
            if len(nodes) != 1 or nodes[0].domain not in DOMAINS:
                continue
            _READ.operators[stem] = nodes[0].op_type
        if stem not in _READ.operators:
            continue
        for inputs, outputs in case.data_sets:
            arrays = ([_array(v) for v in values] for values in (inputs, outputs))
            operator = _READ.operators[stem]
            atol = max(case.atol, NOISE.get(operator, 0))
            made = Case(case.name, operator, case.model, *map(tuple, arrays), case.rtol, atol)
            _READ.by_operator.setdefault(operator, []).append(made)
    return _READ.by_operator


@dataclass
class _Read:
    """Of onnx's list so many cases were read: the operators of those that are not expanded, by name, and all."""

    cases: int = 0
    operators: dict[str, str] = field(default_factory=dict)
    by_operator: dict[str, list[Case]] = field(default_factory=dict)


_READ = _Read()


def with_constants(case: Case) -> Case:
    """All inputs but the first become constants of the model, as exporters have them: axes, scales, sizes."""
    made = onnx.ModelProto()
    made.CopyFrom(case.model)
    for value, array in list(zip(made.graph.input, case.inputs))[1:]:
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        made.graph.input.remove(value)
    return dataclasses.replace(case, model=made, inputs=case.inputs[:1])


def _array(value: object) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value, _kind(value))


def _kind(value: object) -> type | None:
    """Sequences and optionals are kept as objects: they are filtered by type, not looked at."""
    return object if isinstance(value, (list, tuple)) or value is None else None


def run(case: Case) -> None:
    """Compiles, saves, loads and runs a case. Raises what the compiler raises, or AssertionError for a wrong output."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "artifact"
        lowering.compile(case.model).save(saved)
        model = lowering.load(saved)
        results = model.run(dict(zip((t.name for t in model.inputs), case.inputs)))
        for spec, expected in zip(model.outputs, case.outputs, strict=True):
            actual = results[spec.name]
            expected = (
                expected if not case.is_random else np.broadcast_to(actual, expected.shape).astype(expected.dtype)
            )
            assert_close(actual, expected, case.rtol, case.atol, spec.name)


def assert_close(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float, name: str = "") -> None:
    """Type and shape must be the same, elements as close as onnx's own runner asks.

    That runner allows bfloat16 two units in the last place. float16 gets the same: a model of several float16 nodes
    rounds between them, and expected values that were rounded in other places can be the less accurate ones.
    """
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} instead of {expected.shape}"
    if expected.dtype == object:
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        return
    rtol = max(rtol, TWO_UNITS.get(expected.dtype.name, 0))
    if expected.dtype.kind not in "biufc":  # ml_dtypes
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=name)


def refusal(case: Case) -> str | None:
    """Why the case cannot be lowered, in the compiler's words; None if it can be. Nothing is compiled."""
    try:
        import_model(load_model(case.model))
    except lowering.LoweringError as error:
        return str(error)
    return None


def refused(names: Iterable[str]) -> Iterator[tuple[Case, str]]:
    """The cases of these operators that cannot be lowered, each with the reason."""
    for name in names:
        for case in cases(name):
            reason = refusal(case)
            if reason is not None:
                yield case, reason
