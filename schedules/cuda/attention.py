"""The attention rule: which kernel serves a problem on a GPU, chosen by the host where sizes are symbolic."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.problem import ATTRIBUTE, AttentionProblem

from .plain import plain


def attention(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """The kernel for a function that holds an AttentionProblem."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    return attention_kernel(AttentionProblem.from_json(func.attrs[ATTRIBUTE]))


def attention_kernel(problem: AttentionProblem) -> tirx.PrimFunc:
    """The PrimFunc with the parameters of the plain lowering; its body launches kernels."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        plain(Bound(problem, scope="local"))
    return builder.get()
