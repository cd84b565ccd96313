"""Random models of operators that move elements, of every type, with inputs of random bits.

NumPy moves the bits, as unsigned integers, as each node of the model moves elements: one that is only moved has the
same bits in the output. Chains of movers become fused kernels. In a mixture some elements are computed: their bits
are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 24
HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float", "double")
FLOAT8 = ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "float8e8m0")
FOUR_BITS = ("int4", "uint4", "float4e2m1")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TYPES = (*FLOATS, *FLOAT8, *FOUR_BITS, *INTEGERS, "bool", "complex64", "complex128")

_ONNX = {name: getattr(TensorProto, name.upper()) for name in TYPES}
_NUMPY = {name: helper.tensor_dtype_to_np_dtype(number) for name, number in _ONNX.items()}

# Infinities, zeros, subnormal numbers and NaNs: quiet and signaling ones, of either sign.
_SPECIAL = {
    "float16": (0x7C01, 0xFC01, 0x7D55, 0x7E00, 0xFE01, 0x7FFF, 0xFFFF, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x83FF),
    "bfloat16": (0x7F81, 0xFF81, 0x7FA5, 0x7FC0, 0xFFC1, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F),
    "float": (0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC12345, 0x7FFFFFFF, 0x7F800000, 0x80000000, 0x00000001),
    "double": (0x7FF0000000000001, 0xFFF0000000000001, 0x7FF8000000000000, 0x7FF0000000000000, 1 << 63, 1),
}


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw elements of random bits, half of them special where the type has NaNs with several patterns."""
    kind = _NUMPY[dtype]
    if dtype == "complex128":
        pairs = random_bits(rng, "double", (*shape, 2))
        return np.ascontiguousarray(pairs).view("V16").reshape(shape)
    size = kind.itemsize
    limit = 2 if dtype == "bool" else 16 if dtype in FOUR_BITS else 1 << (8 * size)
    bits = rng.integers(0, limit, shape, dtype="uint64").astype(f"uint{8 * size}")
    special = _SPECIAL.get(dtype)
    if special:
        bits = np.where(rng.random(shape) < 0.5, rng.choice(np.array(special, bits.dtype), shape), bits)
    return np.asarray(bits)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    kind = _NUMPY[dtype]
    if dtype == "int4":  # ml_dtypes extends the sign
        bits = np.where(bits & 8, bits | 0xF0, bits).astype("uint8")
    return np.ascontiguousarray(bits).view(kind).reshape(bits.shape)


def to_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    array = np.ascontiguousarray(array)
    bits = array.view("V16" if dtype == "complex128" else f"uint{8 * array.itemsize}").reshape(array.shape)
    return bits & np.uint8(15) if dtype in FOUR_BITS else bits


@dataclass
class Tensor:
    """A value of the model; compared marks the elements whose bits are defined."""

    name: str
    dtype: str
    bits: np.ndarray
    compared: np.ndarray

    @property
    def rank(self) -> int:
        return self.bits.ndim


@dataclass
class Model:
    """The model under construction, the values of its inputs, and its expected outputs."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    names: int = 0

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}_{self.names}"

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Draw sizes, of which some are multiples of eight, and some are odd or prime."""
        rank = int(self.rng.integers(2, 5)) if rank is None else rank
        outer = (int(self.rng.choice([1, 2, 3, 5, 8])) for _ in range(rank - 1))
        return (*outer, int(self.rng.choice([1, 3, 8, 16, 17, 40])))

    def tensor(self, dtype: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Add a new input, or now and then a weight."""
        shape = self.shape() if shape is None else shape
        bits, name = random_bits(self.rng, dtype, shape), self.name(dtype)
        if self.rng.random() < 0.2 and dtype not in FOUR_BITS:
            self.initializers.append(
                helper.make_tensor(name, _ONNX[dtype], shape, np.ascontiguousarray(bits).tobytes(), raw=True)
            )
        else:
            self.inputs.append(helper.make_tensor_value_info(name, _ONNX[dtype], shape))
            self.arrays[name] = from_bits(bits, dtype)
        return Tensor(name, dtype, bits, np.ones(shape, bool))

    def constant(self, array: Any, dtype: str = "int64") -> str:
        array, name = np.array(array, dtype), self.name("constant")
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def add_input(self, array: Any, dtype: str = "int64") -> str:
        """Add an input that is not of the element type under test: indices, conditions."""
        array, name = np.array(array, dtype), self.name("given")
        kind = TensorProto.BOOL if dtype == "bool" else TensorProto.INT64
        self.inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
        self.arrays[name] = array
        return name

    def node(self, operator: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        names = [self.name(operator) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names

    def moved(
        self, x: Tensor, move: Callable[[np.ndarray], np.ndarray], operator: str, *inputs: str, **attributes: Any
    ) -> Tensor:
        """Add a node whose first input is x, and return its result."""
        (name,) = self.node(operator, [x.name, *inputs], **attributes)
        return Tensor(name, x.dtype, move(x.bits), move(x.compared))

    def output(self, value: Tensor) -> None:
        self.outputs.append(value)

    def proto(self) -> onnx.ModelProto:
        outputs = [helper.make_tensor_value_info(t.name, _ONNX[t.dtype], t.bits.shape) for t in self.outputs]
        graph = helper.make_graph(self.nodes, "movers", self.inputs, outputs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)

    def wrong(self, results: dict[str, np.ndarray]) -> list[str]:
        """Return the outputs of which an element that was moved has other bits."""
        differences = []
        for expected in self.outputs:
            bits = to_bits(np.asarray(results[expected.name]), expected.dtype)
            if bits.shape != expected.bits.shape:
                differences.append(f"{expected.name} of {expected.dtype}: shape {bits.shape}")
                continue
            differ = (bits != expected.bits) & expected.compared
            if differ.any():
                at = tuple(int(i) for i in np.argwhere(differ)[0])
                pair = f"{bits[at]!r} for {expected.bits[at]!r}"
                differences.append(
                    f"{expected.name} of {expected.dtype}: {differ.sum()} of {differ.size}, {pair} at {at}"
                )
        return differences


def takes(operator: str, dtype: str) -> bool:
    """Return whether ONNX has the operator for that type of the elements it moves."""
    schema = onnx.defs.get_schema(operator, OPSET)
    number = {"Where": 1, "OneHot": 2, "ConstantOfShape": 0}.get(operator, 0)
    if dtype == "complex128" and operator in ("ScatterElements", "ScatterND", "Pad"):
        return False  # these are refused for complex128
    types = schema.outputs[0].types if operator == "ConstantOfShape" else schema.inputs[number].types
    return f"tensor({dtype})" in types
