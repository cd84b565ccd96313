"""`flex_attention`: attention over arrays whose score and mask are Python functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..errors import InputError
from ..runtime import Model
from . import kept
from .block_mask import BlockMask
from .captured import specs_of
from .fingerprint import fingerprint
from .mod import Mod
from .problem import check_operands, checked_names, problem_of, run

Array: TypeAlias = Any


def flex_attention(
    q: Array,
    k: Array,
    v: Array,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    captures: Mapping[str, Array] | None = None,
    target: str = "cpu",
) -> Array | tuple[Array, Array]:
    """softmax(score_mod(scale * q k^T) where mask_mod holds) v, over arrays.

    q is [B, Hq, S, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv], of float32, float16, bfloat16 or float64; k and v may
    have one batch for all. NumPy's arrays, or those of any library that speaks DLPack: the result is of the same kind,
    [B, Hq, S, Dv] in the type of q. With return_lse it is the pair of that and lse [B, Hq, S] in float32 (float64 for
    float64): the natural logarithm of the sum of exp(score) over the keys that a row sees. A row that sees none gives 0
    and -inf.

    score_mod(score, b, h, q_idx, kv_idx) gives the score that counts, in float32 (float64), mask_mod(b, h, q_idx,
    kv_idx) whether the pair is visible; h is the query head. They are Python functions that are traced, once: with the
    operators of Python and the functions of `lowering.flex`. Arrays that they read are `captures` by name, and their
    keyword-only parameters; new values, and other lengths, need no new kernel. block_mask says which blocks mask_mod
    need be looked at, by `create_block_mask` or `BlockMask.from_kv_blocks`; without one the kernel finds that out by
    itself, where it can. enable_gqa allows Hq to be a multiple of Hkv: query head h reads key/value head
    h // (Hq // Hkv). scale is 1 / sqrt(D) by default. target is that of `lowering.compile`.

    The first call of a kind compiles, which takes seconds; kernels are kept in memory and on disk (`cache_info`).

    Raises InputError for what does not fit, and for mods that cannot be traced.

    Source: PyTorch's torch.nn.attention.flex_attention.
    """
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    captures = {} if captures is None else checked_names(captures)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise InputError(f"block_mask is a {type(block_mask).__name__}. Make one by create_block_mask.")
        mask_mod, captures = block_mask.joined(mask_mod, captures)
        given["block_states"] = block_mask.states
    if captures:
        given.update(captures)
    kind = _kind(given, score_mod, mask_mod, block_mask, scale, enable_gqa, return_lse, target)
    model = None if kind is None else kept.known(kind)
    if model is None:
        model = _model(given, captures, score_mod, mask_mod, block_mask, scale, enable_gqa, return_lse, target)
        if kind is not None:
            kept.remember(kind, model)
    elif block_mask is not None:
        block_mask.check(q.shape, k.shape)
    results = run(model, given)
    return (results["y"], results["lse"]) if return_lse else results["y"]


def _kind(
    given: Mapping[str, Any],
    score_mod: Any,
    mask_mod: Any,
    block_mask: BlockMask | None,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    target: Any,
) -> tuple[Any, ...] | None:
    """What calls have in common that run one kernel and need no further check; None where that cannot be told."""
    score = () if score_mod is None else fingerprint(score_mod)
    mask = () if mask_mod is None else fingerprint(mask_mod)
    if score is None or mask is None:
        return None
    try:
        scale, target = None if scale is None else float(scale), str(target)
        arrays = [(name, array.dtype, array.shape) for name, array in given.items()]
        (q_batch, q_heads, _, size), (k_batch, k_heads, k_keys, k_size), (v_batch, v_heads, v_keys, v_size) = (
            shape for _, _, shape in arrays[:3]
        )
    except (AttributeError, TypeError, ValueError):
        return None
    # Batches and keys that differ have no kernel that would refuse them.
    same = k_batch == 1, q_batch == k_batch, k_batch == v_batch, k_keys == v_keys
    sizes = q_heads, k_heads, v_heads, size, k_size, v_size, same
    blocks = None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing)
    kinds = tuple([(name, dtype, len(shape)) for name, dtype, shape in arrays])
    return score, mask, blocks, sizes, kinds, scale, bool(enable_gqa), bool(return_lse), target


def _model(
    given: Mapping[str, Any],
    captures: Mapping[str, Any],
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    target: str,
) -> Model:
    for name in "qkv":
        if not hasattr(given[name], "shape") or not hasattr(given[name], "dtype"):
            raise InputError(f"{name} is a {type(given[name]).__name__}, no array.")
    shapes = {name: tuple(map(int, given[name].shape)) for name in "qkv"}
    dtypes = {name: str(given[name].dtype).rpartition(".")[2] for name in "qkv"}
    check_operands(shapes, dtypes, enable_gqa)
    if block_mask is not None:
        block_mask.check(shapes["q"], shapes["k"])
    problem = problem_of(
        any_length(shapes),
        dtypes,
        score_mod,
        mask_mod,
        specs_of(captures),
        None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing),
        scale,
        enable_gqa,
        return_lse,
    )
    return kept.model_of(problem, target)


def any_length(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int | str, ...]]:
    """The shapes with names for batch, rows and keys; they are numbers that fit together."""
    (batch, *_), (kv_batch, *_), _ = (shapes[name] for name in "qkv")
    fit: dict[str, tuple[int | str, str]] = {"q": ("batch", "rows"), "k": ("batch", "keys"), "v": ("batch", "keys")}
    if kv_batch == 1 != batch:
        fit |= {"k": (1, "keys"), "v": (1, "keys")}
    return {name: (fit[name][0], shape[1], fit[name][1], shape[3]) for name, shape in shapes.items()}
