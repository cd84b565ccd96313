"""Loading of ONNX models: a path, bytes or protobuf in, a checked `onnx_ir.Model` without model-local functions out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from ...errors import ModelError
from . import schemas  # noqa: F401  (registers operators of onnxruntime for onnx's checker)
from .declared_sizes import forget_unknown_sizes
from .deprecated_norms import decompose_group_norms
from .legality import check_attributes, check_bodies, check_domains, check_tensors, iterate_graphs
from .model_file import check_format, check_model_file
from .module_paths import MODULE_PATHS, read_module_paths
from .sparse_tensors import make_dense
from .undeclared import add_stand_ins, declare_inputs, declare_outputs, forget_unknown_types, is_incomplete

ModelLike = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model

# onnx_ir logs illegal models with tracebacks. These records are for programs that ask for them; users see ModelError.
logging.getLogger("onnx_ir").addHandler(logging.NullHandler())

_FUSED_BY_PASSES = {
    "BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu", "QuickGelu", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip

# Errors of onnx's checker after which the model is repaired.
_REPAIRED = ("topologically sorted", "GroupNormalization is deprecated")

# Protobuf cannot serialize more bytes, which the checker would have to do.
_MAX_PROTOBUF_BYTES = 2**31 - 1


def load_model(model: ModelLike) -> ir.Model:
    """Return the model, legal and without model-local functions.

    Functions are inlined, or become nodes of an operator that the compiler has. External data stays in its file until
    it is used.

    Raises:
        ModelError: There is no such file, it is not an ONNX model, or onnx's checker or `legality` rejects it.
    """
    try:
        loaded = _read(model)
        forget_unknown_sizes(loaded)
        forget_unknown_types(loaded)
        check_tensors(loaded)
        check_bodies(loaded)
        inlined = common.InlinePass(lambda function: not _is_supported(function))(loaded).model
        inlined.functions.clear()  # the remaining ones are not called
        check_attributes(inlined)
        check_domains(inlined)
        _clear_unused_declarations(inlined)
        inlined.graph.outputs[:] = dict.fromkeys(inlined.graph.outputs)  # results are named, so each name occurs once
        declare_inputs(inlined)
        forget_unknown_sizes(inlined)
        declare_outputs(inlined)
        return inlined
    except ModelError:
        raise
    except onnx.checker.ValidationError as error:
        raise ModelError(
            "model.invalid_onnx", f"{_label(model)} is not a valid ONNX model: {str(error).strip()}"
        ) from error
    except Exception as error:
        raise ModelError(
            "model.file_unreadable",
            f"{_label(model)} cannot be read as an ONNX model: it is damaged, or its contents are not supported by "
            "the readers. The cause of this error has the details (-v on the command line).",
        ) from error


def _is_supported(function: ir.Function) -> bool:
    """Return whether the nodes of a function are operators that the compiler has.

    Such operators are of com.microsoft, with those attributes. Norms and activations are inlined all the same: the
    passes recognize the operators of their bodies.
    """
    name, domain = function.name, function.domain
    if domain != "com.microsoft" or name in _FUSED_BY_PASSES or not onnx.defs.has(name, domain):
        return False
    schema = onnx.defs.get_schema(name, domain)
    return len(function.inputs) <= schema.max_input and function.attributes.keys() <= schema.attributes.keys()


def _label(model: ModelLike) -> str:
    return str(model) if isinstance(model, (str, os.PathLike)) else "The model"


def _read(model: ModelLike) -> ir.Model:
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        check_model_file(path)
        check_format(path)
        return _read_checked(lambda: onnx.checker.check_model(str(path)), lambda: _read_file(path))
    if not isinstance(model, (bytes, onnx.ModelProto)):
        raise ModelError(
            "model.type_unsupported",
            f"A {type(model).__name__} is not an ONNX model. Pass a path, bytes, an onnx.ModelProto or an "
            "onnx_ir.Model; torch.onnx.export makes one from a PyTorch module.",
        )
    proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else model
    if proto.ByteSize() > _MAX_PROTOBUF_BYTES:
        return ir.from_proto(make_dense(proto))
    return _read_checked(lambda: onnx.checker.check_model(proto), lambda: ir.from_proto(make_dense(proto)))


def _read_file(path: Path) -> ir.Model:
    """Return the model of a file, whose external data stays in its files."""
    folder = str(path.parent)
    model = ir.from_proto(make_dense(onnx.load(path, load_external_data=False), folder))
    ir.external_data.set_base_dir(model.graph, folder)
    return model


def _read_checked(check: Callable[[], None], read: Callable[[], ir.Model]) -> ir.Model:
    """Return the model that `read` returns, once onnx's checker has accepted it.

    Nodes in any order are sorted first and deprecated norms decomposed. Inputs and outputs need no shape, and outputs
    no type.
    """
    try:
        check()
        return read()
    except onnx.checker.ValidationError as error:
        rejection = error
    is_repaired = any(text in str(rejection) for text in _REPAIRED)
    try:
        model = read()
    except Exception:  # the model cannot be read either
        raise rejection from None
    if not is_repaired and not any(map(is_incomplete, (*model.graph.inputs, *model.graph.outputs))):
        raise rejection
    decompose_group_norms(model)
    try:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            graph.sort()
        proto = ir.to_proto(add_stand_ins(model))
    except (ValueError, RuntimeError):  # nodes that depend on each other, or values that no node computes
        raise rejection from None
    onnx.checker.check_model(proto)
    return model


def _clear_unused_declarations(model: ir.Model) -> None:
    """Clear declarations that the compiler does not read.

    Inner values lose types without an element type, as some exporters write them. Nodes lose their distribution over
    devices. Everything loses documentation and metadata, which need not be text, except for the paths of modules.
    """
    model.metadata_props.clear()
    for graph in iterate_graphs(model):
        outputs = [value for node in graph for value in node.outputs]
        attributes = [attribute for node in graph for attribute in node.attributes.values()]
        tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
        tensors += [attribute.as_tensor() for attribute in attributes if attribute.type == ir.AttributeType.TENSOR]
        described = [graph, *graph, *graph.inputs, *graph.initializers.values(), *outputs]
        for documented in (*described, *attributes):
            documented.doc_string = None
        module_paths = [(node, paths) for node in graph if (paths := read_module_paths(node))]
        for item in (*described, *tensors):
            item.metadata_props.clear()
        for node, paths in module_paths:
            node.metadata_props[MODULE_PATHS] = repr(paths)
        for node in graph:
            node.device_configurations = ()
        for value in outputs:
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                value.type = value.shape = None


def dtype_name(dtype: ir.DataType | None) -> str:
    """Return NumPy's or ml_dtypes' name of an ONNX element type, or "string"."""
    if dtype is None:
        raise ModelError("model.dtype_missing", "A value of the model has no element type.")
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name
