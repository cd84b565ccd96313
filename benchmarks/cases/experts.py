"""Mixtures of experts as exporters write them out: all experts for all tokens, weighted by 0 unless chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .case import Arrays, Bar, Case, Work

_FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True, kw_only=True)
class ExpertsCase(Case):
    """E experts [H, I, H] with gates, of which each of L tokens chooses k."""

    group: str = "experts"
    L: int
    E: int
    k: int
    H: int = 768
    I: int = 256

    @property
    def source(self) -> str:
        return f"experts {self.E} {self.k} {self.H} {self.I}"

    def _weights(self) -> Arrays:
        rng = np.random.default_rng(1)
        sizes = {"gate": (self.H, self.I), "up": (self.H, self.I), "down": (self.I, self.H)}
        arrays = {"router": rng.standard_normal((self.H, self.E))}
        for e in range(self.E):
            arrays |= {f"{name}{e}": rng.standard_normal(size) for name, size in sizes.items()}
        return {name: (x / np.sqrt(len(x))).astype(np.float32) for name, x in arrays.items()}

    def model(self) -> onnx.ModelProto:
        make = helper.make_node
        nodes = [
            make("MatMul", ["x", "router"], ["logits"]), make("Softmax", ["logits"], ["shares"], axis=-1),
            make("TopK", ["shares", "k"], ["weights", "chosen"], axis=-1),
        ]  # fmt: skip
        constants = {**self._weights(), "k": np.array([self.k]), "last": np.array([-1])}
        for e in range(self.E):
            constants[f"number{e}"] = np.array(e)
            nodes += [
                make("MatMul", ["x", f"gate{e}"], [f"g{e}"]), make("Sigmoid", [f"g{e}"], [f"s{e}"]),
                make("Mul", [f"g{e}", f"s{e}"], [f"a{e}"]), make("MatMul", ["x", f"up{e}"], [f"u{e}"]),
                make("Mul", [f"a{e}", f"u{e}"], [f"h{e}"]), make("MatMul", [f"h{e}", f"down{e}"], [f"y{e}"]),
                make("Equal", ["chosen", f"number{e}"], [f"m{e}"]), make("Cast", [f"m{e}"], [f"c{e}"], to=_FLOAT),
                make("Mul", ["weights", f"c{e}"], [f"w{e}"]), make("ReduceSum", [f"w{e}", "last"], [f"r{e}"]),
                make("Mul", [f"y{e}", f"r{e}"], [f"t{e}"]),
            ]  # fmt: skip
            if e:
                result = "y" if e == self.E - 1 else f"sum{e}"
                nodes.append(make("Add", ["t0" if e == 1 else f"sum{e - 1}", f"t{e}"], [result]))
        info, sizes = helper.make_tensor_value_info, [1, "L", self.H]
        initializers = [numpy_helper.from_array(x, name) for name, x in constants.items()]
        graph = helper.make_graph(
            nodes, "experts", [info("x", _FLOAT, sizes)], [info("y", _FLOAT, sizes)], initializers
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def feeds(self) -> Arrays:
        return {"x": np.random.default_rng(0).standard_normal((1, self.L, self.H)).astype(np.float32)}

    def expected(self) -> Arrays:
        """Token by token, of the experts that it chooses."""
        weights = {name: x.astype(np.float64) for name, x in self._weights().items()}
        result = np.zeros((1, self.L, self.H))
        for t, row in enumerate(self.feeds()["x"][0].astype(np.float64)):
            logits = row @ weights["router"]
            shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            for e in np.argsort(-logits)[: self.k]:
                gate = row @ weights[f"gate{e}"]
                hidden = gate / (1 + np.exp(-gate)) * (row @ weights[f"up{e}"])
                result[0, t] += shares[e] * (hidden @ weights[f"down{e}"])
        return {"y": result}

    def work(self) -> Work:
        """The chosen matrices; one token waits for their bytes."""
        elements = 3.0 * self.k * self.H * self.I
        return Work(4 * elements, "byte") if self.L == 1 else Work(2 * elements * self.L, "FLOP")


def cases() -> Iterator[Case]:
    for experts, chosen in ((8, 2), (16, 2), (64, 8)):
        for length in (1, 128):
            # A token waits for memory: half of what leaving out the other experts saves.
            bar = Bar(ratio=experts / chosen / 2 if length == 1 else 1.0)
            yield ExpertsCase(name=f"experts_{experts}_{chosen}_{length}", bar=bar, L=length, E=experts, k=chosen)
