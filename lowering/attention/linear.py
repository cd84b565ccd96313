"""Linear attention: a state in place of a cache, of one size whatever the length (ONNX LinearAttention-27).

    for each batch b and head h of the state S [D, Dv], token by token:
        S   = exp(g_t) * S                       of all its rows, or of each by an element of g_t; where there is decay
        u_t = v_t, or by the delta rule beta_t (v_t - S^T k_t)
        S   = S + k_t u_t^T
        y_t = scale * S^T q_t                    for each query head that reads h

Linear Transformers (Katharopoulos et al., arXiv:2006.16236), with gates (Yang et al., arXiv:2312.06635) and the delta
rule (Schlag et al., arXiv:2102.11174; with gates Yang et al., arXiv:2412.06464). Sums and the state are float32.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import whole
from .expr.emit import cast, widened
from .parameters import Sizes, Tensor, matched

ATTRIBUTE = "lowering.linear_attention"
ACC = "float32"


@dataclass(frozen=True)
class LinearAttention:
    """What one linear attention computes. batch and length are None where they are symbolic.

    q [B, L, Hq D], k [B, L, Hk D], v [B, L, Hv Dv] and y are of type dtype, the state [B, Hv, D, Dv] of type
    state_dtype. Heads of the state share keys, v_heads / k_heads each. Of queries and heads of the state the ones that
    are fewer are shared by the others; y has a head for each of the more.
    """

    batch: int | None
    length: int | None
    q_heads: int
    k_heads: int
    v_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    state_dtype: str
    scale: float
    decay: int = 0
    """Elements of g_t for each head of the state: 0 for no decay, 1, or D."""
    betas: int = 0
    """Elements of beta_t: 0 for no delta rule, 1 for all heads of the state, or Hv."""

    def __post_init__(self) -> None:
        if min(self.q_heads, self.k_heads, self.v_heads, self.head_dim, self.v_head_dim) < 1:
            raise ValueError("a linear attention has heads, and heads have a size")
        if self.v_heads % self.k_heads or max(self.q_heads, self.v_heads) % min(self.q_heads, self.v_heads):
            raise ValueError(f"heads do not divide: q {self.q_heads}, k {self.k_heads}, v {self.v_heads}")
        if self.decay not in (0, 1, self.head_dim) or self.betas not in (0, 1, self.v_heads):
            raise ValueError("decay is by head or by element, beta for all heads or by head")

    @property
    def group(self) -> int:
        """Query heads that read one head of the state."""
        return max(self.q_heads // self.v_heads, 1)

    @property
    def y_heads(self) -> int:
        return max(self.q_heads, self.v_heads)

    def inputs(self) -> tuple[str, ...]:
        """Names of the parameters that are read, the state first."""
        there = {"decay": self.decay, "beta": self.betas}
        return ("state", "q", "k", "v", *(name for name, count in there.items() if count))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> LinearAttention:
        return LinearAttention(**json.loads(text))


class BoundLinear:
    """`linear` with the parameters of the PrimFunc frame that is open in the IRBuilder, which the constructor declares:
    the inputs, with copy the state behind the last token, and y."""

    def __init__(self, linear: LinearAttention, copy: bool = False) -> None:
        self.linear = p = linear
        T.func_name("linear_attention")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: linear.to_json()})
        names = (*linear.inputs(), *(["present"] if copy else []), "y")
        arguments = {name: T.arg(name, T.handle()) for name in names}
        size = Sizes()
        self.B = size("B") if p.batch is None else p.batch
        self.L = size("L") if p.length is None else p.length
        state: Tensor = ([self.B, p.v_heads, p.head_dim, p.v_head_dim], p.state_dtype)
        widths = {
            "q": p.q_heads * p.head_dim,
            "k": p.k_heads * p.head_dim,
            "v": p.v_heads * p.v_head_dim,
            "decay": p.v_heads * p.decay,
            "beta": p.betas,
            "y": p.y_heads * p.v_head_dim,
        }
        shapes: dict[str, Tensor] = {name: ([self.B, self.L, width], p.dtype) for name, width in widths.items()}
        shapes |= {"state": state, "present": state}
        self.buffers = {name: matched(name, argument, *shapes[name]) for name, argument in arguments.items()}
        self.state = self.buffers["present" if copy else "state"]

    # Which element of a row of a parameter: of head h of the state, and of its reader g.

    def k_at(self, h: Expr, d: Expr) -> Expr:
        p = self.linear
        return h // (p.v_heads // p.k_heads) * p.head_dim + d

    def q_at(self, h: Expr, g: Expr, d: Expr) -> Expr:
        p = self.linear
        head = h * p.group + g if p.q_heads >= p.v_heads else h // (p.v_heads // p.q_heads)
        return head * p.head_dim + d

    def v_at(self, h: Expr, c: Expr) -> Expr:
        return h * self.linear.v_head_dim + c

    def y_at(self, h: Expr, g: Expr, c: Expr) -> Expr:
        return (h * self.linear.group + g) * self.linear.v_head_dim + c

    def decay_at(self, h: Expr, d: Expr) -> Expr:
        return h if self.linear.decay == 1 else h * self.linear.decay + d

    def beta_at(self, h: Expr) -> Expr:
        return h if self.linear.betas > 1 else h * 0


def copying(linear: LinearAttention) -> tirx.PrimFunc:
    """PrimFunc (*inputs, present, y), unscheduled: the state behind the last token is an array of its own."""
    return _prim_func(linear, copy=True)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """PrimFunc (*inputs, y), which writes the state over the given one, of a copying one."""
    return _prim_func(LinearAttention.from_json(str(function.attrs[ATTRIBUTE])), copy=False)


def _prim_func(linear: LinearAttention, copy: bool) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        bound = BoundLinear(linear, copy)
        with T.sblock("linear_attention"):
            T.reads([whole(bound.buffers[name]) for name in linear.inputs()])
            T.writes([whole(bound.state), whole(bound.buffers["y"])])
            if copy:
                with T.grid(*bound.state.shape) as place:
                    T.buffer_store(bound.state, bound.buffers["state"][tuple(place)], list(place))
            heads = T.int64(linear.v_heads)
            with T.parallel(heads * bound.B) as work:
                _head(bound, T.bind(work // heads), T.bind(work % heads))
    return builder.get()


def _head(bound: BoundLinear, b: Expr, h: Expr) -> None:
    """All tokens of head h of batch b, element by element."""
    p, zero = bound.linear, tirx.const(0.0, ACC)
    D, Dv = T.int64(p.head_dim), T.int64(p.v_head_dim)
    S, u = T.alloc_buffer((p.head_dim, p.v_head_dim), ACC), T.alloc_buffer((p.v_head_dim,), ACC)

    def element(name: str, t: Expr, at: Expr) -> Expr:
        return widened(bound.buffers[name][b, t, at], ACC)

    with T.grid(D, Dv) as (d, c):
        T.buffer_store(S, widened(bound.state[b, h, d, c], ACC), [d, c])
    with T.serial(T.int64(1) * bound.L) as t:
        if p.decay:
            with T.grid(D, Dv) as (d, c):
                T.buffer_store(S, S[d, c] * tirx.exp(element("decay", t, bound.decay_at(h, d))), [d, c])
        with T.serial(Dv) as c:
            T.buffer_store(u, element("v", t, bound.v_at(h, c)), [c])
        if p.betas:
            with T.serial(Dv) as c:
                with T.serial(D) as d:
                    T.buffer_store(u, u[c] - S[d, c] * element("k", t, bound.k_at(h, d)), [c])
                T.buffer_store(u, u[c] * element("beta", t, bound.beta_at(h)), [c])
        with T.grid(D, Dv) as (d, c):
            T.buffer_store(S, S[d, c] + element("k", t, bound.k_at(h, d)) * u[c], [d, c])
        with T.grid(T.int64(p.group), Dv) as (g, c):
            y = T.alloc_buffer((1,), ACC)
            T.buffer_store(y, zero, [0])
            with T.serial(D) as d:
                T.buffer_store(y, y[0] + S[d, c] * element("q", t, bound.q_at(h, g, d)), [0])
            scaled = cast(y[0] * tirx.const(p.scale, ACC), p.dtype)
            T.buffer_store(bound.buffers["y"], scaled, [b, t, bound.y_at(h, g, c)])
    with T.grid(D, Dv) as (d, c):
        T.buffer_store(bound.state, cast(S[d, c], p.state_dtype), [b, h, d, c])
