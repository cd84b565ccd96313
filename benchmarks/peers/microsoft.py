"""Attention cases in operators of `com.microsoft`, which have kernels of their own in ONNX Runtime.

They take rows [B, S, H * D], which the case's arrays are turned into beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ..cases.attention import AttentionCase, port
from ..cases.case import Arrays


@dataclass(frozen=True)
class Special:
    """A model of one node whose first output is [B, S, H * D]; in_place: the inputs that outputs may take over."""

    model: onnx.ModelProto
    feeds: Arrays
    answers: Callable[[np.ndarray], Arrays]
    in_place: dict[str, str] = field(default_factory=dict)


def multi_head(case: AttentionCase) -> Special | None:
    """MultiHeadAttention: full or causal, with a mask that is added."""
    feeds = case.feeds()
    if case.Hq != case.Hkv or case.softcap or case.window is not None or set(feeds) - {"Q", "K", "V", "attn_mask"}:
        return None
    arrays = {"query": _rows(feeds["Q"]), "key": _rows(feeds["K"]), "value": _rows(feeds["V"])}
    slots = [*arrays]
    if case.mask:
        bias = feeds["attn_mask"]
        if bias.dtype == bool:
            bias = np.where(bias, 0, np.finfo(feeds["Q"].dtype).min).astype(feeds["Q"].dtype)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        # It broadcasts over batches and heads alone.
        arrays["attention_bias"] = np.broadcast_to(bias, (*bias.shape[:2], case.S, case.T)).copy()
        slots += ["", "", "attention_bias"]
    return _special(case, "MultiHeadAttention", slots, arrays, {"unidirectional": int(case.causal)}, {})


def group_query(case: AttentionCase) -> Special | None:
    """GroupQueryAttention: causal, with windows, soft caps and lengths. In decode the newest key comes by itself and is
    written to its slot of the caches."""
    decode = case.S == 1 and not case.causal
    feeds, last = case.feeds(), case.lengths() - 1
    if (
        set(feeds) - {"Q", "K", "V", "nonpad_kv_seqlen"}
        or case.dtype == "bf16"
        or not (decode or (case.causal and case.S == case.T and not case.end))
    ):
        return None
    heads: dict[str, Any] = {"num_heads": case.Hq, "kv_num_heads": case.Hkv, "softcap": case.softcap}
    if case.window is not None:
        heads["local_window_size"] = case.window + 1
    arrays = {"query": _rows(feeds["Q"])}
    slots = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    in_place = {}
    if decode:
        newest = (np.arange(case.B), slice(None), last)
        arrays |= {name: _rows(feeds[x][newest][:, :, None]) for name, x in (("key", "K"), ("value", "V"))}
        arrays |= {"past_key": feeds["K"], "past_value": feeds["V"]}
        in_place = {"present_key": "past_key", "present_value": "past_value"}
    else:
        arrays |= {"key": _rows(feeds["K"]), "value": _rows(feeds["V"])}
        slots[3:5] = ["", ""]
    arrays |= {"seqlens_k": last.astype(np.int32), "total_sequence_length": np.array(case.T, np.int32)}
    return _special(case, "GroupQueryAttention", slots, arrays, heads, in_place)


OPERATORS: dict[str, Callable[[AttentionCase], Special | None]] = {
    "MultiHeadAttention": multi_head,
    "GroupQueryAttention": group_query,
}


def _special(
    case: AttentionCase,
    operator: str,
    slots: list[str],
    arrays: Arrays,
    attributes: dict[str, Any],
    in_place: dict[str, str],
) -> Special:
    outputs = [port("output", arrays["query"].dtype, arrays["query"].shape)]
    if operator == "GroupQueryAttention":
        shape = (case.B, case.Hkv, case.T, case.D)
        outputs += [port(name, arrays["query"].dtype, shape) for name in ("present_key", "present_value")]
    else:
        attributes = {"num_heads": case.Hq, **attributes}
    node = onnx.helper.make_node(
        operator, slots, [output.name for output in outputs], domain="com.microsoft", **attributes
    )
    inputs = [port(name, array.dtype, array.shape) for name, array in arrays.items()]
    graph = onnx.helper.make_graph([node], operator, inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]

    def answers(result: np.ndarray) -> Arrays:
        return {"Y": result.reshape(case.B, case.S, case.Hq, case.D).transpose(0, 2, 1, 3)}

    return Special(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), arrays, answers, in_place)


def _rows(array: np.ndarray) -> np.ndarray:
    """[B, H, S, D] -> [B, S, H * D]"""
    b, h, s, d = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(b, s, h * d)
