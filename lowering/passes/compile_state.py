"""The state that the passes of lowering/compiling/pipeline.py transform: a module and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import tvm
from tvm import tirx

from schedules import CodeLookup
from schedules.half_precision import HALF
from schedules.variant import Choose

from ..choices import Scheme
from ..importing.imported_model import ImportedModel
from ..importing.origins import Origins
from ..importing.quantized_matrix import QuantizedMatrix
from ..manifest import CallSpec, KernelSpec
from ..target import Target

Weights: TypeAlias = Mapping[str, np.ndarray | QuantizedMatrix]


@dataclass(frozen=True)
class PassOptions:
    """The choices of a compilation that passes read.

    Attributes:
        kernel_target: The target of the kernels, if it is not the state's: a CPU can stand in for a GPU.
        donated: The position of a consumed input, mapped to the output that takes over its memory.
        accuracy_level: Whether matmuls by quantized matrices may quantize their rows, too (4); None: as the model says.
        matmuls: How a GPU's tensor cores compute float32 matmuls, "tf32" or "3xtf32"; None leaves them to other code.
        choose: Picks variants and tiles (schedules/variant.py).
        cached: Tells which kernels have cached code and stay as they are.
    """

    kernel_target: Target | None = None
    donated: Mapping[int, int] = field(default_factory=dict)
    accuracy_level: int | None = None
    matmuls: str | None = None
    choose: Choose | None = None
    cached: CodeLookup | None = None


@dataclass(frozen=True)
class CompileState:
    """A module on its way from Relax to instructions of the virtual machine; passes return a changed copy.

    Attributes:
        module: The module.
        target: The target of the code.
        options: The choices of the compilation.
        origins: The ONNX nodes by the name of the variable that they compute.
        schemes: How the constants that a variable is computed from are compressed, by its name.
        weights: The parameters of `main` after its first `num_input`, by name; from pack_weights on arrays, in the
            order of the weights tuple.
        assertions: Error texts of shape assertions, by the name of their variable.
        kernels: The description of each kernel, from scheduling on.
        calls: The calls of kernels in execution order, from scheduling on.
        unscheduled: The functions before scheduling, by kernel.
        accuracy_level: 4 if matmuls quantize their rows to int8, else 0; from pack_weights on.
        notes: Notes for the manifest: updates that cannot be done in place, and errors of compressed matrices.
    """

    module: tvm.IRModule
    target: Target
    options: PassOptions = PassOptions()
    origins: Origins = field(default_factory=dict)
    schemes: Mapping[str, Scheme | None] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    assertions: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[KernelSpec, ...] = ()
    calls: tuple[CallSpec, ...] = ()
    unscheduled: Mapping[str, tirx.PrimFunc] = field(default_factory=dict)
    accuracy_level: int = 0
    notes: tuple[str, ...] = ()

    @staticmethod
    def from_imported(imported: ImportedModel, target: Target, options: PassOptions) -> CompileState:
        """Return the state before the first pass."""
        return CompileState(
            imported.module,
            target,
            options,
            origins=imported.origins,
            schemes=imported.schemes,
            weights=imported.weights,
            assertions=imported.assertions,
        )

    @property
    def kernel_target(self) -> Target:
        return self.options.kernel_target or self.target

    @property
    def packed_weights(self) -> dict[str, np.ndarray]:
        """The weights after pack_weights."""
        return {name: array for name, array in self.weights.items() if isinstance(array, np.ndarray)}

    @property
    def tensor_core_dtypes(self) -> tuple[str, ...]:
        """Element types that a GPU's tensor cores multiply."""
        return (*HALF, *(["float32"] if self.options.matmuls else []))


StatePass: TypeAlias = Callable[[CompileState], CompileState]


def lift(rewrite: Callable[[tvm.IRModule], tvm.IRModule]) -> StatePass:
    """Return a pass of modules as one of states."""

    def run(state: CompileState) -> CompileState:
        return replace(state, module=rewrite(state.module))

    return run
