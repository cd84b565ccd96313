"""Inference of types and shapes for operators that onnx does not have (schemas.py), as far as inputs determine them.

Functions take onnx's inference context, and return types by output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

Kind = onnx.TypeProto  # type of a tensor; a dimension without a number or a name is unknown
Inference = Callable[[Any], dict[int, Kind]]


def _make_tensor_type(element: int, dims: list[Any] | None) -> Kind:
    """Return the type of a tensor.

    dims are sizes as protobuf has them, numbers, or None; a number that cannot be a size is unknown.
    """
    kind = onnx.TypeProto()
    kind.tensor_type.elem_type = element
    if dims is not None:
        kind.tensor_type.shape.SetInParent()
        for dim in dims:
            entry = kind.tensor_type.shape.dim.add()
            if not isinstance(dim, int | None):
                entry.CopyFrom(dim)
            elif dim is not None and abs(dim) < 2**63:
                entry.dim_value = dim
    return kind


def _read_input(context: Any, k: int) -> tuple[int, list[Any] | None]:
    """Return element type and dimensions of an input: 0 and None if unknown."""
    kind = context.get_input_type(k) if k < context.get_num_inputs() else None
    if kind is None or not kind.HasField("tensor_type"):
        return 0, None
    tensor = kind.tensor_type
    return tensor.elem_type, list(tensor.shape.dim) if tensor.HasField("shape") else None


def _read_integer(context: Any, name: str, default: int = 0) -> int:
    attribute = context.get_attribute(name)
    return default if attribute is None else attribute.i


def infer_like_first(*outputs: int) -> Inference:
    return lambda context: {k: _make_tensor_type(*_read_input(context, 0)) for k in outputs}


def infer_like_second(context: Any) -> dict[int, Kind]:
    """Return the shape of the first input with the type of the second: normalization and its scale."""
    return {0: _make_tensor_type(_read_input(context, 1)[0], _read_input(context, 0)[1])}


def _replace_last(dims: list[Any] | None, size: Callable[[int], int | None]) -> list[Any] | None:
    """Return the dimensions with the last one replaced by `size` of its number."""
    if not dims:
        return None
    return [*dims[:-1], size(dims[-1].dim_value) if dims[-1].HasField("dim_value") else None]


def infer_halved(context: Any) -> dict[int, Kind]:
    element, dims = _read_input(context, 0)
    return {0: _make_tensor_type(element, _replace_last(dims, lambda n: n // 2))}


def infer_embedding(context: Any) -> dict[int, Kind]:
    (_, ids), (element, table) = _read_input(context, 0), _read_input(context, 2)
    dims = [*ids, table[1]] if ids is not None and table else None
    batch = None if ids is None else ids[:1]
    return {
        0: _make_tensor_type(element, dims),
        1: _make_tensor_type(onnx.TensorProto.INT32, batch),
        2: _make_tensor_type(element, dims),
    }


def infer_q_embedding(context: Any) -> dict[int, Kind]:
    kinds = infer_embedding(context)
    kinds[0].tensor_type.elem_type = onnx.TensorProto.FLOAT
    return {k: kinds[k] for k in (0, 1)}


def infer_conv_rank(context: Any) -> dict[int, Kind]:
    """Return [N, M, ...] with unknown spatial sizes."""
    (element, x), (_, weights) = _read_input(context, 0), _read_input(context, 1)
    dims = [x[0], weights[0], *[None] * (len(x) - 2)] if x and weights and len(x) > 2 else None
    return {0: _make_tensor_type(element, dims)}


def infer_matmul(context: Any) -> dict[int, Kind]:
    (element, a), (_, b) = _read_input(context, 0), _read_input(context, 1)
    if not a or not b or min(len(a), len(b)) < 2:
        return {0: _make_tensor_type(element, None)}
    for dims, name in ((a, "A"), (b, "B")):
        if _read_integer(context, f"transBatch{name}"):
            dims[:-1] = [*dims[1:-1], dims[0]]
        if _read_integer(context, f"trans{name}"):
            dims[-2:] = dims[:-3:-1]
    longer = a if len(a) >= len(b) else b
    return {0: _make_tensor_type(element, [*longer[:-2], a[-2], b[-1]])}


def infer_packed_matmul(context: Any) -> dict[int, Kind]:
    element, dims = _read_input(context, 0)
    return {0: _make_tensor_type(element, None if dims is None else [*dims[:-1], _read_integer(context, "N")])}


def infer_quantized_rows(context: Any) -> dict[int, Kind]:
    return {0: _make_tensor_type(_read_input(context, 2)[0], None)}


def infer_attention(context: Any) -> dict[int, Kind]:
    (element, x), (_, weights) = _read_input(context, 0), _read_input(context, 1)
    sizes = context.get_attribute("qkv_hidden_sizes")
    width = sizes.ints[2] if sizes is not None else weights[1].dim_value // 3 if weights else 0
    return {0: _make_tensor_type(element, [*x[:2], width or None] if x else None), 1: _make_tensor_type(element, None)}


def infer_attention_with_sinks(context: Any) -> dict[int, Kind]:
    (element, q), (_, v) = _read_input(context, 0), _read_input(context, 2)
    heads, kv_heads = _read_integer(context, "q_num_heads"), _read_integer(context, "kv_num_heads")
    y = [*q[:-1], v[-1]] if q and v and len(q) == len(v) else None
    if y is not None and len(y) == 3:
        y = _replace_last(y, lambda width: width // kv_heads * heads if kv_heads else None)
    return {
        0: _make_tensor_type(element, y),
        **{k: _make_tensor_type(_read_input(context, n)[0], None) for k, n in ((1, 1), (2, 2), (3, 0))},
    }


def infer_q_attention(context: Any) -> dict[int, Kind]:
    (_, x), (_, weights), (element, _) = (_read_input(context, k) for k in range(3))
    width = weights[1].dim_value // 3 if weights and len(weights) > 1 else 0
    return {0: _make_tensor_type(element, [*x[:2], width or None] if x else None), 1: _make_tensor_type(element, None)}


def infer_multi_head_attention(context: Any) -> dict[int, Kind]:
    (element, query), (_, key), (_, value) = (_read_input(context, k) for k in range(3))
    heads, source = _read_integer(context, "num_heads"), value or key or query
    width = None
    if source and source[-1].HasField("dim_value"):
        width = source[-1].dim_value * (1 if len(source) == 3 else heads)
    kinds = {k: _make_tensor_type(element, None) for k in (1, 2, 3)}
    return {0: _make_tensor_type(element, [*query[:2], width] if query else None), **kinds}


def infer_group_query_attention(context: Any) -> dict[int, Kind]:
    element, query = _read_input(context, 0)
    heads, kv_heads = _read_integer(context, "num_heads"), _read_integer(context, "kv_num_heads")
    is_packed = not _read_input(context, 1)[0]
    dims = _replace_last(query, lambda n: n * heads // (heads + 2 * kv_heads) if is_packed else n)
    past = _read_input(context, 3)[0] or element
    return {0: _make_tensor_type(element, dims), 1: _make_tensor_type(past, None), 2: _make_tensor_type(past, None)}


def infer_decoder_attention(context: Any) -> dict[int, Kind]:
    kinds = infer_multi_head_attention(context)
    if not _read_input(context, 1)[0]:
        element, query = _read_input(context, 0)
        kinds[0] = _make_tensor_type(element, _replace_last(query, lambda n: n // 3))
    return kinds


def infer_packed_attention(context: Any) -> dict[int, Kind]:
    (element, query), (_, value) = _read_input(context, 0), _read_input(context, 2)
    if value or not query or len(query) != 4:
        return {0: _make_tensor_type(element, [query[0], value[1]] if query and value and len(value) == 2 else None)}
    is_static = all(query[k].HasField("dim_value") for k in (1, 3))
    return {0: _make_tensor_type(element, [query[0], query[1].dim_value * query[3].dim_value if is_static else None])}


def infer_paged_attention(context: Any) -> dict[int, Kind]:
    (element, query), (_, key) = _read_input(context, 0), _read_input(context, 1)
    heads, kv_heads = _read_integer(context, "num_heads"), _read_integer(context, "kv_num_heads")
    v_size, width = _read_integer(context, "v_head_size"), None
    if query and query[-1].HasField("dim_value"):
        count = heads if key else heads + 2 * kv_heads
        width = heads * (v_size or query[-1].dim_value // max(count, 1))
    output = _make_tensor_type(element, [*query[:1], width] if query else None)
    return {0: output, 1: _make_tensor_type(*_read_input(context, 3)), 2: _make_tensor_type(*_read_input(context, 4))}


def infer_linear_attention(context: Any) -> dict[int, Kind]:
    (element, query), (_, value), (state, past) = (_read_input(context, k) for k in (0, 2, 3))
    heads, kv_heads = (_read_integer(context, name) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(heads, kv_heads) < 1:
        return {0: _make_tensor_type(element, None), 1: _make_tensor_type(state or element, past)}
    (size, has_size), (width, has_width) = (
        (dims[-1].dim_value // count, dims[-1].HasField("dim_value"))
        for dims, count in ((query, heads), (value, kv_heads))
    )
    state_dims = past or [query[0], kv_heads, size if has_size else None, width if has_width else None]
    output_width = max(heads, kv_heads) * width if has_width else None
    return {
        0: _make_tensor_type(element, [*query[:-1], output_width]),
        1: _make_tensor_type(state or element, state_dims),
    }


def infer_lstm(context: Any) -> dict[int, Kind]:
    (element, x), (_, w), (_, r) = (_read_input(context, k) for k in range(3))
    if not x or not w or not r:
        return {k: _make_tensor_type(element, None) for k in range(3)}
    state = [w[0], x[1], r[1]]
    return {
        0: _make_tensor_type(element, [x[0], *state]),
        1: _make_tensor_type(element, state),
        2: _make_tensor_type(element, state),
    }


def infer_causal_conv(context: Any) -> dict[int, Kind]:
    (element, data), (_, weight), (_, past) = (_read_input(context, k) for k in (0, 1, 3))
    if past is None and data and weight:
        is_static, dilation = weight[-1].HasField("dim_value"), _read_integer(context, "dilation", 1)
        state_length = (weight[-1].dim_value - 1) * dilation if is_static else None
        past = (
            [data[0], state_length, *data[2:]] if _read_integer(context, "channels_last") else [*data[:2], state_length]
        )
    return {0: _make_tensor_type(element, data), 1: _make_tensor_type(element, past)}
