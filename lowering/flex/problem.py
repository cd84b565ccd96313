"""The specification of a flex_attention kernel, and the ONNX model of one node that is compiled for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from ..attention.flex_node import DOMAIN, GRADIENT_INPUTS, FlexAttentionSettings
from ..errors import InputError
from ..runtime import Model
from .captured import ArraySpec
from .mod import Mod, ModSignature, trace_mask, trace_score

if TYPE_CHECKING:
    import onnx

Dims: TypeAlias = tuple[int | str, ...]

TYPES = ("float32", "float16", "bfloat16", "float64")
_RESERVED = {*GRADIENT_INPUTS, "dq", "dk", "dv"}
_NAME = "flex_attention"
_CHECKED_BY = f"'{_NAME}': "
"""The prefix by which a check names its node."""


@dataclass(frozen=True)
class FlexProblem:
    """The specification of a kernel.

    It has the element type, the dimensions of q, k and v (numbers, or names of symbolic sizes), the mods and the arrays
    that they read. blocks is whether a block mask differs by batch and by head (None: there is none), and lse whether
    that output is requested.
    """

    dtype: str
    q: Dims
    k: Dims
    v: Dims
    settings: FlexAttentionSettings
    captures: tuple[tuple[str, ArraySpec], ...]
    blocks: tuple[bool, bool] | None = None
    lse: bool = False

    @property
    def acc_dtype(self) -> str:
        """The type of scores and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def y(self) -> Dims:
        return (*self.q[:3], self.v[3])

    def to_onnx(self) -> onnx.ModelProto:
        """Return the model with inputs q, k, v and the captured arrays by name.

        With a block mask block_states follows v.
        """
        names, inputs = self._operands()
        outputs = [make_value_info("y", self.dtype, self.y)]
        if self.lse:
            outputs.append(make_value_info("lse", self.acc_dtype, self.q[:3]))
        inputs += make_captured_inputs(self.captures)
        return build_single_node_model("FlexAttention", [*names, *dict(self.captures)], inputs, outputs, self.settings)

    def gradient_to_onnx(self) -> onnx.ModelProto:
        """Return the model of the gradient.

        Its inputs are those of `to_onnx`, and y, lse and dy; its outputs are dq, dk, dv and d_<name> for each captured
        floating-point array.
        """
        names, values = self._operands()
        values += [
            make_value_info("y", self.dtype, self.y),
            make_value_info("lse", self.acc_dtype, self.q[:3]),
            make_value_info("dy", self.dtype, self.y),
        ]
        captured = make_captured_inputs(self.captures)
        outputs = [make_value_info(f"d{name}", self.dtype, getattr(self, name)) for name in "qkv"]
        for name, spec in self.captures:
            if "float" in spec.dtype:
                outputs.append(make_value_info(f"d_{name}", spec.dtype, _name_sizes(name, spec)))
        inputs = [*names, "y", "lse", "dy", *dict(self.captures)]
        return build_single_node_model("FlexAttentionGradient", inputs, [*values, *captured], outputs, self.settings)

    def _operands(self) -> tuple[list[str], list[onnx.ValueInfoProto]]:
        """Return names and model inputs of q, k, v and the states of a block mask; the name is "" without one."""
        names, values = ["q", "k", "v", ""], [make_value_info(name, self.dtype, getattr(self, name)) for name in "qkv"]
        if self.blocks is not None:
            by_batch, by_head = self.blocks
            states = (self.q[0] if by_batch else 1, self.q[1] if by_head else 1, "row_blocks", "key_blocks")
            values.append(make_value_info("block_states", "int8", states))
            names[3] = "block_states"
        return names, values


def _name_sizes(name: str, spec: ArraySpec) -> Dims:
    return tuple(f"{name}_{axis}" for axis in range(spec.rank))


