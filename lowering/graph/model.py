"""Reads an ONNX model: path, bytes or protobuf in, a checked `onnx_ir.Model` without model-local functions out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import ModelError
from . import schemas  # noqa: F401  (what onnxruntime writes passes onnx's checker)
from .declared_sizes import forget_unknown_sizes
from .deprecated_norms import decompose_group_norms
from .legality import check_attributes, check_bodies, check_domains, check_tensors, graphs
from .model_file import check_format, check_model_file
from .sparse_tensors import make_dense
from .undeclared import declare_inputs, declare_outputs, forget_unknown_types, is_incomplete, with_stand_ins

ModelLike = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model

# What onnx_ir notes of illegal models, with tracebacks, is for programs that ask for records; our errors are for users.
logging.getLogger("onnx_ir").addHandler(logging.NullHandler())

_FUSED_AGAIN = {
    "BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu", "QuickGelu", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip

# What onnx's checker says of models that are repaired.
_REPAIRED = ("topologically sorted", "GroupNormalization is deprecated")

# Protobuf cannot serialize more, which the checker would need to do.
_PROTOBUF_LIMIT = 2**31 - 1


def load_model(model: ModelLike) -> ir.Model:
    """The model, legal and without model-local functions: inlined, or nodes of an operator that the compiler has.

    External data stays in its file until it is used. Raises ModelError if there is no such file, if it is no ONNX
    model, or if onnx's checker or `lowering.graph.legality` refuses it.
    """
    try:
        loaded = _read(model)
        forget_unknown_sizes(loaded)
        forget_unknown_types(loaded)
        check_tensors(loaded)
        check_bodies(loaded)
        inlined = common.InlinePass(lambda function: not _is_known(function))(loaded).model
        inlined.functions.clear()  # those left are called by nobody
        check_attributes(inlined)
        check_domains(inlined)
        _forget_what_says_nothing(inlined)
        inlined.graph.outputs[:] = dict.fromkeys(inlined.graph.outputs)  # results have names, each once
        declare_inputs(inlined)
        forget_unknown_sizes(inlined)
        declare_outputs(inlined)
        return inlined
    except ModelError:
        raise
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{_name(model)} is no legal ONNX model: {str(error).strip()}") from error
    except Exception as error:
        raise ModelError(
            f"{_name(model)} cannot be read as an ONNX model: it is damaged, or holds something that no reader knows. "
            "The cause of this error has the details (-v on the command line)."
        ) from error


def _is_known(function: ir.Function) -> bool:
    """Whether the nodes of a function are operators that the compiler has: of com.microsoft, with those attributes.

    Norms and activations are inlined all the same: passes know the operators that their bodies are made of.
    """
    name, domain = function.name, function.domain
    if domain != "com.microsoft" or name in _FUSED_AGAIN or not onnx.defs.has(name, domain):
        return False
    schema = onnx.defs.get_schema(name, domain)
    return len(function.inputs) <= schema.max_input and function.attributes.keys() <= schema.attributes.keys()


def _name(model: ModelLike) -> str:
    return str(model) if isinstance(model, (str, os.PathLike)) else "The model"


def _read(model: ModelLike) -> ir.Model:
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        check_model_file(path)
        check_format(path)
        return _checked(lambda: onnx.checker.check_model(str(path)), lambda: _loaded(path))
    if not isinstance(model, (bytes, onnx.ModelProto)):
        raise ModelError(
            f"A {type(model).__name__} is no ONNX model: give a path, bytes, an onnx.ModelProto or an onnx_ir.Model. "
            "torch.onnx.export makes one of a PyTorch module."
        )
    proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else model
    if proto.ByteSize() > _PROTOBUF_LIMIT:
        return ir.from_proto(make_dense(proto))
    return _checked(lambda: onnx.checker.check_model(proto), lambda: ir.from_proto(make_dense(proto)))


def _loaded(path: Path) -> ir.Model:
    """The model of a file, whose external data stays where it is."""
    folder = str(path.parent)
    model = ir.from_proto(make_dense(onnx.load(path, load_external_data=False), folder))
    ir.external_data.set_base_dir(model.graph, folder)
    return model


def _checked(check: Callable[[], None], read: Callable[[], ir.Model]) -> ir.Model:
    """The model that is read, once onnx's checker has passed it. Nodes in any order are sorted first, deprecated norms
    written out, and inputs and outputs need no shape, and outputs no type."""
    try:
        check()
        return read()
    except onnx.checker.ValidationError as error:
        refused = error
    is_repaired = any(text in str(refused) for text in _REPAIRED)
    try:
        model = read()
    except Exception:  # what cannot be read either
        raise refused from None
    if not is_repaired and not any(map(is_incomplete, (*model.graph.inputs, *model.graph.outputs))):
        raise refused
    decompose_group_norms(model)
    try:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            graph.sort()
        proto = ir.to_proto(with_stand_ins(model))
    except (ValueError, RuntimeError):  # nodes that need each other, or what nobody computes
        raise refused from None
    onnx.checker.check_model(proto)
    return model


def _forget_what_says_nothing(model: ir.Model) -> None:
    """Takes declarations off inner values that do not say an element type, as some exporters write; off nodes how they
    are spread over devices; and off everything what only people read, which may be no text."""
    model.metadata_props.clear()
    for graph in graphs(model):
        outputs = [value for node in graph for value in node.outputs]
        attributes = [attribute for node in graph for attribute in node.attributes.values()]
        tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
        tensors += [attribute.as_tensor() for attribute in attributes if attribute.type == ir.AttributeType.TENSOR]
        described = [graph, *graph, *graph.inputs, *graph.initializers.values(), *outputs]
        for documented in (*described, *attributes):
            documented.doc_string = None
        for item in (*described, *tensors):
            item.metadata_props.clear()
        for node in graph:
            node.device_configurations = ()
        for value in outputs:
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                value.type = value.shape = None


def dtype_name(dtype: ir.DataType | None) -> str:
    """NumPy's or ml_dtypes' name of an ONNX element type, or "string"."""
    if dtype is None:
        raise ModelError("A value of the model has no element type.")
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name
