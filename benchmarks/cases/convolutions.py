"""Whole convolutional models: parts of ResNet, MobileNetV3, ResNeXt, ConvNeXt, ShuffleNet, and a reader of text lines.

Weights are random; the shapes are those of the papers. The batch is symbolic, and so is the width of a text line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from .case import Arrays, Bar, Case, Work


class _Graph:
    """Nodes in sequence; every method appends to the value named `x`, and returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: Arrays = {}
        self.flops: list[tuple[str, int]] = []  # of a convolution, for each element of its result
        self.rng = np.random.default_rng(1)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name

    def conv(
        self, x: str, c: int, m: int, k: int, stride: int = 1, group: int = 1, act: str = "Relu", pad: int | None = None
    ) -> str:
        """c channels to m, window k x k, padded so that only the stride makes the result smaller; act may be ""."""
        fan = c // group * k * k
        w = self.weight((self.rng.standard_normal((m, c // group, k, k)) / np.sqrt(fan)).astype(np.float32))
        b = self.weight((self.rng.standard_normal(m) / 4).astype(np.float32))
        pads = [k // 2 if pad is None else pad] * 4
        y = self.add("Conv", x, w, b, kernel_shape=[k, k], strides=[stride] * 2, pads=pads, group=group)
        self.flops.append((y, 2 * fan))
        return self.add(act, y) if act else y

    def linear(self, x: str, k: int, n: int) -> str:
        y = self.add("MatMul", x, self.weight((self.rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)))
        self.flops.append((y, 2 * k))
        return self.add("Add", y, self.weight((self.rng.standard_normal(n) / 4).astype(np.float32)))

    def norm(self, x: str, c: int) -> str:
        scale, bias, mean = (self.weight(self.rng.standard_normal(c).astype(np.float32)) for _ in range(3))
        return self.add(
            "BatchNormalization", x, scale, bias, mean, self.weight(self.rng.uniform(0.5, 2, c).astype(np.float32))
        )

    def pool(self, x: str, k: tuple[int, int], stride: tuple[int, int], pad: int = 0) -> str:
        return self.add("MaxPool", x, kernel_shape=k, strides=stride, pads=[pad] * 4)

    def ints(self, *numbers: int) -> str:
        return self.weight(np.array(numbers, np.int64))


def _resnet(g: _Graph) -> str:
    """The stem of ResNet-18, two blocks of 64 channels, and one that halves the size."""
    x = g.pool(g.conv("x", 3, 64, 7, 2), (3, 3), (2, 2), 1)
    for c, m, stride in ((64, 64, 1), (64, 64, 1), (64, 128, 2)):
        y = g.conv(g.conv(x, c, m, 3, stride), m, m, 3, act="")
        x = g.add("Relu", g.add("Add", y, g.conv(x, c, m, 1, stride, act="") if c != m else x))
    return g.linear(g.add("Flatten", g.add("GlobalAveragePool", x)), 128, 1000)


def _mobilenet(g: _Graph) -> str:
    """MobileNetV3-Small, https://arxiv.org/abs/1905.02244, Table 2."""
    table = (
        (3, 16, 16, 1, "Relu", 2), (3, 72, 24, 0, "Relu", 2), (3, 88, 24, 0, "Relu", 1), (5, 96, 40, 1, "HardSwish", 2),
        (5, 240, 40, 1, "HardSwish", 1), (5, 240, 40, 1, "HardSwish", 1), (5, 120, 48, 1, "HardSwish", 1),
        (5, 144, 48, 1, "HardSwish", 1), (5, 288, 96, 1, "HardSwish", 2), (5, 576, 96, 1, "HardSwish", 1),
        (5, 576, 96, 1, "HardSwish", 1),
    )  # fmt: skip
    x, c = g.conv("x", 3, 16, 3, 2, act="HardSwish"), 16
    for k, wide, m, squeeze, act, stride in table:
        y = g.conv(x, c, wide, 1, act=act) if wide != c else x
        y = g.conv(y, wide, wide, k, stride, group=wide, act=act)
        if squeeze:
            small = max(8, (wide // 4 + 4) // 8 * 8)
            s = g.conv(g.add("GlobalAveragePool", y), wide, small, 1)
            s = g.add("HardSigmoid", g.conv(s, small, wide, 1, act=""), alpha=1 / 6)
            y = g.add("Mul", y, s)
        y = g.conv(y, wide, m, 1, act="")
        x, c = g.add("Add", x, y) if stride == 1 and c == m else y, m
    x = g.conv(x, 96, 576, 1, act="HardSwish")
    x = g.add("HardSwish", g.linear(g.add("Flatten", g.add("GlobalAveragePool", x)), 576, 1024))
    return g.linear(x, 1024, 1000)


def _text_line(g: _Graph) -> str:
    """The convolutions of CRNN, https://arxiv.org/abs/1507.05717, Table 1, and a classifier of each column."""
    x = g.pool(g.conv("x", 1, 64, 3), (2, 2), (2, 2))
    x = g.pool(g.conv(x, 64, 128, 3), (2, 2), (2, 2))
    x = g.conv(g.conv(x, 128, 256, 3), 256, 256, 3)
    x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 1], pads=[0, 1, 0, 1])
    x = g.add("Relu", g.norm(g.conv(x, 256, 512, 3, act=""), 512))
    x = g.add("Relu", g.norm(g.conv(x, 512, 512, 3, act=""), 512))
    x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 1], pads=[0, 1, 0, 1])
    x = g.add("Squeeze", g.conv(x, 512, 512, 2, pad=0), g.ints(2))
    return g.add("Softmax", g.linear(g.add("Transpose", x, perm=[0, 2, 1]), 512, 97), axis=-1)


def _resnext(g: _Graph) -> str:
    """Two blocks of ResNeXt-50 (32 x 4d)."""
    x = "x"
    for _ in range(2):
        y = g.conv(g.conv(g.conv(x, 256, 128, 1), 128, 128, 3, group=32), 128, 256, 1, act="")
        x = g.add("Relu", g.add("Add", y, x))
    return x


def _convnext(g: _Graph) -> str:
    """Two blocks of ConvNeXt-Tiny's first stage, whose normalization and matmuls have channels last."""
    x = "x"
    for _ in range(2):
        y = g.add("Transpose", g.conv(x, 96, 96, 7, group=96, act=""), perm=[0, 2, 3, 1])
        scale, bias = (g.weight(g.rng.standard_normal(96).astype(np.float32)) for _ in range(2))
        y = g.add("Gelu", g.linear(g.add("LayerNormalization", y, scale, bias), 96, 384))
        x = g.add("Add", x, g.add("Transpose", g.linear(y, 384, 96), perm=[0, 3, 1, 2]))
    return x


def _shufflenet(g: _Graph) -> str:
    """Two units of ShuffleNetV2 1.0x, https://arxiv.org/abs/1807.11164, Figure 3 (c)."""
    x = "x"
    for _ in range(2):
        left, right = f"left_{len(g.nodes)}", f"right_{len(g.nodes)}"
        g.nodes.append(helper.make_node("Split", [x], [left, right], axis=1, num_outputs=2))
        y = g.conv(g.conv(right, 58, 58, 1), 58, 58, 3, group=58, act="")
        x = g.add("Concat", left, g.conv(y, 58, 58, 1), axis=1)
        x = g.add("Reshape", x, g.ints(0, 2, 58, 28, 28))
        x = g.add("Reshape", g.add("Transpose", x, perm=[0, 2, 1, 3, 4]), g.ints(0, 116, 28, 28))
    return x


@dataclass(frozen=True, kw_only=True)
class ConvolutionCase(Case):
    """x is [batch, *shape]; axes names the symbolic ones, by index."""

    build: Callable[[_Graph], str]
    shape: tuple[int, ...]
    axes: tuple[tuple[int, str], ...] = ((0, "N"),)
    batch: int = 1

    def _graph(self) -> tuple[_Graph, str]:
        graph = _Graph()
        return graph, self.build(graph)

    def feeds(self) -> Arrays:
        return {"x": np.random.default_rng(0).standard_normal((self.batch, *self.shape), np.float32)}

    def model(self) -> onnx.ModelProto:
        return self._model(TensorProto.FLOAT, [])

    def _model(self, dtype: int, outputs: list[str]) -> onnx.ModelProto:
        graph, result = self._graph()
        shape: list[int | str] = [self.batch, *self.shape]
        for axis, name in self.axes:
            shape[axis] = name
        float_type = helper.tensor_dtype_to_np_dtype(dtype)
        model = helper.make_model(
            helper.make_graph(
                graph.nodes,
                "convolutions",
                [helper.make_tensor_value_info("x", dtype, shape)],
                [helper.make_tensor_value_info(name, dtype, None) for name in (result, *outputs)],
                [
                    numpy_helper.from_array(a.astype(float_type) if a.dtype.kind == "f" else a, name)
                    for name, a in graph.weights.items()
                ],
            ),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
        return onnx.shape_inference.infer_shapes(model)

    def expected(self) -> Arrays:
        return dict(list(_reference(self).items())[:1])

    def work(self) -> Work:
        graph, _ = self._graph()
        results = _reference(self)
        return Work(float(sum(results[name].size * flops for name, flops in graph.flops)), "FLOP")


@cache
def _reference(case: ConvolutionCase) -> Arrays:
    """The result and those of the convolutions, by onnx's own evaluator in float64."""
    graph, result = case._graph()
    names = [result, *(name for name, _ in graph.flops if name != result)]
    model = case._model(TensorProto.DOUBLE, names[1:])
    feeds = {name: array.astype(np.float64) for name, array in case.feeds().items()}
    return dict(zip(names, ReferenceEvaluator(model).run(names, feeds)))


def cases() -> list[ConvolutionCase]:
    images, line = (3, 224, 224), (1, 32, 160)
    table: list[tuple[str, Callable[[_Graph], str], tuple[int, ...], dict[str, Any]]] = [
        ("ResNet-18, first blocks, 224", _resnet, images, {}),
        ("MobileNetV3-Small, 224", _mobilenet, images, {}),
        ("text line, 32 x 160", _text_line, line, {"axes": ((0, "N"), (3, "W"))}),
        ("ResNeXt, two blocks, 56", _resnext, (256, 56, 56), {}),
        ("ConvNeXt, two blocks, 56", _convnext, (96, 56, 56), {}),
        ("ShuffleNetV2, two units, 28", _shufflenet, (116, 28, 28), {}),
    ]
    return [
        ConvolutionCase(name=name, group="convolutions", bar=Bar(ratio=0.8), build=build, shape=shape, **options)
        for name, build, shape, options in table
    ]
