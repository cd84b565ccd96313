"""Linear attention: a state of constant size, whatever the length, in place of a cache (ONNX LinearAttention-27).

    for each batch b and head h of the state S [D, Dv], token by token:
        S   = exp(g_t) * S                       for all its rows, or for each by an element of g_t; if there is decay
        u_t = v_t, or by the delta rule beta_t (v_t - S^T k_t)
        S   = S + k_t u_t^T
        y_t = scale * S^T q_t                    for each query head that reads h

Linear Transformers (Katharopoulos et al., arXiv:2006.16236), with gates (Yang et al., arXiv:2312.06635) and the delta
rule (Schlag et al., arXiv:2102.11174; with gates Yang et al., arXiv:2412.06464). Accumulators and state are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..records import Record
from ..tensorir.regions import full_region
from .codegen.parameters import SymbolicSizes, TensorSpec, declare_buffer
from .expr.emit import cast, widen_to

ATTRIBUTE = "lowering.linear_attention"
ACC = "float32"
_TABLES = ("first_rows", "row_counts", "past", "pages")


@dataclass(frozen=True)
class LinearAttention(Record):
    """The parameters of a linear attention. batch and length are None if they are symbolic.

    q [B, L, Hq D], k [B, L, Hk D], v [B, L, Hv Dv] and y are of type dtype, the state [B, Hv, D, Dv] of type
    state_dtype. Heads of the state share keys: v_heads / k_heads each. If there are fewer query heads than heads of the
    state, the latter share them, and the other way round; y has a head for each of the more numerous ones.
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
    packed: bool = False
    """Rows of B sequences are concatenated, [1, N, ...], and their states are in a pool [P, Hv, D, Dv].

    By int64 tables sequence b has rows first_rows[b] to first_rows[b] + row_counts[b] - 1, and state pages[b, 0]. The
    state is zeros where past[b], the number of tokens before, is 0. A sequence without rows does not change its state.
    No two sequences share a state.
    """

    def __post_init__(self) -> None:
        if min(self.q_heads, self.k_heads, self.v_heads, self.head_dim, self.v_head_dim) < 1:
            raise ValueError("a linear attention needs at least one head, of size 1 or more")
        if self.v_heads % self.k_heads or max(self.q_heads, self.v_heads) % min(self.q_heads, self.v_heads):
            raise ValueError(
                f"heads are not multiples of each other: q {self.q_heads}, k {self.k_heads}, v {self.v_heads}"
            )
        if self.decay not in (0, 1, self.head_dim) or self.betas not in (0, 1, self.v_heads):
            raise ValueError("decay must be by head or by element, and beta for all heads or by head")

    @property
    def group(self) -> int:
        """Query heads that read one head of the state."""
        return max(self.q_heads // self.v_heads, 1)

    @property
    def y_heads(self) -> int:
        return max(self.q_heads, self.v_heads)

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the parameters that are read, the state first."""
        is_present = {"decay": self.decay, "beta": self.betas} | dict.fromkeys(_TABLES, self.packed)
        return ("state", "q", "k", "v", *(name for name, is_used in is_present.items() if is_used))


@dataclass(frozen=True)
class LinearSequence:
    """The tokens of a batch: `count` rows from [batch, first] on, and the state of index `state`.

    is_new is whether the state before them is zeros, whatever memory contains; None: the state is read from memory.
    """

    batch: Expr
    first: Expr
    count: Expr
    state: Expr
    is_new: Expr | None


class BoundLinearAttention:
    """`linear` with the parameters of the PrimFunc frame that is open in the IRBuilder.

    The constructor declares the parameters: the inputs, with copy the state after the last token, and y.
    """

    def __init__(self, linear: LinearAttention, copy: bool = False) -> None:
        self.linear = p = linear
        T.func_name("linear_attention")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: linear.to_json()})
        names = (*linear.inputs(), *(["present"] if copy else []), "y")
        arguments = {name: T.arg(name, T.handle()) for name in names}
        size = SymbolicSizes()
        self.B = size("B") if p.batch is None else p.batch
        self.L = size("L") if p.length is None else p.length
        self.states = size("states") if p.packed else self.B
        state: TensorSpec = ([self.states, p.v_heads, p.head_dim, p.v_head_dim], p.state_dtype)
        widths = {
            "q": p.q_heads * p.head_dim,
            "k": p.k_heads * p.head_dim,
            "v": p.v_heads * p.v_head_dim,
            "decay": p.v_heads * p.decay,
            "beta": p.betas,
            "y": p.y_heads * p.v_head_dim,
        }
        front = T.int64(1) if p.packed else self.B
        shapes: dict[str, TensorSpec] = {name: ([front, self.L, width], p.dtype) for name, width in widths.items()}
        shapes |= dict.fromkeys(_TABLES, ([self.B], "int64")) | {"pages": ([self.B, 1], "int64")}
        shapes |= {"state": state, "present": state}
        self.buffers = {name: declare_buffer(name, argument, *shapes[name]) for name, argument in arguments.items()}
        self.state = self.buffers["present" if copy else "state"]

    @property
    def tokens(self) -> Expr:
        """Total number of tokens of all sequences."""
        return T.int64(1) * self.L * (1 if self.linear.packed else self.B)

    def sequence(self, b: Expr, bind: Callable[[Expr], Expr]) -> LinearSequence:
        """Return the tokens of batch b, or none if tables point outside the buffers. bind creates a variable."""
        if not self.linear.packed:
            return LinearSequence(b, T.int64(0), T.int64(1) * self.L, b, None)
        first, count, past = (bind(self.buffers[name][b]) for name in ("first_rows", "row_counts", "past"))
        page, rows = bind(self.buffers["pages"][b, T.int64(0)]), T.int64(1) * self.L
        is_there = tirx.all(first >= 0, first <= rows, page >= 0, page < self.states)
        count = bind(tirx.Select(is_there, tirx.max(tirx.min(count, rows - first), T.int64(0)), T.int64(0)))
        return LinearSequence(T.int64(0), first, count, page, past == 0)

    def state_before(self, sequence: LinearSequence, h: Expr, d: Expr, c: Expr) -> Expr:
        """Return an element of the state before the first token."""
        value = widen_to(self.state[sequence.state, h, d, c], ACC)
        if sequence.is_new is None:
            return value
        return tirx.if_then_else(sequence.is_new, tirx.const(0.0, ACC), value)

    # The index in a row of a parameter, for head h of the state and its query head g.

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


def build_linear_attention(linear: LinearAttention) -> tirx.PrimFunc:
    """Build PrimFunc (*inputs, present, y), unscheduled: the state after the last token is an array of its own."""
    return _build(linear, copy=True)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Build PrimFunc (*inputs, y), which overwrites the input state, from a copying one."""
    return _build(LinearAttention.from_json(str(function.attrs[ATTRIBUTE])), copy=False)


def _build(linear: LinearAttention, copy: bool) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        bound = BoundLinearAttention(linear, copy)
        with T.sblock("linear_attention"):
            T.reads([full_region(bound.buffers[name]) for name in linear.inputs()])
            T.writes([full_region(bound.state), full_region(bound.buffers["y"])])
            if copy:
                with T.grid(*bound.state.shape) as index:
                    T.buffer_store(bound.state, bound.buffers["state"][tuple(index)], list(index))
            heads = T.int64(linear.v_heads)
            with T.parallel(heads * bound.B) as work:
                sequence = bound.sequence(T.bind(work // heads), T.bind)
                with T.If(sequence.count > 0), T.Then():
                    _emit_head(bound, sequence, T.bind(work % heads))
    return builder.get()


def _emit_head(bound: BoundLinearAttention, sequence: LinearSequence, h: Expr) -> None:
    """Emit all tokens of head h of a sequence, element by element."""
    p, zero = bound.linear, tirx.const(0.0, ACC)
    D, Dv = T.int64(p.head_dim), T.int64(p.v_head_dim)
    S, u = T.alloc_buffer((p.head_dim, p.v_head_dim), ACC), T.alloc_buffer((p.v_head_dim,), ACC)

    def element(name: str, t: Expr, at: Expr) -> Expr:
        return widen_to(bound.buffers[name][sequence.batch, sequence.first + t, at], ACC)

    with T.grid(D, Dv) as (d, c):
        T.buffer_store(S, bound.state_before(sequence, h, d, c), [d, c])
    with T.serial(sequence.count) as t:
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
            T.buffer_store(bound.buffers["y"], scaled, [sequence.batch, sequence.first + t, bound.y_at(h, g, c)])
    with T.grid(D, Dv) as (d, c):
        T.buffer_store(bound.state, cast(S[d, c], p.state_dtype), [sequence.state, h, d, c])
