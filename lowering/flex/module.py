"""`compile_flex`: a flex_attention as a module that is saved, loaded without a compiler, and embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, InputError
from ..runtime import Model
from ..runtime import load as load_model
from .attention import any_length
from .block_mask import BlockMask
from .captured import ArraySpec, specs_of
from .mod import Mod
from .problem import check_operands, checked_names, problem_of, run

_FORWARD, _BACKWARD = "forward", "backward"


class FlexModule:
    """A compiled flex_attention (`compile_flex`, `load`).

    forward is the model of inputs q, k, v, block_states with a block mask, and the captured arrays by name, and outputs
    y and, where it was asked for, lse; gradient that of the gradients, or None. Both are ordinary artifacts.
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
        """y [B, Hq, S, Dv], or the pair of it and lse [B, Hq, S], for arrays as of `flex_attention`.

        captures are the arrays that the mods read; those given to `compile_flex` serve where none is given here.
        """
        y, context = self.forward_with_context(q, k, v, block_mask=block_mask, **captures)
        self._last = context
        return (y, context["lse"]) if self._lse else y

    def forward_with_context(
        self, q: Any, k: Any, v: Any, *, block_mask: BlockMask | None = None, **captures: Any
    ) -> tuple[Any, dict[str, Any]]:
        """y, and what `backward` needs to go back through just this call: for callers that make several before."""
        given = {"q": q, "k": k, "v": v, **self._captures}
        if block_mask is not None:
            block_mask.check(q.shape, k.shape)
            given |= block_mask.captures | {"block_states": block_mask.states}
        given |= captures
        results = run(self.forward, given)
        return results["y"], {**given, **results}

    def backward(self, dy: Any, context: dict[str, Any] | None = None) -> dict[str, Any]:
        """The gradients at a call, for dy [B, Hq, S, Dv], the gradient by its y: dq, dk, dv and d_NAME for each
        captured floating-point array, each of the shape and type of what it is by.

        context is what `forward_with_context` gave for the call, by default that of the last one. The arrays of the
        call are kept, and must hold what they did. Raises InputError before any call, and for a module that was
        compiled without backward=True.
        """
        if self.gradient is None:
            raise InputError("the module has no gradients: compile it with backward=True.")
        context = self._last if context is None else context
        if context is None:
            raise InputError("there is nothing to go back through: call the module first.")
        return run(self.gradient, {**context, "dy": dy})

    def save(self, folder: str | Path) -> None:
        """Writes the artifact to `folder`; with gradients there are two, in its folders `forward` and `backward`.

        Captured arrays are inputs, and are not saved. Raises ArtifactError for a folder that holds something else.
        """
        folder = Path(folder)
        if self.gradient is None:
            self.forward.save(folder)
            return
        foreign = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        foreign = [name for name in foreign if name not in (_FORWARD, _BACKWARD)]
        if foreign or folder.is_file():
            raise ArtifactError(f"'{folder}' holds '{foreign[0] if foreign else folder.name}': name a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        self.forward.save(folder / _FORWARD)
        self.gradient.save(folder / _BACKWARD)


def load(folder: str | Path, captures: Mapping[str, Any] | None = None, return_lse: bool = False) -> FlexModule:
    """What `FlexModule.save` wrote. captures serve calls that do not give their own. Needs no compiler."""
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
    """A module for a `flex_attention`, whose parameters these are.

    q, k and v are arrays, whose batch size and lengths are free in calls, or shapes: numbers are fixed, and names are
    symbolic sizes, such as (1, 8, "rows", 64); dtype is then the type of their elements. captures are arrays, which
    serve calls that do not give their own, or `ArraySpec`s, an element type and a rank: then each call gives them. With
    a block_mask each call needs one of the same BLOCK_SIZE, that may hold other blocks and lengths; of
    `FlexModule.forward` its states are the input block_states. backward=True adds the gradients
    (`FlexModule.backward`). threads and cc are those of `lowering.compile`.

    Raises InputError for what does not fit, and for mods that cannot be traced or, with backward, differentiated.
    """
    from ..compiling.compiler import compile

    captures = checked_names(captures or {})
    if block_mask is not None:
        mask_mod, captures = block_mask.joined(mask_mod, captures)
    operands = {"q": q, "k": k, "v": v}
    shapes: dict[str, Any] = {name: tuple(getattr(x, "shape", x)) for name, x in operands.items()}
    dtypes = {name: _type_of(x, dtype) for name, x in operands.items()}
    check_operands(shapes, dtypes, enable_gqa)
    if all(hasattr(x, "shape") for x in operands.values()):
        shapes = any_length(shapes)
    problem = problem_of(
        shapes,
        dtypes,
        score_mod,
        mask_mod,
        specs_of(captures),
        None if block_mask is None else (block_mask.BLOCK_SIZE, block_mask.differing),
        scale,
        enable_gqa,
        return_lse or backward,
    )
    forward = compile(problem.to_onnx(), target, threads=threads, cc=cc)
    gradient = compile(problem.gradient_to_onnx(), target, threads=threads, cc=cc) if backward else None
    return FlexModule(forward, gradient, captures, return_lse)


def _type_of(operand: Any, dtype: str) -> str:
    if isinstance(operand, Sequence):
        return dtype
    if not hasattr(operand, "dtype"):
        raise InputError(f"q, k and v are arrays or shapes, and one is a {type(operand).__name__}.")
    return str(operand.dtype).rpartition(".")[2]
