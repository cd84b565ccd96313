"""Mixtures of experts that models write out: only the chosen experts are computed, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering

HIDDEN, INNER = 20, 12
CHOSEN = "sort_by_expert"  # the kernel that only a rewritten mixture has


class Mixture:
    """A model with a mixture of experts in some form, and what it computes in float64."""

    def __init__(self, experts: int = 5, per_token: int = 2, seed: int = 0, **form: Any) -> None:
        """form: how the mixture is written; see `_expert` and `_weight`."""
        self.rng = np.random.default_rng(seed)
        self.experts, self.per_token, self.form = experts, per_token, form
        self.arrays: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constant("router", self.random(HIDDEN, form.get("columns", experts)))
        logits = self.node("MatMul", "x", "router")
        count = self.constant("k", np.array([per_token]))
        best = helper.make_node("TopK", [logits, count], ["values", "indices"], axis=-1)
        self.nodes.append(best)
        weights = self.node("Softmax", "values", axis=-1)
        chosen = "chosen" if form.get("foreign") else "indices"
        order = self.rng.permutation(experts) if form.get("shuffled") else range(experts)
        terms = [self.node("Mul", self._expert(e), self._weight(weights, chosen, int(e))) for e in order]
        if form.get("begins_with_zero"):
            zero = self.constant("zero", np.zeros((1, 1, HIDDEN), np.float32))
            terms = [self.node("Add", zero, terms[0]), *terms[1:]]
        total = terms[0]
        for term in terms[1:]:
            total = self.node("Add", total, term)
        self.nodes.append(helper.make_node("Add", [total, "x"], ["y"]))

    def random(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / 3).astype(np.float32)

    def constant(self, name: str, array: np.ndarray) -> str:
        self.arrays[name] = array
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        """x W, and a bias where the form has it; W is stored transposed where it says so."""
        matrix = self.random(rows, columns)
        if self.form.get("transposed"):
            y = self.node("MatMul", x, self.node("Transpose", self.constant(name, matrix.T.copy()), perm=[1, 0]))
        else:
            y = self.node("MatMul", x, self.constant(name, matrix))
        return self.node("Add", y, self.constant(f"{name}_bias", self.random(columns))) if self.form.get("bias") else y

    def _expert(self, e: int) -> str:
        if self.form.get("fused"):
            joint = self.linear("x", f"both_{e}", HIDDEN, 2 * INNER)
            axis = self.form.get("axis", -1)
            split = helper.make_node("Split", [joint], [f"gate_{e}", f"up_{e}"], axis=axis, num_outputs=2)
            self.nodes.append(split)
            gate, up = f"gate_{e}", f"up_{e}"
        else:
            gate, up = (self.linear("x", f"{name}_{e}", HIDDEN, INNER) for name in ("gate", "up"))
        operator = "Tanh" if self.form.get("unlike") == e else "Sigmoid"
        active = self.node("Mul", gate, self.node(operator, gate))
        return self.linear(self.node("Mul", active, up), f"down_{e}", INNER, HIDDEN)

    def _weight(self, weights: str, chosen: str, e: int) -> str:
        axes = self.constant("last", np.array([-1]))
        match = self.node("Equal", chosen, self.constant(f"number_{e}", np.array(e)))
        if self.form.get("where"):
            left = self.node("Where", match, weights, self.constant("nothing", np.float32(0)))
        else:
            left = self.node("Mul", self.node("Cast", match, to=onnx.TensorProto.FLOAT), weights)
        if self.form.get("keeps", True):
            return self.node("ReduceSum", left, axes, keepdims=1)
        return self.node("Unsqueeze", self.node("ReduceSum", left, axes, keepdims=0), axes)

    def model(self) -> onnx.ModelProto:
        sizes = ["batch", "tokens", HIDDEN]
        inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, sizes)]
        if self.form.get("foreign"):
            shape = ["batch", "tokens", self.per_token]
            inputs.append(helper.make_tensor_value_info("chosen", onnx.TensorProto.INT64, shape))
        outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, sizes)]
        constants = [numpy_helper.from_array(array, name) for name, array in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)

    def expected(self, x: np.ndarray) -> np.ndarray:
        arrays = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        rows = x.reshape(-1, HIDDEN).astype(np.float64)
        result = rows.copy()
        for t, row in enumerate(rows):
            logits = row @ arrays["router"]
            chosen = np.argsort(-logits, kind="stable")[: self.per_token]
            shares = np.exp(logits[chosen] - logits[chosen].max())
            for e, share in zip(chosen, shares / shares.sum()):
                if self.form.get("fused"):
                    gate, up = np.split(self._linear(arrays, row, f"both_{e}"), 2)
                else:
                    gate, up = (self._linear(arrays, row, f"{name}_{e}") for name in ("gate", "up"))
                result[t] += share * self._linear(arrays, gate / (1 + np.exp(-gate)) * up, f"down_{e}")
        return result.reshape(x.shape)

    def _linear(self, arrays: dict[str, np.ndarray], row: np.ndarray, name: str) -> np.ndarray:
        matrix = arrays[name].T if self.form.get("transposed") else arrays[name]
        return row @ matrix + arrays.get(f"{name}_bias", 0)


def kernels(compiled: lowering.Model) -> set[str]:
    return {kernel.name for kernel in compiled.manifest.kernels}


FORMS: list[dict[str, Any]] = [
    {},
    {"transposed": True, "bias": True},
    {"where": True, "shuffled": True, "begins_with_zero": True},
    {"keeps": False, "fused": True},
    {"fused": True, "axis": 2, "bias": True, "per_token": 4},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_only_chosen_experts_are_computed(form: dict[str, Any]) -> None:
    mixture = Mixture(**form)
    compiled = lowering.compile(mixture.model())
    assert CHOSEN in kernels(compiled)
    assert {kernel.schedule for kernel in compiled.manifest.kernels if "grouped" in kernel.name} == {"matmul"}
    for batch, tokens in ((1, 1), (2, 3), (3, 40), (1, 0)):
        x = mixture.random(batch, tokens, HIDDEN) * 3
        np.testing.assert_allclose(compiled.run({"x": x})["y"], mixture.expected(x), rtol=0, atol=2e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Their NaNs would be in the result of the dense form."""
    mixture = Mixture()
    x = mixture.random(1, 1, HIDDEN)
    expected = mixture.expected(x)
    logits = x.reshape(-1) @ mixture.arrays["router"]
    for expert in np.argsort(-logits)[mixture.per_token :]:
        mixture.arrays[f"down_{expert}"][:] = np.nan
    actual = lowering.compile(mixture.model()).run({"x": x})["y"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "form",
    [{"unlike": 3}, {"foreign": True}, {"columns": 7}, {"per_token": 5}],
    ids=["an expert is unlike the others", "numbers from outside", "numbers that are not experts", "all are chosen"],
)
def test_other_forms_stay_as_they_are(form: dict[str, Any]) -> None:
    compiled = lowering.compile(Mixture(**form).model())
    assert CHOSEN not in kernels(compiled)