def make_captured_inputs(captures: Sequence[tuple[str, ArraySpec]]) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a model for captured arrays, of any size."""
    return [make_value_info(name, spec.dtype, _name_sizes(name, spec)) for name, spec in captures]


def build_single_node_model(
    op_type: str,
    names: Sequence[str],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    settings: FlexAttentionSettings,
) -> onnx.ModelProto:
    """Build the model of a node with inputs of these names and all outputs of the model."""
    from onnx import helper

    output_names = [value.name for value in outputs]
    node = helper.make_node(op_type, names, output_names, _NAME, domain=DOMAIN, settings=settings.to_json())
    graph = helper.make_graph([node], "flex_attention", inputs, outputs)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def build_problem(
    shapes: Mapping[str, Sequence[Any]],
    dtypes: Mapping[str, str],
    score_mod: Mod | None,
    mask_mod: Mod | None,
    specs: Mapping[str, ArraySpec],
    blocks: tuple[tuple[int, int], tuple[bool, bool]] | None,
    scale: float | None,
    enable_gqa: bool,
    lse: bool,
) -> FlexProblem:
    """Build the problem of q, k and v of these shapes, numbers or names of symbolic sizes.

    blocks are BLOCK_SIZE of a block mask, and whether it differs by batch and by head.

    Raises InputError for arguments that do not fit together, and for mods that cannot be traced.
    """
    check_operands(shapes, dtypes, enable_gqa)
    size, differing = (None, None) if blocks is None else blocks
    settings = build_settings(score_mod, mask_mod, specs, dtypes["q"], scale, int(shapes["q"][3]), size)
    q, k, v = (tuple(shapes[name]) for name in "qkv")
    return FlexProblem(dtypes["q"], q, k, v, settings, tuple(specs.items()), differing, lse)


def build_settings(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    specs: Mapping[str, ArraySpec],
    dtype: str,
    scale: float | None,
    head_dim: int,
    block_size: tuple[int, int] | None,
) -> FlexAttentionSettings:
    """Return the attributes of the node.

    An array that a mod names and does not read is an input of the kernel like the others. Raises InputError for mods
    that cannot be traced, and for captured arrays that no mod names.
    """
    acc = "float64" if dtype == "float64" else "float32"
    score = None if score_mod is None else trace_score(score_mod, specs, acc)
    mask = None if mask_mod is None else trace_mask(mask_mod, specs)
    keyword_names = {p.name for mod in (score_mod, mask_mod) if mod is not None for p in ModSignature(mod).keywords}
    unknown = [name for name in specs if name not in keyword_names]
    if unknown:
        raise InputError(
            "flex.capture_unused",
            f"captures has '{unknown[0]}', which is not a parameter of any mod. Add it to a mod after a *: def "
            f"mod(..., *, {unknown[0]}).",
        )
    if scale is not None and not isinstance(scale, (int, float, np.integer, np.floating)):
        raise InputError("flex.scale_invalid", f"scale is {scale!r}. Give a number: it is part of the kernel.")
    scale = 1 / math.sqrt(head_dim or 1) if scale is None else float(scale)
    return FlexAttentionSettings(scale, score, mask, tuple(specs), block_size)


def check_names(captures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the captured arrays, with numbers and lists as arrays. Raises InputError for reserved names."""
    if not isinstance(captures, Mapping):
        raise InputError(
            "flex.captures_invalid", f"captures is a {type(captures).__name__}. Pass a dictionary, {{'name': array}}."
        )
    for name in _RESERVED & captures.keys():
        raise InputError(
            "flex.capture_name_reserved",
            f"a captured array cannot be called '{name}', which is the name of an input or output. Rename it.",
        )
    return {name: array if hasattr(array, "dtype") else np.asarray(array) for name, array in captures.items()}


def run_kernel(model: Model, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a kernel. An error about an array does not mention the node that checks it."""
    try:
        return model.run(arrays)
    except InputError as error:
        _, separator, text = str(error).partition(_CHECKED_BY)
        raise InputError(error.code, text) if separator else error from error.__cause__


def check_operands(shapes: Mapping[str, Sequence[Any]], dtypes: Mapping[str, str], enable_gqa: bool) -> None:
    """Raise InputError for q, k and v that do not fit together; sizes that are names fit any."""
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise InputError(
                "flex.rank_unsupported",
                f"{name} has the shape {_format_shape(shape)}. Make it [batch, heads, length, head size].",
            )
    if len({*dtypes.values()}) > 1:
        text = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise InputError("flex.dtype_mismatch", f"{text}. Give them one element type.")
    if dtypes["q"] not in TYPES:
        raise InputError("flex.dtype_unsupported", f"q, k and v are {dtypes['q']}. Use one of {', '.join(TYPES)}.")
    q, k, v = (shapes[name] for name in "qkv")
    for unit, axis in (("batches", 0), ("heads", 1), ("keys", 2)):
        if _are_different(k[axis], v[axis]):
            raise InputError("flex.shape_mismatch", f"k has {k[axis]} {unit} and v has {v[axis]}.")
    if _are_different(q[0], k[0]) and k[0] != 1:
        raise InputError(
            "flex.batch_mismatch",
            f"q has {q[0]} batches and k has {k[0]}. Give them one batch size, or give k and v one batch.",
        )
    if _are_different(q[3], k[3]):
        raise InputError("flex.head_size_mismatch", f"the head size of q is {q[3]} and that of k is {k[3]}.")
    for name, axis in (("q", 1), ("k", 1), ("q", 3), ("v", 3)):
        if not isinstance(shapes[name][axis], int):
            raise InputError(
                "flex.size_symbolic",
                f"dimension {axis} of {name} is '{shapes[name][axis]}', but kernels need a static size. Give a number.",
            )
    if q[1] != k[1]:
        if not enable_gqa:
            raise InputError(
                "flex.heads_mismatch",
                f"q has {q[1]} heads and k has {k[1]}. Pass enable_gqa=True if heads of q share those of k.",
            )
        if not k[1] or q[1] % k[1]:
            raise InputError(
                "flex.heads_not_divisible", f"the {q[1]} heads of q are not a multiple of the {k[1]} heads of k and v."
            )


def _are_different(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _format_shape(shape: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def make_value_info(name: str, dtype: str, dims: Dims) -> onnx.ValueInfoProto:
    """Return an input or output of a model."""
    from onnx import helper  # only needed to compile

    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return helper.make_tensor_value_info(name, element_type, dims)
