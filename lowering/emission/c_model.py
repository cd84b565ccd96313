"""A model as C code, before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

from ..manifest import Manifest, TensorSpec
from .c_code import CTensor, MainCode, Program


@dataclass(frozen=True)
class CModel:
    """A model as C code.

    Attributes:
        manifest: Its description; its weights have their offsets.
        program: The code of its functions.
        code: The code of `main`.
        kernels: Its kernels by name.
        symbols: The kernels' names in their code, by name.
    """

    manifest: Manifest
    program: Program
    code: MainCode
    kernels: Mapping[str, tirx.PrimFunc]
    symbols: Mapping[str, str]

    def list_own_outputs(self) -> list[tuple[int, TensorSpec, CTensor]]:
        """Return the number, description and tensor of outputs that replace no input."""
        donated = set(self.manifest.donated.values())
        pairs = zip(self.manifest.outputs, self.code.outputs, strict=True)
        return [(number, spec, tensor) for number, (spec, tensor) in enumerate(pairs) if spec.name not in donated]
