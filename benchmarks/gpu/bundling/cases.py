"""The measured kernels, and the sizes at which they take part in a case. The most telling cases come first."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from lowering.attention.record.problem import AttentionProblem, Mask, Window
from lowering.tensorir.scatter import CacheUpdate

from ..plan import Bar, Case, Kernel, Sizes
from . import sweeps
from .matmuls import matmul_of
from .problems import (
    DECODE_CHECKS,
    GQA,
    TYPES,
    Parts,
    attention_kernel,
    attention_problem,
    cache_bytes,
    flops,
    matmul_kernel,
)

LENGTHS = (4096, 8192, 16384)
TOKENS = 16384  # of the batch of a prefill

CAUSAL = Window(right=0)
_MATH_BYTES = 4 << 30  # of scores in float32, several of which the backend "math" stores: beyond that it is left out

# Small and odd: no multiple of a tile; more rows than keys; one row; blocks that work through several tiles.
_CHECKS = ((1, 131, 147), (2, 197, 331), (3, 65, 40), (1, 1, 300), (1, 1031, 1100))


def plan() -> tuple[dict[str, Kernel], dict[str, Case]]:
    """Return kernels and cases by name."""
    shapes = (("f16", 64), ("f16", 256), ("bf16", 128))
    sweeps_and_cases = [
        *sweeps.list_sweeps(),
        _decode("f16"),
        _matmuls(),
        _variants(),
        _decode("bf16"),
        _updates(),
        _fallbacks(),
    ]
    sweeps_and_cases += [_prefill("f16", 128), *(_prefill(*other) for other in shapes)]
    kernels = {kernel.name: kernel for group, _ in sweeps_and_cases for kernel in group}
    return kernels, {case.name: case for _, group in sweeps_and_cases for case in group}


def sanitized(kernels: dict[str, Kernel]) -> tuple[str, ...]:
    """The first kernel of each variant of each operation; of matmuls one with ping-pong, too."""
    first: dict[tuple[str, str, bool], str] = {}
    for kernel in kernels.values():
        has_ping_pong = any(fields.get("ping_pong", False) for fields in kernel.tiles.values())
        first.setdefault((kernel.operation, kernel.variant, has_ping_pong), kernel.name)
    return tuple(first.values())


def _peers(p: AttentionProblem, sizes: Sizes, flex: bool) -> tuple[str, ...]:
    """Return the backends of SDPA, all without a soft cap, and FlexAttention, which has no mask tensors."""
    keeps = 4 * sizes.batch * p.q_heads * sizes.q_len * sizes.kv_len <= _MATH_BYTES
    backends = () if p.softcap else ("cudnn", "flash", "efficient", *(("math",) if keeps else ()))
    return (*backends, *(("flex",) if flex and p.mask is None else ()))


def _prefill(dtype: str, dim: int) -> Parts:
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for kind, window in (("full", None), ("causal", CAUSAL)):
        p, name = attention_problem(dtype, dim, window=window), f"{dtype} D{dim} {kind}"
        contenders = ("wgmma", "mma") if (dtype, dim) == ("f16", 128) else ("wgmma",)
        kernels += [attention_kernel(name, contender, p, _CHECKS) for contender in contenders]
        for length in LENGTHS:
            sizes = Sizes(TOKENS // length, length, length)
            names = tuple(f"{contender} {name}" for contender in contenders)
            cases.append(_contest(f"{name} S{length}", "prefill", p, sizes, names, _bars(dtype, dim, kind)))
    return kernels, cases


def _bars(dtype: str, dim: int, kind: str) -> tuple[Bar, ...]:
    if (dtype, dim) != ("f16", 128):
        return ()
    first = (Bar("wgmma", rate=450e12), Bar("mma", rate=300e12)) if kind == "full" else ()
    return (*first, Bar("wgmma", ratio=1.0))


def _contest(
    name: str, group: str, p: AttentionProblem, sizes: Sizes, kernels: tuple[str, ...], bars: tuple[Bar, ...] = ()
) -> Case:
    """Kernels for many query rows. FlexAttention, slow to compile, has its turn where rules differ or D is 128."""
    flex = group != "prefill" or (p.head_dim == 128 and p.dtype == "float16")
    return Case(name, group, kernels, _peers(p, sizes, flex), sizes, flops(p, sizes), "FLOP", bars)


def _variants() -> Parts:
    """Return the variants of real models, in float16 with D 128."""
    long, short = Sizes(1, 16384, 16384), Sizes(4, 4096, 4096)
    mask = Mask("bool", (1, 1, None, None))
    problems: dict[str, tuple[AttentionProblem, Sizes]] = {
        "GQA 32/8 causal": (attention_problem("f16", 128, window=CAUSAL, **GQA), Sizes(2, 8192, 8192)),
        "window 1024": (attention_problem("f16", 128, window=Window(left=1023, right=0)), long),
        "bool mask": (attention_problem("f16", 128, mask=mask), short),
        "additive mask": (attention_problem("f16", 128, mask=replace(mask, dtype="float16")), short),
        "softcap 50 causal": (attention_problem("f16", 128, softcap=50.0, window=CAUSAL), Sizes(2, 8192, 8192)),
        "ragged": (attention_problem("f16", 128, lengths=True), replace(short, lengths=(4096, 3000, 2111, 517))),
    }
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for name, (p, sizes) in problems.items():
        kernels.append(attention_kernel(name, "wgmma", p, _CHECKS))
        cases.append(_contest(f"{name} S{sizes.q_len}", "variants", p, sizes, (f"wgmma {name}",)))
    return kernels, cases


def _decode(dtype: str) -> Parts:
    """One new token, Hq 32, Hkv 8, D 128. Ragged lengths have a mean of half the slots."""
    full = attention_problem(dtype, 128, **GQA)
    ragged = replace(full, lengths=True, window=Window(right=0, offset="lengths"))
    kernels = [attention_kernel(dtype, "decode", full, DECODE_CHECKS)]
    kernels.append(attention_kernel(f"{dtype} ragged", "decode", ragged, DECODE_CHECKS))
    shapes = [s for s in itertools.product((1, 8, 64), (4096, 16384, 65536)) if s != (64, 65536)]
    cases = []
    for batch, slots in shapes if dtype == "f16" else shapes[:2]:
        sizes = Sizes(batch, 1, slots)
        name = f"decode {dtype} B{batch} kv {slots}"
        cases.append(_stream(name, "decode", full, sizes, f"decode {dtype}", (Bar("decode", share=0.85),)))
    for batch, slots in ((8, 16384), (64, 4096)):
        lengths = tuple(int(n) for n in np.linspace(slots / 16, slots * 15 / 16, batch))
        name = f"decode {dtype} B{batch} ragged {slots}"
        cases.append(_stream(name, "decode", ragged, Sizes(batch, 1, slots, lengths), f"decode {dtype} ragged"))
    return kernels, cases


def _stream(name: str, group: str, p: AttentionProblem, sizes: Sizes, kernel: str, bars: tuple[Bar, ...] = ()) -> Case:
    flex = sizes.kv_len == 16384 and sizes.batch == 8
    return Case(name, group, (kernel,), _peers(p, sizes, flex), sizes, cache_bytes(p, sizes), "read", bars)


def _matmuls() -> Parts:
    """Return the down projection of Llama 3 8B, and its gate; the square of 8192; and odd sizes, for checks."""
    kernels: list[Kernel] = []
    cases: list[Case] = []

    def add(name: str, dtype: str, n: int, k: int, form: tuple[bool, str], rows: dict[str, tuple[int, ...]]) -> None:
        """form is whether B is [N, K], and the epilogue; rows are timed: "many" in every variant, "few" in
        one, as all of these are served by one kernel."""
        p = matmul_of(TYPES[dtype], n, k, transposed=form[0], epilogue=form[1])
        full = f"matmul {dtype} {name}"
        contenders = ("wgmma", "mma") if name == "8192" else ("wgmma",)
        kernels.extend(matmul_kernel(full, contender, p) for contender in contenders)
        names = tuple(kernel.name for kernel in kernels[-len(contenders) :])
        peers = ("cublas", "compiled") if form[1] == "gate" else ("cublas",)
        moved = 2.0 * len(p.factors) * n * k
        for m in rows.get("many", ()):
            done = 2.0 * len(p.factors) * m * n * k
            bars = (Bar("wgmma", ratio=0.9),) if m >= 1024 else ()
            cases.append(Case(f"{full} m {m}", "matmul", names, peers, Sizes(1, m, 1), done, "FLOP", bars))
        for m in rows.get("few", ()):
            case = Case(f"{full} m {m}", "few rows", names[:1], peers, Sizes(1, m, 1), moved, "read")
            cases.append(replace(case, bars=(Bar("wgmma", share=0.85),)))

    add("odd", "f16", 264, 200, (False, "bias"), {})
    add("odd, stored", "bf16", 264, 200, (True, "none"), {})
    add("odd gate", "f16", 264, 200, (True, "gate"), {})
    add("8192", "bf16", 8192, 8192, (False, "none"), {"many": (8192,)})
    add("8192, stored", "bf16", 8192, 8192, (True, "none"), {"many": (8192,)})
    add("4096 x 4096", "f16", 4096, 4096, (True, "bias"), {"many": (4096, 512, 64), "few": (1, 16)})
    add("gate 14336 x 4096", "f16", 14336, 4096, (True, "gate"), {"many": (4096, 512), "few": (1, 8)})
    add("down 4096 x 14336", "f16", 4096, 14336, (True, "none"), {"many": (4096, 512), "few": (1,)})
    return kernels, cases


def _updates() -> Parts:
    """Rows for caches of 8 heads with D 128: of a prefill and of a step; into the cache, and into a copy."""
    update = CacheUpdate("float16", (None, 8, None, 128), None, 2)
    checks = (Sizes(1, 3, 17, (5,)), Sizes(3, 1, 40, (0, 39, 7)), Sizes(2, 33, 50, (-4, 30)))
    kernels = [
        Kernel("update in place", "update", "update", update.to_json(),
               ("cache", "update", "write_indices"), "cache", 0.0, checks, "update"),
        Kernel("update copying", "update", "update", update.to_json(),
               ("cache", "update", "write_indices", "present"), "present", 0.0, checks, "update"),
    ]  # fmt: skip
    row = 2.0 * 8 * 128  # bytes
    cases = []
    for batch, rows, slots in ((8, 4096, 8192), (64, 1, 4096)):
        sizes = Sizes(batch, rows, slots, tuple(b % 7 * 100 for b in range(batch)))
        name, moved = f"update B{batch} rows {rows}", 2 * batch * rows * row
        cases.append(Case(name, "update", ("update in place",), ("index",), sizes, moved, "copy"))
    copied = 2 * sizes.batch * sizes.kv_len * row
    cases.append(Case("update copying B64", "update", ("update copying",), (), sizes, copied, "copy"))
    return kernels, cases


def _fallbacks() -> Parts:
    """Return the fallback kernels, which serve any problem. They are checked; only decoding in float32 is timed."""
    p = attention_problem("f32", 80, q_heads=8, kv_heads=4, v_head_dim=40, window=CAUSAL)
    step = attention_problem("f32", 128, **GQA)
    kernels = [
        attention_kernel("f32 D80", "plain", p, _CHECKS[:4]),
        attention_kernel("f32", "rows", step, DECODE_CHECKS),
    ]
    sizes = Sizes(8, 1, 16384)
    moved = 2 * cache_bytes(step, sizes)  # float32
    case = Case("decode f32 B8 kv 16384", "decode", ("rows f32",), _peers(step, sizes, False), sizes, moved, "read")
    return kernels, [case]
