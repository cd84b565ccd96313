"""Sizes that depend on data are defined before they are used, whatever order fusion leaves bindings in."""

from __future__ import annotations

import itertools

import pytest
import tvm
from tvm import relax, tirx

from lowering.passes.tvm_workarounds.hoist_shape_bindings import hoist_shape_bindings


def _module(order: tuple[int, ...]) -> tvm.IRModule:
    """Return a size from data, a tensor of that size, and a match_cast that asserts that of a tensor made from it."""
    size = tirx.Var("size", "int64")
    count = relax.Var("count", relax.TensorType([1], "int64"))
    shape = relax.Var("shape", relax.ShapeType(ndim=1))
    sized = relax.Var("sized", relax.ShapeType([size]))
    rows = relax.Var("rows", relax.TensorType([size], "float32"))
    unknown = relax.Var("unknown", relax.TensorType(dtype="float32", ndim=1))
    checked = relax.Var("checked", relax.TensorType([size], "float32"))
    normalize = relax.BlockBuilder().normalize
    bindings = [
        relax.VarBinding(shape, normalize(relax.op.tensor_to_shape(count))),
        relax.MatchCast(sized, shape, relax.ShapeType([size])),
        relax.VarBinding(rows, normalize(relax.op.ones([size], "float32"))),
        relax.MatchCast(unknown, rows, relax.TensorType(dtype="float32", ndim=1)),
        relax.MatchCast(checked, unknown, relax.TensorType([size], "float32")),
    ]
    body = relax.SeqExpr([relax.BindingBlock([bindings[k] for k in order])], checked)
    return tvm.IRModule({"main": relax.Function([count], body, relax.TensorType(dtype="float32", ndim=1))})


@pytest.mark.parametrize("order", itertools.permutations(range(5)))
def test_definition_comes_first(order: tuple[int, ...]) -> None:
    ordered = hoist_shape_bindings(_module(order))
    names = [binding.var.name for binding in ordered["main"].body.blocks[0].bindings]
    assert names == ["shape", "sized", "rows", "unknown", "checked"]
