"""The ONNX backend node cases, collected from the installed onnx package, through compile -> save -> load -> run.

A case belongs to the operator of its one node; an expanded case (the operator's function body as a graph) belongs to
the operator of the case it was made from. Cases are chosen by operator and element type, never by name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as case_package

import lowering
from lowering.backend import declare_ranks, read_counts_and_ranks
from lowering.graph.loading.list_inputs import split_list_inputs
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import list_registered, lookup

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

# Operators whose cases must pass on every type; for the others, those of strings and of floats,
# integers and bools of 8 bits or more count.
EVERY_TYPE = ("Attention", "FlexAttention", "TensorScatter")

# Domains of the standard with operators that have cases here.
DOMAINS = ("", "ai.onnx", "ai.onnx.preview", "ai.onnx.ml")

# Expected values that are rounded float32 accumulators: zeros among them are noise.
NOISE = {"DFT": 1e-6, "STFT": 1e-6}

# Two units of the last digit, relative.
TWO_UNITS = {"bfloat16": 2**-6, "float16": 2**-9}
_WIDE_ENOUGH = {
    getattr(onnx.TensorProto, name)
    for name in (
        "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FLOAT16", "BFLOAT16",
        "FLOAT", "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "STRING",
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, its inputs and expected outputs in the order of the graph, and how close they must be.

    Sequences are lists of arrays, and optional values without an element are None.
    """

    name: str
    operator: str
    model: onnx.ModelProto
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
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

    def assert_expected(self, actual: Any, expected: Any, name: str) -> None:
        """Assert that an output is as expected: of the type and shape alone if it is random."""
        if self.is_random:
            expected = np.broadcast_to(actual, expected.shape).astype(expected.dtype)
        assert_close(actual, expected, self.rtol, self.atol, name)

    @property
    def wide_enough(self) -> bool:
        """Whether all inputs and outputs are of numbers of 8 bits or more, or of strings."""
        values = (*self.model.graph.input, *self.model.graph.output)
        return all(_tensor_type(v.type).elem_type in _WIDE_ENOUGH for v in values)

    @property
    def named_inputs(self) -> dict[str, Any]:
        return dict(zip((value.name for value in self.model.graph.input), self.inputs))