@pytest.mark.parametrize(
    "weights, level, bound",
    [("int8", None, 0.02), ("int4", None, 0.2), ("f16", None, 1e-3), ("int8", 4, 0.02), ("int4", 4, 0.2)],
)
def test_matrices_of_few_bits(weights: Any, level: int | None, bound: float) -> None:
    mixture = Mixture()
    x = mixture.random(2, 30, HIDDEN) * 3
    compiled = lowering.compile(mixture.model(), weights=weights, accuracy_level=level)
    assert compiled.manifest.accuracy_level == (level or 0)
    error = np.abs(compiled.run({"x": x})["y"] - mixture.expected(x)).max()
    assert CHOSEN in kernels(compiled)
    assert error < bound * np.abs(mixture.expected(x)).max()


@pytest.mark.parametrize("precision, bound", [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_precision(precision: Any, bound: float) -> None:
    mixture = Mixture()
    x = mixture.random(2, 30, HIDDEN)
    compiled = lowering.compile(mixture.model(), precision=precision, threads=2)
    assert CHOSEN in kernels(compiled)
    assert np.abs(compiled.run({"x": x})["y"] - mixture.expected(x)).max() < bound


def gathered(operator: str, is_row: bool, is_transposed: bool, foreign: bool = False) -> tuple[onnx.ModelProto, Any]:
    """Rows, two for each token, times matrices that are gathered for them, as Transformers exports experts."""
    rng = np.random.default_rng(2)
    router = rng.standard_normal((HIDDEN, 4)).astype(np.float32)
    rows_first = is_row != is_transposed  # [E, K, N] and not [E, N, K]
    matrices = rng.standard_normal((4, *((HIDDEN, INNER) if rows_first else (INNER, HIDDEN)))).astype(np.float32)
    arrays = {
        "router": router, "W": matrices, "two": np.array([2]), "flat": np.array([-1]), "column": np.array([-1, 1]),
        "repeated": np.array([1, 2, 1]), "one": np.array([1]), "rows": np.array([-1, HIDDEN]),
        "axis": np.array([1 if is_row else 2]),
    }  # fmt: skip
    make = helper.make_node
    chosen = "given" if foreign else "indices"
    nodes = [
        make("MatMul", ["x", "router"], ["logits"]), make("TopK", ["logits", "two"], ["values", "indices"]),
        make("Unsqueeze", ["x", "one"], ["apart"]), make("Expand", ["apart", "repeated"], ["twice"]),
        make("Reshape", ["twice", "rows"], ["r"]), make("Unsqueeze", ["r", "axis"], ["vector"]),
        make("Reshape", [chosen, "flat" if operator == "Gather" else "column"], ["number"]),
        make(operator, ["W", "number"], ["own"]),
    ]  # fmt: skip
    matrix = "own"
    if is_transposed:
        nodes.append(make("Transpose", ["own"], ["turned"], perm=[0, 2, 1]))
        matrix = "turned"
    nodes.append(make("MatMul", ["vector", matrix] if is_row else [matrix, "vector"], ["y"]))
    values = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["t", HIDDEN])]
    if foreign:
        values.append(helper.make_tensor_value_info("given", onnx.TensorProto.INT64, ["t", 2]))
    shape = ["r", 1, INNER] if is_row else ["r", INNER, 1]
    result = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", values, result, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def expected(x: np.ndarray) -> np.ndarray:
        logits = x.astype(np.float64) @ router
        rows = [
            row @ (matrices[e] if rows_first else matrices[e].T)
            for row, best in zip(x.astype(np.float64), np.argsort(-logits, axis=1, kind="stable")[:, :2]) for e in best
        ]  # fmt: skip
        return np.array(rows).reshape(-1, *((1, INNER) if is_row else (INNER, 1)))

    return model, expected


