"""The cache update: kernels against a loop over rows, and the operator TensorScatter through the compiler."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - registers its types with NumPy
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowering
from lowering.errors import NodeError
from lowering.importing.importer import import_model
from lowering.ops import lookup
from lowering.tensorir.scatter import CacheUpdate, in_place, make_copying_update
from tests.cases.scatter_cases import Case, expected, random_bits, random_rows, same_bits

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
STORAGE = ("float32", "float16", "bfloat16", "float64", "bool", "int8", "uint16", "int32", "uint64")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(2, 5))
    axis = draw(st.integers(1, rank - 1))
    dims = tuple(draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)))
    length = draw(st.integers(0, dims[axis]))
    hidden = draw(st.lists(st.booleans(), min_size=rank + 1, max_size=rank + 1))
    update = CacheUpdate(
        dtype=draw(st.sampled_from(STORAGE)),
        dims=tuple(None if hide else d for d, hide in zip(dims, hidden)),
        length=None if hidden[-1] else length,
        axis=axis,
        circular=draw(st.booleans()),
        indices=draw(st.booleans()),
    )
    return Case(update, dims, length, tuple(draw(st.lists(st.integers(-9, 9), min_size=dims[0], max_size=dims[0]))))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 2**16))
def test_kernels_write_the_rows_and_nothing_else(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, rows = random_rows(rng, case)
    copying = make_copying_update(case.update)
    functions = {"copying": copying, "in_place": in_place(copying)}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    compiled = tvm.compile(module, target=TARGET)
    arguments = [tvm.runtime.tensor(x) for x in (cache, rows)]
    if case.update.indices:
        arguments.append(tvm.runtime.tensor(np.array(case.indices, np.int64)))
    present = tvm.runtime.tensor(random_bits(rng, case.update.dtype, case.dims))
    want = expected(case, cache, rows)
    compiled["copying"](*arguments, present)
    assert same_bits(present.numpy(), want)
    assert same_bits(arguments[0].numpy(), cache)
    compiled["in_place"](*arguments)
    assert same_bits(arguments[0].numpy(), want)
    assert same_bits(arguments[1].numpy(), rows)


# The operator. One model contains many nodes, so that one compilation serves them all.

TYPES = {
    "float": "float32", "float16": "float16", "bfloat16": "bfloat16", "double": "float64", "bool": "bool",
    "int4": "int4", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint4": "uint4", "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    "float8e4m3fn": "float8_e4m3fn", "float8e4m3fnuz": "float8_e4m3fnuz", "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz", "float8e8m0": "float8_e8m0fnu", "float4e2m1": "float4_e2m1fn",
    "complex64": "complex64", "complex128": "complex128", "string": "object",
}  # fmt: skip


def model(inputs: list[str], outputs: list[str], nodes: list[str]) -> onnx.ModelProto:
    text = f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}"
    return onnx.parser.parse_model(f'<ir_version: 12, opset_import: ["" : 24]>\n{text}')


def elements(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "object":
        return np.array([f"s{n}" for n in rng.integers(0, 9, shape).flat], object).reshape(shape)
    if dtype in ("int4", "uint4", "float4_e2m1fn"):
        return rng.integers(0, 8, shape).astype(dtype)
    return random_bits(rng, dtype, shape)


def test_every_type_is_copied_bit_by_bit() -> None:
    inputs = ["int64[2] at"] + [f"{t}[2, N, 3] cache_{t}, {t}[2, 2, 3] rows_{t}" for t in TYPES]
    outputs = [f"{t}[2, N, 3] present_{t}" for t in TYPES]
    nodes = [f"present_{t} = TensorScatter (cache_{t}, rows_{t}, at)" for t in TYPES]
    compiled = lowering.compile(model(inputs, outputs, nodes))
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {"at": np.array([3, 0], np.int64)}
    for t, dtype in TYPES.items():
        arrays |= {f"cache_{t}": elements(rng, dtype, (2, 5, 3)), f"rows_{t}": elements(rng, dtype, (2, 2, 3))}
    results = compiled.run(arrays)
    for t in TYPES:
        want = arrays[f"cache_{t}"].copy()
        want[0, 3:5], want[1, 0:2] = arrays[f"rows_{t}"]
        if t == "string":
            assert np.array_equal(results[f"present_{t}"], want)
        else:
            assert same_bits(results[f"present_{t}"], want), t


@dataclass(frozen=True)
class Node:
    """One node and its call: dims of the cache, rows to write, attributes, write indices (None: left out)."""

    dims: tuple[int, ...]
    length: int
    axis: int | None = None
    mode: str | None = None
    at: tuple[int, ...] | None = None


NODES = [
    Node((2, 5), 2, axis=1, at=(3, 0)),
    Node((2, 5), 2, axis=-1, at=(3, 0)),
    Node((2, 3, 5), 2, axis=1, at=(1, 0)),
    Node((2, 3, 5), 2, axis=-1, at=(1, 3)),
    Node((2, 3, 5, 4), 2, at=(1, 3)),
    Node((2, 3, 5, 4), 2),
    Node((2, 3, 5, 4), 2, mode="circular"),
    Node((2, 3, 5, 4), 5, at=(0, 0)),
    Node((2, 3, 5, 4), 5, mode="circular", at=(3, 12)),
    Node((2, 3, 5, 4), 3, mode="circular", at=(-1, 4)),
    Node((2, 3, 5, 4), 0, at=(5, 0)),
    Node((7, 3, 4, 2), 3, mode="circular", at=(0, 1, 2, 3, 4, 5, 6)),
    Node((2, 2, 3, 4, 2), 2, axis=2, at=(0, 1)),
    Node((2, 2, 3, 4, 2), 2, axis=-2, mode="linear", at=(0, 2)),
    Node((2, 3, 5, 4), 3, at=(4, -2)),
]


@pytest.mark.parametrize("symbolic", [False, True])
def test_every_axis_rank_and_mode(symbolic: bool) -> None:
    inputs, outputs, nodes, arrays, references = [], [], [], {}, {}
    rng = np.random.default_rng(0)
    for k, n in enumerate(NODES):
        axis = (-2 if n.axis is None else n.axis) % len(n.dims)
        rows = tuple(n.length if a == axis else d for a, d in enumerate(n.dims))
        shapes = {f"cache_{k}": n.dims, f"rows_{k}": rows}
        for name, dims in shapes.items():
            text = ", ".join(f"{name}_{a}" if symbolic and a in (0, axis) else str(d) for a, d in enumerate(dims))
            inputs.append(f"float[{text}] {name}")
            arrays[name] = rng.standard_normal(dims).astype(np.float32)
        stated = [f"axis = {n.axis}"] * (n.axis is not None) + [f'mode = "{n.mode}"'] * (n.mode is not None)
        attributes = f"<{', '.join(stated)}>" if stated else ""
        if n.at is not None:
            inputs.append(f"int64[{f'at_{k}_0' if symbolic else n.dims[0]}] at_{k}")
            arrays[f"at_{k}"] = np.array(n.at, np.int64)
        operands = f"cache_{k}, rows_{k}" + f", at_{k}" * (n.at is not None)
        nodes.append(f"present_{k} = TensorScatter {attributes} ({operands})")
        outputs.append(f"float[{', '.join(f'o{k}_{a}' for a in range(len(n.dims)))}] present_{k}")
        update = CacheUpdate("float32", n.dims, n.length, axis, n.mode == "circular", n.at is not None)
        references[k] = expected(Case(update, n.dims, n.length, n.at or ()), arrays[f"cache_{k}"], arrays[f"rows_{k}"])
    results = lowering.compile(model(inputs, outputs, nodes)).run(arrays)
    for k, n in enumerate(NODES):
        assert same_bits(results[f"present_{k}"], references[k]), n


REFUSED = [
    ("attribute axis is 0, for inputs of rank 3", "float[2, 5, 4] c, float[2, 1, 4] u", "<axis = 0> (c, u)"),
    ("attribute axis is -2, for inputs of rank 2", "float[2, 5] c, float[2, 1] u", "(c, u)"),
    ("attribute axis is 3, for inputs of rank 3", "float[2, 5, 4] c, float[2, 1, 4] u", "<axis = 3> (c, u)"),
    ("attribute mode is 'ring'", "float[2, 5, 4] c, float[2, 1, 4] u", '<mode = "ring"> (c, u)'),
    ("have ranks 3 and 4", "float[2, 5, 4] c, float[2, 1, 4, 1] u", "(c, u)"),
    ("have ranks 1 and 1", "float[2] c, float[2] u", "(c, u)"),
    ("input update has 6 rows, for a cache of 5", "float[2, 5, 4] c, float[2, 6, 4] u", "(c, u)"),
    ("dimension 0 of past_cache is 2, and of update 1", "float[2, 5, 4] c, float[1, 1, 4] u", "(c, u)"),
    ("dimension 2 of past_cache is 4, and of update 3", "float[2, 5, 4] c, float[2, 1, 3] u", "(c, u)"),
    ("input update is float16 and past_cache is float32", "float[2, 5, 4] c, float16[2, 1, 4] u", "(c, u)"),
    ("write_indices is int32 of rank 1", "float[2, 5, 4] c, float[2, 1, 4] u, int32[2] w", "(c, u, w)"),
    ("write_indices is int64 of rank 2", "float[2, 5, 4] c, float[2, 1, 4] u, int64[2, 1] w", "(c, u, w)"),
    ("write_indices has 3 elements, for a batch of 2", "float[2, 5, 4] c, float[2, 1, 4] u, int64[3] w", "(c, u, w)"),
]


@pytest.mark.parametrize(("says", "inputs", "call"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refuses(says: str, inputs: str, call: str) -> None:
    proto = model([inputs], ["float[2, 5, 4] y"], [f"y = TensorScatter {call}"])
    with pytest.raises(NodeError) as caught:
        import_model(ir.from_proto(proto), lookup)
    assert caught.value.where == "ai.onnx.TensorScatter-24 giving 'y'"
    assert says in caught.value.what
