"""`compile_flex`: a flex_attention as a module that can be saved, loaded without a compiler, and embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, InputError
from ..runtime import Model
from ..runtime import load as load_model
from .attention import make_sizes_symbolic
from .block_mask import BlockMask
from .captured import ArraySpec, read_array_specs
from .mod import Mod
from .problem import build_problem, check_names, check_operands, run_kernel

_FORWARD, _BACKWARD = "forward", "backward"


class FlexModule:
    """A compiled flex_attention (`compile_flex`, `load`).

    forward is the model with inputs q, k, v, block_states if there is a block mask, and the captured arrays by name.
    Its outputs are y and, if requested, lse. gradient is the model of the gradients, or None. Both are ordinary
    artifacts.
    """

    def __init__(
        self,
        forward: Model,
        gradient: Model | None = None,
        captures: Mapping[str, Any] | None = None,
        lse: bool = False,
    ) -> None:
        self.forward, self.gradient = forward, gradient
        arrays = {name: x for name, x in (captures or {}).items() if not isinstance(x, ArraySpec)}
        self._captures, self._lse = arrays, lse
        self._last: dict[str, Any] | None = None

    def __call__(self, q: Any, k: Any, v: Any, *, block_mask: BlockMask | None = None, **captures: Any) -> Any:
        """Compute attention over arrays.

        Args:
            q, k, v: arrays as of `flex_attention`.
            block_mask: a mask of the BLOCK_SIZE that was compiled, if one was.
            captures: the arrays that the mods read; those passed to `compile_flex` are the defaults.

        Returns:
            y [B, Hq, S, Dv], or the pair of it and lse [B, Hq, S].
        """
        y, context = self.forward_with_context(q, k, v, block_mask=block_mask, **captures)
        self._last = context
        return (y, context["lse"]) if self._lse else y

    def forward_with_context(
        self, q: Any, k: Any, v: Any, *, block_mask: BlockMask | None = None, **captures: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Compute y, and the context that `backward` needs for this call: for callers that make several calls first."""
        arguments = {"q": q, "k": k, "v": v, **self._captures}
        if block_mask is not None:
            block_mask.check(q.shape, k.shape)
            arguments |= block_mask.captures | {"block_states": block_mask.states}
        arguments |= captures
        results = run_kernel(self.forward, arguments)
        return results["y"], {**arguments, **results}

    def backward(self, dy: Any, context: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compute the gradients of a call.

        Args:
            dy: [B, Hq, S, Dv], the gradient by the y of the call.
            context: the second result of `forward_with_context` for the call, by default that of the last call. It
                references the arrays of the call, which must not have changed.

        Returns:
            dq, dk, dv and d_NAME for each captured floating-point array, each of the shape and type of the array it is
            by.

        Raises:
            InputError: before any call, and for a module that was compiled without backward=True.
        """
        if self.gradient is None:
            raise InputError("flex.gradient_missing", "the module has no gradients. Compile it with backward=True.")
        context = self._last if context is None else context
        if context is None:
            raise InputError("flex.call_missing", "there is no call to compute gradients of. Call the module first.")
        return run_kernel(self.gradient, {**context, "dy": dy})

    def save(self, folder: str | Path) -> None:
        """Write the artifact to `folder`; with gradients there are two, in its folders `forward` and `backward`.

        Captured arrays are inputs, and are not saved.

        Raises:
            ArtifactError: the folder contains something else.
        """
        folder = Path(folder)
        if self.gradient is None:
            self.forward.save(folder)
            return
        foreign = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        foreign = [name for name in foreign if name not in (_FORWARD, _BACKWARD)]
        if foreign or folder.is_file():
            raise ArtifactError(
                "argument.folder_not_empty",
                f"'{folder}' contains '{foreign[0] if foreign else folder.name}'. Name a new folder.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.forward.save(folder / _FORWARD)
        self.gradient.save(folder / _BACKWARD)


def load(folder: str | Path, captures: Mapping[str, Any] | None = None, return_lse: bool = False) -> FlexModule:
    """Load a module that `FlexModule.save` wrote. Needs no compiler.

    Args:
        folder: the folder that was written.
        captures: default arrays for calls that do not pass their own.
        return_lse: whether calls return lse, too.

    Returns:
        The module.
    """
    folder = Path(folder)
    if not (folder / _FORWARD).is_dir():
        return FlexModule(load_model(folder), None, captures, return_lse)
    return FlexModule(load_model(folder / _FORWARD), load_model(folder / _BACKWARD), captures, return_lse)


def compile_flex(
    q: Any,
    k: Any,
    v: Any,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    captures: Mapping[str, Any] | None = None,
    target: str = "cpu",
    dtype: str = "float32",
    backward: bool = False,
    threads: int | None = None,
    cc: str | None = None,
) -> FlexModule:
    """Compile a module for a `flex_attention`, whose parameters these are.

    Args:
        q, k, v: arrays, whose batch size and lengths may differ in calls, or shapes: numbers are static, and names are
            symbolic sizes, such as (1, 8, "rows", 64).
        score_mod, mask_mod, scale, enable_gqa, return_lse: as of `flex_attention`.
        block_mask: with one, each call needs a mask of the same BLOCK_SIZE, which may have other blocks and lengths.
            Its states are the input block_states of `FlexModule.forward`.
        captures: arrays, which are the defaults for calls that do not pass their own, or `ArraySpec`s, an element type
            and a rank: then each call passes them.
        target, threads, cc: as of `lowering.compile`.
        dtype: the type of elements of q, k and v if they are shapes.
        backward: whether to add the gradients (`FlexModule.backward`).

    Returns:
        The module.

    Raises:
        InputError: arguments do not fit together, or mods cannot be traced or, with backward, differentiated.
    """
    from ..compiling.compiler import compile

    captures = check_names(captures or {})
    if block_mask is not None:
        mask_mod, captures = block_mask.merge_call(mask_mod, captures)
    operands = {"q": q, "k": k, "v": v}
    shapes: dict[str, Any] = {name: tuple(getattr(x, "shape", x)) for name, x in operands.items()}
    dtypes = {name: _read_dtype(x, dtype) for name, x in operands.items()}
    check_operands(shapes, dtypes, enable_gqa)
    if all(hasattr(x, "shape") for x in operands.values()):
        shapes = make_sizes_symbolic(shapes)
    problem = build_problem(
        shapes,
        dtypes,
        score_mod,
        mask_mod,
        read_array_specs(captures),
        None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing),
        scale,
        enable_gqa,
        return_lse or backward,
    )
    forward = compile(problem.to_onnx(), target, threads=threads, cc=cc)
    gradient = compile(problem.gradient_to_onnx(), target, threads=threads, cc=cc) if backward else None
    return FlexModule(forward, gradient, captures, return_lse)


def _read_dtype(operand: Any, dtype: str) -> str:
    if isinstance(operand, Sequence):
        return dtype
    if not hasattr(operand, "dtype"):
        raise InputError(
            "flex.operand_type_unsupported",
            f"q, k and v must be arrays or shapes, and one is a {type(operand).__name__}.",
        )
    return str(operand.dtype).rpartition(".")[2]
