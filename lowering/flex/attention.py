"""`flex_attention`: attention over arrays with score and mask as Python functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..errors import InputError
from ..runtime import Model
from . import kernel_cache
from .block_mask import BlockMask
from .captured import read_array_specs
from .fingerprint import fingerprint
from .mod import Mod
from .problem import build_problem, check_names, check_operands, run_kernel

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
    """Compute softmax(score_mod(scale * q k^T) where mask_mod is true) v, over arrays.

    The first call of a kind compiles, which takes seconds; kernels are cached in memory and on disk (`cache_info`). The
    mods are traced, once. They use the operators of Python and the functions of `lowering.flex`.

    Args:
        q, k, v: q is [B, Hq, S, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv], of float32, float16, bfloat16 or float64; k
            and v may have one batch for all. They are NumPy's arrays, or those of any library that supports DLPack.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) returns the modified score, in float32 (float64); h is the
            query head.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) returns whether the pair is visible.
        block_mask: the blocks for which mask_mod must be evaluated, by `create_block_mask` or
            `BlockMask.from_kv_blocks`; without one the kernel finds them itself, if it can.
        scale: 1 / sqrt(D) by default.
        enable_gqa: allows Hq to be a multiple of Hkv: query head h reads key/value head h // (Hq // Hkv).
        return_lse: whether to return lse, too.
        captures: the arrays that mods read, by the names of their keyword-only parameters; new values, and other
            lengths, need no new kernel.
        target: as of `lowering.compile`.

    Returns:
        An array of the same library, [B, Hq, S, Dv] in the type of q. With return_lse it is the pair of that and lse
        [B, Hq, S] in float32 (float64 for float64): the natural logarithm of the sum of exp(score) over the visible
        keys of a row. A row without visible keys gives 0 and -inf.

    Raises:
        InputError: arguments do not fit together, or mods cannot be traced.

    Source: PyTorch's torch.nn.attention.flex_attention.
    """
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    captures = {} if captures is None else check_names(captures)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise InputError(
                "flex.block_mask_invalid",
                f"block_mask is a {type(block_mask).__name__}. Create one by create_block_mask.",
            )
        mask_mod, captures = block_mask.merge_call(mask_mod, captures)
        arrays["block_states"] = block_mask.states
    if captures:
        arrays.update(captures)
    call_key = _make_call_key(arrays, score_mod, mask_mod, block_mask, scale, enable_gqa, return_lse, target)
    model = None if call_key is None else kernel_cache.find_kernel(call_key)
    if model is None:
        model = _get_model(arrays, captures, score_mod, mask_mod, block_mask, scale, enable_gqa, return_lse, target)
        if call_key is not None:
            kernel_cache.remember_kernel(call_key, model)
    elif block_mask is not None:
        block_mask.check(q.shape, k.shape)
    results = run_kernel(model, arrays)
    return (results["y"], results["lse"]) if return_lse else results["y"]


def _make_call_key(
    arguments: Mapping[str, Any],
    score_mod: Any,
    mask_mod: Any,
    block_mask: BlockMask | None,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    target: Any,
) -> tuple[Any, ...] | None:
    """Return the common key of calls that run one kernel and need no further check; None if that cannot be decided."""
    score = () if score_mod is None else fingerprint(score_mod)
    mask = () if mask_mod is None else fingerprint(mask_mod)
    if score is None or mask is None:
        return None
    try:
        scale, target = None if scale is None else float(scale), str(target)
        arrays = [(name, array.dtype, array.shape) for name, array in arguments.items()]
        (q_batch, q_heads, _, size), (k_batch, k_heads, k_keys, k_size), (v_batch, v_heads, v_keys, v_size) = (
            shape for _, _, shape in arrays[:3]
        )
    except (AttributeError, TypeError, ValueError):
        return None
    # No kernel exists that would reject mismatched batches and keys.
    same = k_batch == 1, q_batch == k_batch, k_batch == v_batch, k_keys == v_keys
    sizes = q_heads, k_heads, v_heads, size, k_size, v_size, same
    blocks = None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing)
    kinds = tuple([(name, dtype, len(shape)) for name, dtype, shape in arrays])
    return score, mask, blocks, sizes, kinds, scale, bool(enable_gqa), bool(return_lse), target


def _get_model(
    arguments: Mapping[str, Any],
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
        if not hasattr(arguments[name], "shape") or not hasattr(arguments[name], "dtype"):
            raise InputError("flex.operand_not_array", f"{name} is a {type(arguments[name]).__name__}, not an array.")
    shapes = {name: tuple(map(int, arguments[name].shape)) for name in "qkv"}
    dtypes = {name: str(arguments[name].dtype).rpartition(".")[2] for name in "qkv"}
    check_operands(shapes, dtypes, enable_gqa)
    if block_mask is not None:
        block_mask.check(shapes["q"], shapes["k"])
    problem = build_problem(
        make_sizes_symbolic(shapes),
        dtypes,
        score_mod,
        mask_mod,
        read_array_specs(captures),
        None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing),
        scale,
        enable_gqa,
        return_lse,
    )
    return kernel_cache.get_kernel(problem, target)


def make_sizes_symbolic(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes with names for batch, rows and keys; they are numbers that fit together."""
    (batch, *_), (kv_batch, *_), _ = (shapes[name] for name in "qkv")
    names: dict[str, tuple[int | str, str]] = {"q": ("batch", "rows"), "k": ("batch", "keys"), "v": ("batch", "keys")}
    if kv_batch == 1 != batch:
        names |= {"k": (1, "keys"), "v": (1, "keys")}
    return {name: (names[name][0], shape[1], names[name][1], shape[3]) for name, shape in shapes.items()}
