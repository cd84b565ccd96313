"""The Llama cases with other caches than slots: some libraries do better with them, or know no others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import onnx

from ..cases.attention import port
from ..cases.case import Arrays
from ..cases.transformers import LlamaCase

_F32 = np.dtype(np.float32)


def grown(case: LlamaCase) -> tuple[onnx.ModelProto, Arrays]:
    """Attention appends to a past of exactly the keys there are; without a past it just attends."""
    feeds = case.feeds()
    for name in case.in_place.values():
        feeds[name] = np.ascontiguousarray(feeds[name][:, :, : case.past])

    def layer(p: str, key: str, value: str, k: int) -> list[onnx.NodeProto]:
        new, present = [f"{p}.q_rotated", f"{p}.k_rotated", f"{p}.v"], [f"present_k.{k}", f"present_v.{k}"]
        if case.past:
            outputs = [f"{p}.attention", *present]
            return [onnx.helper.make_node("Attention", [*new, "", key, value], outputs, is_causal=1)]
        copies = [onnx.helper.make_node("Identity", [x], [y]) for x, y in zip(new[1:], present)]
        return [onnx.helper.make_node("Attention", new, [f"{p}.attention"], is_causal=1), *copies]

    model = _rewritten(case, layer, ("present_k", "present_v", "attention"))
    if not case.past:
        feeds = {name: array for name, array in feeds.items() if name not in case.in_place.values()}
    del model.graph.input[:]
    shape: Sequence[int | str] = ["batch", case.config.kv_heads, "past", case.config.head_dim]
    model.graph.input.extend(
        port(n, a.dtype, shape if n in case.in_place.values() else a.shape) for n, a in feeds.items()
    )
    for output in model.graph.output:
        if output.name in case.in_place:
            output.CopyFrom(port(output.name, _F32, ["batch", case.config.kv_heads, "total", case.config.head_dim]))
    return model, feeds


def group_query(case: LlamaCase) -> tuple[onnx.ModelProto, Arrays]:
    """GroupQueryAttention of `com.microsoft` rotates, writes its slots and attends to as many as are valid."""
    total = case.past + case.S
    feeds = {name: array for name, array in case.feeds().items() if name != "write_indices"}
    feeds |= {"seqlens_k": np.array([total - 1], np.int32), "total_sequence_length": np.array(total, np.int32)}

    def layer(p: str, key: str, value: str, k: int) -> list[onnx.NodeProto]:
        rows = [f"{p}.{name}.rows" for name in "qkv"]
        return [
            onnx.helper.make_node(
                "GroupQueryAttention",
                [*rows, key, value, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"],
                [f"{p}.merged", f"present_k.{k}", f"present_v.{k}"],
                domain="com.microsoft",
                num_heads=case.config.heads,
                kv_num_heads=case.config.kv_heads,
                do_rotary=1,
            )
        ]

    dropped = ("q.split", "q", "k.split", "k", "v.split", "v", "q_rotated", "k_rotated", "present_k", "present_v",
               "attention", "rows", "merged")  # fmt: skip
    model = _rewritten(case, layer, dropped)
    _drop_dead(model.graph)  # what computed positions
    ports = {value.name: value for value in model.graph.input}
    del model.graph.input[:]
    model.graph.input.extend(ports.get(name) or port(name, array.dtype, array.shape) for name, array in feeds.items())
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model, feeds


def few_bits(case: LlamaCase) -> tuple[onnx.ModelProto, Arrays]:
    """Return `group_query` with matrices of as few bits as the case has, by onnxruntime's own tool."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model, feeds = group_query(case)
    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.ERROR)
    quantizer = MatMulNBitsQuantizer(
        model, bits=int(case.weights[-1]), block_size=32, is_symmetric=True, accuracy_level=case.accuracy_level
    )
    quantizer.process()
    return quantizer.model.model, feeds


def _rewritten(
    case: LlamaCase, layer: Callable[[str, str, str, int], list[onnx.NodeProto]], dropped: tuple[str, ...]
) -> onnx.ModelProto:
    """The model with new nodes in place of those that each layer calls by the names in `dropped`."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model())
    gone = {f"layer{k}.{name}" for k in range(case.config.layers) for name in dropped}
    gone |= {f"{name}.{k}" for k in range(case.config.layers) for name in dropped}
    nodes = []
    for node in model.graph.node:
        for k in range(case.config.layers):
            if node.name == f"layer{k}.attention":
                nodes += layer(f"layer{k}", f"cache_k.{k}", f"cache_v.{k}", k)
        if node.name not in gone:
            nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return model


def _drop_dead(graph: onnx.GraphProto) -> None:
    """Go backwards, since nodes come after their inputs."""
    used = {output.name for output in graph.output}
    for k in reversed(range(len(graph.node))):
        if used & set(graph.node[k].output):
            used |= set(graph.node[k].input)
        else:
            del graph.node[k]
