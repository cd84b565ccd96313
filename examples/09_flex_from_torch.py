"""A PyTorch model that calls flex_attention, exported to FlexAttention of ai.onnx.preview and compiled.

torch.onnx has no translation of flex_attention, and takes one of ours: `translated`. It gets score_mod and mask_mod as
ONNX functions of single numbers, which are as well functions of the tensor of all scores and of indices that broadcast
to it. What they capture, such as a learned bias, they read from the graph around the node.

Needs the `examples` extra:

    pip install '.[examples]'
    python examples/09_flex_from_torch.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.values import Opset
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lowering

HEADS, HEAD_SIZE, TOKENS, CAP, NEAR = 4, 32, 256, 20.0, 16

NUMBERS = itertools.count()
"""Of values in graphs, which have names of their own."""


class Attention(torch.nn.Module):
    """Causal self-attention with soft-capped scores and a learned bias by head and distance."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_SIZE
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.bias = torch.nn.Parameter(torch.randn(HEADS, NEAR + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
            return CAP * torch.tanh(s / CAP) + self.bias[h, torch.clamp(i - j, 0, NEAR)]

        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, HEAD_SIZE).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=score_mod, block_mask=causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def translated(
    q: Any,
    k: Any,
    v: Any,
    score_mod: ir.Function,
    block_mask: Sequence[Any],
    scale: float,
    options: Any,
    score_captures: Sequence[ir.Value],
    mask_captures: Sequence[ir.Value],
) -> tuple[Any, Any, Any]:
    """torch.ops.higher_order.flex_attention as a node of ai.onnx.preview. mask_mod, the last part of a block mask, says
    which scores are visible; the lists of blocks in front of it say no more than that."""
    assert not options["OUTPUT_LOGSUMEXP"] and not options["OUTPUT_MAX"], "the operator has no such outputs"
    graph = ScoreMod(score_mod, score_captures, block_mask[-1], mask_captures).graph()
    y = Opset("ai.onnx.preview", 1).FlexAttention(q, k, v, scale=scale, score_mod=graph)
    return y, *(Opset("", 23).Constant(value_float=0.0) for _ in range(2))


def ordered(x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """torch.sort, by TopK, which keeps the order of equal numbers. Block masks, whose lists it makes, need it to be
    exported, though nothing of the lists is left in the end."""
    op = Opset("", 23)
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, size, axis=dim, largest=int(descending))


TRANSLATIONS = {torch.ops.higher_order.flex_attention: translated, torch.ops.aten.sort.stable: ordered}


class ScoreMod:
    """The graph that makes new scores of a tensor of scores: those of score_mod where mask_mod is true, else -inf."""

    def __init__(
        self,
        score_mod: ir.Function,
        score_captures: Sequence[ir.Value],
        mask_mod: ir.Function,
        mask_captures: Sequence[ir.Value],
    ) -> None:
        self.score_mod, self.score_captures = score_mod, score_captures
        self.mask_mod, self.mask_captures = mask_mod, mask_captures
        self.nodes: list[ir.Node] = []

    def graph(self) -> ir.Graph:
        scores = ir.Value(name="scores", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "h", "s", "t"]))
        indices = [self.positions(scores, axis) for axis in range(4)]
        (new,) = self.inlined(self.score_mod, [scores, *indices, *self.score_captures])
        (visible,) = self.inlined(self.mask_mod, [*indices, *self.mask_captures])
        result = self.add("Where", [visible, new, self.constant(np.float32(-np.inf))])
        result.type, result.shape = scores.type, scores.shape
        return ir.Graph([scores], [result], nodes=self.nodes, name="score_mod")

    def positions(self, scores: ir.Value, axis: int) -> ir.Value:
        """0, 1, ... along one axis of the scores, int32 as in PyTorch; the others are 1."""
        size = self.add("Squeeze", [self.add("Shape", [scores], start=axis, end=axis + 1)])
        counted = self.add("Range", [self.constant(np.int64(0)), size, self.constant(np.int64(1))])
        shaped = self.add("Reshape", [counted, self.constant(np.array([-1 if k == axis else 1 for k in range(4)]))])
        return self.add("Cast", [shaped], to=ir.DataType.INT32)

    def inlined(self, function: ir.Function, inputs: Sequence[ir.Value]) -> Iterator[ir.Value]:
        """The outputs of a function of single numbers, for these inputs in their place."""
        known: dict[ir.Value | None, ir.Value | None] = {None: None, **dict(zip(function.inputs, inputs, strict=True))}
        for node in function:
            given = [known[value] for value in node.inputs]
            if node.op_type == "Transpose" and not node.attributes["perm"].as_ints():  # of a number: nothing to do
                known[node.outputs[0]] = given[0]
                continue
            if node.op_type == "GatherND":  # whose indices are int64
                given[1] = self.add("Cast", [given[1]], to=ir.DataType.INT64)
            known[node.outputs[0]] = self.add(node.op_type, given, **node.attributes)
        return (known[output] for output in function.outputs)

    def add(self, operator: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        node = ir.node(operator, inputs, attributes)
        node.outputs[0].name = f"score_mod_{next(NUMBERS)}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: np.ndarray | np.generic) -> ir.Value:
        return self.add("Constant", [], value=ir.tensor(np.asarray(array)))


def main() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval().requires_grad_(False), torch.randn(2, TOKENS, HEADS * HEAD_SIZE)
    expected = model(x).numpy()
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=23, custom_translation_table=TRANSLATIONS)
    compiled = lowering.compile(program.model_proto)
    (name,) = (spec.name for spec in compiled.inputs)
    y = next(iter(compiled.run({name: x.numpy()}).values()))
    print("kernels:", ", ".join(kernel.kind for kernel in compiled.manifest.kernels))
    print(f"largest difference from PyTorch: {np.abs(y - expected).max():.1e}")
    assert np.allclose(y, expected, atol=1e-5)


if __name__ == "__main__":
    main()