@pytest.mark.parametrize(
    "operator, is_row, is_transposed", [("GatherND", False, False), ("Gather", True, False), ("GatherND", True, True)]
)
def test_matrices_are_not_gathered(operator: str, is_row: bool, is_transposed: bool) -> None:
    model, expected = gathered(operator, is_row, is_transposed)
    compiled = lowering.compile(model)
    assert CHOSEN in kernels(compiled)
    for tokens in (0, 1, 33):
        x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)
        np.testing.assert_allclose(compiled.run({"x": x})["y"], expected(x), rtol=0, atol=1e-4)


def test_matrices_of_any_number_are_gathered() -> None:
    """Numbers from outside may be negative, or none that there is."""
    assert CHOSEN not in kernels(lowering.compile(gathered("GatherND", False, False, foreign=True)[0]))


def test_two_mixtures_share_a_router() -> None:
    """As layers do whose tokens keep their experts."""
    mixture = Mixture()
    other = Mixture(seed=1)
    graph = mixture.model().graph
    names = {name: f"other_{name}" for name in other.arrays if name.startswith(("gate", "up", "down"))}
    again = [node for node in other.nodes if node.output[0] not in ("values", "y") and node.op_type != "Softmax"]
    for node in again[1:]:
        inputs = [names.get(name, name if name in mixture.arrays or name in ("x", "indices") else f"b_{name}")
                  for name in node.input]  # fmt: skip
        inputs = [name.removeprefix("b_") if name.startswith("b_Softmax") else name for name in inputs]
        graph.node.append(helper.make_node(node.op_type, inputs, [f"b_{node.output[0]}"], **attributes_of(node)))
    graph.node.append(helper.make_node("Add", ["y", f"b_{again[-1].output[0]}"], ["both"]))
    graph.initializer.extend(numpy_helper.from_array(other.arrays[name], new) for name, new in names.items())
    graph.output[0].name = "both"
    opsets = [helper.make_opsetid("", 23)]
    compiled = lowering.compile(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert sum(kernel.name.startswith(CHOSEN) for kernel in compiled.manifest.kernels) >= 1
    assert sum("grouped_matmul" in call.kernel for call in compiled.manifest.calls) == 4
    other.arrays["router"] = mixture.arrays["router"]
    x = mixture.random(2, 5, HIDDEN) * 3
    expected = mixture.expected(x) + other.expected(x) - x
    np.testing.assert_allclose(compiled.run({"x": x})["both"], expected, rtol=0, atol=4e-5)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def of_experts(dtype: str, before: str = "", after: str = "", rank: int = 3) -> tuple[onnx.ModelProto, Any]:
    """A mixture of three experts, each a matrix with an operator before or after it, in some type; and its result."""
    rng, kind = np.random.default_rng(7), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    make, arrays, nodes, terms = helper.make_node, {"two": np.array([2]), "last": np.array([-1])}, [], []
    arrays["router"] = rng.standard_normal((HIDDEN, 3)).astype(dtype)
    nodes += [make("MatMul", ["x", "router"], ["logits"]), make("TopK", ["logits", "two"], ["values", "indices"])]
    for e in range(3):
        arrays[f"W{e}"] = rng.standard_normal((HIDDEN, HIDDEN)).astype(dtype)
        arrays[f"bound{e}"], arrays[f"vector{e}"] = np.array(0.5 + e, dtype), rng.random(HIDDEN).astype(dtype)
        arrays["limit"], arrays[f"number{e}"] = np.array(0.7, dtype), np.array(e)
        x = "x"
        if before == "Clip":
            nodes.append(make("Clip", ["x", "", f"bound{e}"], [f"c{e}"]))
            x = f"c{e}"
        if after == "Gemm":
            nodes.append(make("Gemm", [x, f"W{e}", f"vector{e}"], [f"h{e}"], transB=1))
        else:
            nodes.append(make("MatMul", [x, f"W{e}"], [f"h{e}"]))
        if after == "Clip":
            nodes.append(make("Clip", [f"h{e}", "", "limit"], [f"l{e}"]))
        match = [make("Equal", ["indices", f"number{e}"], [f"m{e}"]), make("Cast", [f"m{e}"], [f"f{e}"], to=kind)]
        match += [make("Mul", ["values", f"f{e}"], [f"w{e}"]), make("ReduceSum", [f"w{e}", "last"], [f"s{e}"])]
        nodes += [*match, make("Mul", [f"l{e}" if after == "Clip" else f"h{e}", f"s{e}"], [f"t{e}"])]
        terms.append(f"t{e}")
    nodes += [make("Add", terms[:2], ["sum"]), make("Add", ["sum", terms[2]], ["y"])]
    sizes = ["t"] if rank == 2 else ["b", "t"]
    values = [helper.make_tensor_value_info("x", kind, [*sizes, HIDDEN])]
    result = [helper.make_tensor_value_info("y", kind, [*sizes, HIDDEN])]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", values, result, constants)

    def expected(x: np.ndarray) -> np.ndarray:
        logits = x.astype(np.float64) @ arrays["router"]
        total = np.zeros(x.shape)
        for row in np.ndindex(*x.shape[:-1]):
            for e in np.argsort(-logits[row], kind="stable")[:2]:
                own = np.minimum(x[row], arrays[f"bound{e}"]) if before == "Clip" else x[row]
                matrix = arrays[f"W{e}"].T if after == "Gemm" else arrays[f"W{e}"]
                h = own @ matrix + (arrays[f"vector{e}"] if after == "Gemm" else 0)
                total[row] += logits[row][e] * (np.minimum(h, 0.7) if after == "Clip" else h)
        return total

    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), expected


@pytest.mark.parametrize(
    "form, is_grouped",
    [
        ({"dtype": "float32", "after": "Clip"}, True),
        ({"dtype": "float32", "before": "Clip"}, False),
        ({"dtype": "float32", "after": "Gemm", "rank": 2}, True),
        ({"dtype": "float64"}, False),
    ],
    ids=["one limit", "limits of their own", "Gemm", "float64"],
)
def test_operators_of_experts(form: dict[str, Any], is_grouped: bool) -> None:
    model, expected = of_experts(**form)
    compiled = lowering.compile(model)
    assert (CHOSEN in kernels(compiled)) == is_grouped
    shape = (11, HIDDEN) if form.get("rank") == 2 else (2, 6, HIDDEN)
    x = np.random.default_rng(0).standard_normal(shape).astype(form["dtype"])
    np.testing.assert_allclose(compiled.run({"x": x})["y"], expected(x), rtol=0, atol=1e-3)