def _tensor_type(kind: onnx.TypeProto) -> onnx.TypeProto.Tensor:
    """Return the type of a tensor, or of the tensors in a sequence or an optional value."""
    while not kind.HasField("tensor_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    return kind.tensor_type


def operators() -> list[str]:
    """Return the operators above, and all others of the standard that have a lowering and cases."""
    registered = {name for domain, name in list_registered() if domain in DOMAINS and name in _modules()}
    return sorted({*OPERATORS, *EVERY_TYPE, *registered})


def expandable() -> set[str]:
    """The operators that the standard writes out as functions: those with expanded cases."""
    schemas = (schema for schema in onnx.defs.get_all_schemas() if schema.domain in DOMAINS)
    return {schema.name for schema in schemas if schema.has_function or schema.has_context_dependent_function}


def cases(operator: str) -> list[Case]:
    """The cases of an operator of the standard, on the types that count."""
    modules = _modules()
    for module in modules[operator] if operator in modules else itertools.chain(*modules.values()):
        _import(module)
    return [c for c in _found().get(operator, []) if operator in EVERY_TYPE or c.wide_enough]


def every_case() -> dict[str, list[Case]]:
    """All cases of the installed onnx package by operator, whatever their types are."""
    for module in itertools.chain(*_modules().values()):
        _import(module)
    return dict(sorted(_found().items()))


@dataclass(frozen=True)
class NodeModel:
    """A case of any operator and type, with the inputs of its first call by name, and the outputs in order: arrays,
    lists of them, and None."""

    name: str
    operator: str
    proto: onnx.ModelProto
    inputs: dict[str, Any]
    outputs: Sequence[Any]


def every_model(operator: str | None = None) -> Iterator[NodeModel]:
    """Every case of the installed onnx package, or those of an operator of any domain."""
    modules = _modules()
    for module in itertools.chain(*modules.values()) if operator is None else modules[operator]:
        _import(module)
    first = {case.name: case.model.graph.node[0].op_type for case in case_package._NodeTestCases}
    for case in case_package._NodeTestCases:
        name = first.get(case.name.partition("_expanded")[0], first[case.name])
        if operator in (None, name):
            inputs, outputs = ([*map(_plain, values)] for values in case.data_sets[0])
            named = dict(zip((value.name for value in case.model.graph.input), inputs))
            yield NodeModel(case.name, name, case.model, named, outputs)


def with_constant_vectors(model: NodeModel) -> NodeModel:
    """Turn inputs of at most one dimension into constants of the model, as exporters do: axes, sizes, steps."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    inputs = dict(model.inputs)
    for value in model.proto.graph.input:
        array = inputs[value.name]
        if isinstance(array, np.ndarray) and array.ndim < 2:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            proto.graph.input.remove(value)
            del inputs[value.name]
    return dataclasses.replace(model, proto=proto, inputs=inputs)


def fitted(model: onnx.ModelProto, inputs: dict[str, Any]) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return the model as it can be compiled for these inputs, and its dims: the number of elements of each list."""
    counts, ranks = read_counts_and_ranks(model, inputs)
    return declare_ranks(model, ranks) if counts else model, counts


def refusal_of(model: onnx.ModelProto, inputs: dict[str, Any]) -> str | None:
    """Return the compiler's reason why it cannot lower a case, or None if it can. Nothing is compiled."""
    model, dims = fitted(model, inputs)
    try:
        import_model(split_list_inputs(load_model(model), dims).model, lookup)
    except lowering.LoweringError as error:
        return str(error)
    return None


@functools.cache
def _modules() -> dict[str, list[str]]:
    """By operator, the modules of onnx's that make its cases. They have a class of the operator's name, which makes
    them when it is imported: those of pooling take seconds."""
    folder, modules = Path(case_package.__file__).parent, dict[str, list[str]]()
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((case_package.__name__, *path.relative_to(folder).with_suffix("").parts))
        for name in re.findall(r"^class (\w+)\(Base\)", path.read_text(), re.MULTILINE):
            modules.setdefault(name, []).append(module)
    return modules


@functools.cache
def _import(module: str) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases divide by zero and overflow on purpose
        importlib.import_module(module)


def _found() -> dict[str, list[Case]]:
    """Return the cases that were created until now, by operator: all names are unique."""
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
            arrays = (map(_plain, values) for values in (inputs, outputs))
            operator = _READ.operators[stem]
            atol = max(case.atol, NOISE.get(operator, 0))
            case_record = Case(case.name, operator, case.model, *map(tuple, arrays), case.rtol, atol)
            _READ.by_operator.setdefault(operator, []).append(case_record)
    return _READ.by_operator


@dataclass
class _Read:
    """How many cases of onnx's list were read, the operators of unexpanded ones by name, and all cases by operator."""

    cases: int = 0
    operators: dict[str, str] = field(default_factory=dict)
    by_operator: dict[str, list[Case]] = field(default_factory=dict)


_READ = _Read()


def with_constants(case: Case) -> Case:
    """Turn all inputs but the first into constants of the model, as exporters do: axes, scales, sizes."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for value, array in list(zip(model.graph.input, case.inputs))[1:]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    return dataclasses.replace(case, model=model, inputs=case.inputs[:1])


def _plain(value: Any) -> Any:
    """Return an array, a list of arrays, or None."""
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return None if value is None else np.asarray(value)


def run(case: Case) -> None:
    """Compile, save, load and run a case. Raise what the compiler raises, or AssertionError for a wrong output."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "artifact"
        fitting, dims = fitted(case.model, case.named_inputs)
        lowering.compile(fitting, dims=dims).save(saved)
        model = lowering.load(saved)
        results = model.run(case.named_inputs)
        for name, expected in zip(results, case.outputs, strict=True):
            case.assert_expected(results[name], expected, name)


def assert_close(actual: Any, expected: Any, rtol: float, atol: float, name: str = "") -> None:
    """Assert the same type and shape, elements as close as onnx's own runner asks, and lists of one length.

    onnx's runner allows bfloat16 two units of the last digit. float16 gets the same: a model of several float16 nodes
    rounds between them, and expected values that were rounded at other nodes can be the less accurate ones.
    """
    if isinstance(expected, list) or expected is None:
        assert type(actual) is type(expected), f"{name}: {type(actual)} instead of {type(expected)}"
        for left, right in zip(actual or (), expected or (), strict=True):
            assert_close(left, right, rtol, atol, name)
        return
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
    """Return the compiler's reason why it cannot lower the case, or None if it can. Nothing is compiled."""
    return refusal_of(case.model, case.named_inputs)


def refused(names: Iterable[str]) -> Iterator[tuple[Case, str]]:
    """Yield the cases of these operators that cannot be lowered, each with the reason."""
    for name in names:
        for case in cases(name):
            reason = refusal(case)
            if reason is not None:
                yield case, reason
