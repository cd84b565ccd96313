"""An attack on one operator: calls with legal and illegal inputs, each input between unreadable memory pages.

It runs in a process of its own (attacks.py), in which an access out of bounds is a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

import lowering
from tests.support.placed_arrays import guarded


@dataclass(frozen=True)
class Attack:
    """Inputs of one operator, declared with these dimensions, and calls, each marked as legal or not.

    A legal call gives the result of onnx's reference; any other is a LoweringError whose text names the node.
    """

    operator: str
    dims: Sequence[Sequence[int | str]]
    calls: Sequence[tuple[bool, Sequence[np.ndarray]]]
    results: int = 1
    opset: int = 23
    attributes: dict[str, Any] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        arrays = self.calls[0][1]
        names = [f"x{k}" for k in range(len(arrays))]
        types = [helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype) for a in arrays]
        inputs = [helper.make_tensor_value_info(n, t, list(d)) for n, t, d in zip(names, types, self.dims)]
        outputs = [helper.make_empty_tensor_value_info(f"y{k}") for k in range(self.results)]
        node = helper.make_node(self.operator, names, [o.name for o in outputs], name="attacked", **self.attributes)
        graph = helper.make_graph([node], "g", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        for output, array in zip(graph.output, self.expected(model, 0)):  # only the ranks are declared
            dims = [f"{output.name}_{axis}" for axis in range(array.ndim)]
            output.CopyFrom(
                helper.make_tensor_value_info(output.name, helper.np_dtype_to_tensor_dtype(array.dtype), dims)
            )
        model.graph.CopyFrom(graph)
        return model

    def expected(self, model: onnx.ModelProto, call: int) -> list[np.ndarray]:
        """Return the results of onnx's reference. It lacks Scatter, which ScatterElements replaced."""
        newer = onnx.ModelProto()
        newer.CopyFrom(model)
        if self.operator == "Scatter":
            newer.graph.node[0].op_type, newer.opset_import[0].version = "ScatterElements", 11
        feeds = {f"x{k}": np.asarray(a) for k, a in enumerate(self.calls[call][1])}
        return [np.asarray(r) for r in ReferenceEvaluator(newer).run(None, feeds)]


def run_attack(attack: Attack) -> None:
    """Run the calls of an attack; raise AssertionError where a call has another outcome than expected."""
    proto = attack.model()
    model = lowering.compile(proto)
    for k, (legal, arrays) in enumerate(attack.calls):
        label = f"{attack.operator} {attack.attributes}, call {k}"
        for at_end in (True, False):
            feeds = {f"x{j}": guarded(a, at_end) for j, a in enumerate(arrays)}
            try:
                results = list(model.run(feeds).values())
            except lowering.LoweringError as error:
                assert not legal, f"{label}: {error}"
                assert "'attacked'" in str(error) and "\n" not in str(error), f"{label}: {error}"
                continue
            assert legal, f"{label}: gave {results}"
            for result, expected in zip(results, attack.expected(proto, k)):
                np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5, err_msg=label)
