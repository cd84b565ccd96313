"""Attacks: one node, the arrays of each of its calls, and the rule that gives the expected outcome.

A generator is registered for each operator by `@attacks(names)`. Files of generators lie in `generators/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import lowering.graph.loading.schemas  # noqa: F401  (the operators of onnxruntime)

from .draw import Draw

Arrays = list[np.ndarray | None]
# The result of a rule: the outputs, or None for those of the reference evaluator.
Answer = Sequence[np.ndarray] | None

# More elements than fit into the memory of an attack, and more than one takes time for.
TOO_MANY, MANY = 1 << 31, 1 << 22
MICROSOFT = "com.microsoft"


class Illegal(Exception):
    """The standard does not allow it, or no machine has the memory: an error must follow, and nothing else."""


class Unspecified(Exception):
    """The standard leaves the outcome open: any answer or error will do, but nothing may break."""


@dataclass
class Attack:
    """One node with attributes.

    `feed` draws the arrays of one call, of the same ranks and types each time; None is a hole. `rule` is asked with
    them. Inputs in `parameters` are more often constants of the model than others, those in `fixed` always. The axes
    (input, axis) in `numbers` are rarely symbolic: the compiler wants numbers there. `close` is a relative tolerance,
    next to that of the output's type. `results` are element types and ranks of the outputs, where onnx infers none.
    `domain_opset` is the version of a domain other than ai.onnx.
    """

    op: str
    feed: Callable[[], Arrays]
    rule: Callable[..., Answer]
    outputs: int = 1
    domain: str = ""
    opset: int = 24
    domain_opset: int = 1
    parameters: Collection[int] = ()
    fixed: Collection[int] = ()
    numbers: Collection[tuple[int, int]] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    close: float = 0.0
    results: Sequence[tuple[str, int]] = ()


Generator = Callable[[Draw, str], Attack]
GENERATORS: dict[tuple[str, str], Generator] = {}


def attacks(*names: str, domain: str = "") -> Callable[[Generator], Generator]:
    def register(generator: Generator) -> Generator:
        for name in names:
            assert (domain, name) not in GENERATORS, name
            GENERATORS[domain, name] = generator
        return generator

    return register


def require(condition: Any, why: str) -> None:
    if not condition:
        raise Illegal(why)


def normalize_axis(axis: int, rank: int, what: str = "axis") -> int:
    """Return the axis counted from the front."""
    require(-rank <= axis < rank, f"{what} {axis} of rank {rank}")
    return axis + rank if axis < 0 else axis


def check_elements(dims: Sequence[int]) -> None:
    """Require that a tensor of these dimensions can exist."""
    require(all(d >= 0 for d in dims), f"negative size in {list(dims)}")
    elements = int(np.prod(dims, dtype=object))
    require(elements < TOO_MANY, f"{list(dims)} is too large")
    if int(np.prod([max(d, 1) for d in dims], dtype=object)) > MANY:  # also of empty tensors
        raise Unspecified(f"{list(dims)} may or may not be too large")


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*map(tuple, shapes))
    except ValueError:
        raise Illegal(f"{shapes} do not broadcast") from None


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model of one node, and the arrays of its calls by position."""

    attack: Attack
    model: onnx.ModelProto
    names: list[str]  # of the inputs, "" for holes
    declared: dict[int, list[int | str]]  # dimensions of the graph's inputs, by position
    calls: list[Arrays]

    def feeds(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that the model takes, by name."""
        return {self.names[k]: a for k, a in enumerate(arrays) if k in self.declared and a is not None}

    def __str__(self) -> str:
        descriptions = []
        for k, array in enumerate(self.calls[0]):
            if array is None:
                descriptions.append("-")
                continue
            dims = ", ".join(map(str, self.declared.get(k, ())))
            descriptions.append(
                f"x{k}: {array.dtype}[{dims}]" if k in self.declared else f"constant x{k} = {describe_array(array)}"
            )
        return f"{self.attack.op}-{self.attack.opset}({', '.join(descriptions)}) {self.attack.attributes}"


def describe_array(array: np.ndarray | None) -> str:
    """Return the type and the shape of an array as text, and the elements of a small one."""
    if array is None:
        return "-"
    numbers = array.ravel().tolist() if array.size <= 12 else "..."
    return f"{array.dtype}{list(array.shape)} {numbers}"


def make_case(draw: Draw, attack: Attack, calls: int) -> Case:
    """Draw a form of the model: sizes static or symbolic, arrays as inputs or constants."""
    first = attack.feed()
    symbolic = draw.pick((0.0, 1.0, 1.0, 0.5))
    shared, constants = draw.chance(0.4), draw.pick((0.0, 0.0, 0.0, 0.3, 1.0))
    names: list[str] = []
    declared: dict[int, list[int | str]] = {}
    for k, array in enumerate(first):
        names.append("" if array is None else f"x{k}")
        if array is None or k in attack.fixed:
            continue
        if draw.chance(max(constants, 0.6) if k in attack.parameters else constants):
            continue
        declared[k] = []
        for axis, size in enumerate(array.shape):
            is_static = (k, axis) in attack.numbers or (k, axis - array.ndim) in attack.numbers or size == 1
            named = draw.chance(symbolic) and (not is_static or draw.chance(0.08))
            declared[k].append((f"d{size}" if shared else f"d{k}_{axis}") if named else size)
    more = [attack.feed() for _ in range(calls - 1)] if symbolic and declared else []
    for arrays in more:  # constants stay what they are
        arrays[:] = [a if k in declared else first[k] for k, a in enumerate(arrays)]
    return Case(attack, _model(attack, names, declared, first), names, declared, [first, *more])


def contradiction(case: Case, arrays: Arrays) -> str | None:
    """Return how the arrays differ from those that the model declares, or None."""
    sizes: dict[str, int] = {}
    for k, dims in case.declared.items():
        array = arrays[k]
        assert array is not None
        for dim, size in zip(dims, array.shape):
            if (sizes.setdefault(dim, size) if isinstance(dim, str) else dim) != size:
                return f"{case.names[k]} has {size} in place of {dim}"
    return None


def _model(attack: Attack, names: list[str], declared: dict[int, list[int | str]], arrays: Arrays) -> onnx.ModelProto:
    results = [f"y{k}" for k in range(attack.outputs)]
    node = helper.make_node(attack.op, names, results, name="node", domain=attack.domain)
    for name, value in attack.attributes.items():
        if value is not None:
            kind = onnx.AttributeProto.INTS if value in ([], ()) else None
            node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    inputs = [
        helper.make_tensor_value_info(names[k], helper.np_dtype_to_tensor_dtype(arrays[k].dtype), dims)  # type: ignore[union-attr]
        for k, dims in declared.items()
    ]
    constants = [
        numpy_helper.from_array(a, names[k]) for k, a in enumerate(arrays) if a is not None and k not in declared
    ]
    opsets = [helper.make_opsetid("", attack.opset)]
    if attack.domain:
        opsets.append(helper.make_opsetid(attack.domain, attack.domain_opset))
    outputs = [helper.make_empty_tensor_value_info(r) for r in results]
    graph = helper.make_graph([node], "attack", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    _declare_outputs(model, attack)
    return model


def _declare_outputs(model: onnx.ModelProto, attack: Attack) -> None:
    """Declare the types that the attack gives or ONNX infers, else of the first input; sizes stay open."""
    inferred: Sequence[onnx.ValueInfoProto] = []
    if attack.attributes.get("batch_dims", 0) >= 0:  # else onnx reads foreign memory, and crashes
        with suppress(Exception):  # an illegal model
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
    element = model.graph.initializer[0].data_type if model.graph.initializer else onnx.TensorProto.FLOAT
    if model.graph.input:
        element = model.graph.input[0].type.tensor_type.elem_type
    for k, output in enumerate(model.graph.output):
        if k < len(attack.results):
            dtype, rank = attack.results[k]
            _declare(output, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), rank)
            continue
        kind = inferred[k].type.tensor_type if k < len(inferred) else None
        if kind is None or not kind.elem_type:
            _declare(output, element, 1)
        else:
            _declare(output, kind.elem_type, len(kind.shape.dim) if kind.HasField("shape") else 1)


def declare_as(model: onnx.ModelProto, answer: Sequence[np.ndarray]) -> None:
    """Declare the outputs with the types and ranks of an answer."""
    for output, array in zip(model.graph.output, answer):
        _declare(output, helper.np_dtype_to_tensor_dtype(array.dtype), array.ndim)


def _declare(output: onnx.ValueInfoProto, element: int, rank: int) -> None:
    dims = [f"{output.name}_{axis}" for axis in range(rank)]
    output.CopyFrom(helper.make_tensor_value_info(output.name, element, dims))
