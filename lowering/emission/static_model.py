"""A model as C code, before it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..manifest import Manifest, TensorSpec
from .c_code import MainCode, Program
from .c_names import choose_names


@dataclass(frozen=True)
class FieldNames:
    """C names of the fields of a call's record.

    Attributes:
        sizes: Those of sizes.
        inputs: Those of inputs.
        outputs: Those of outputs with memory of their own, by name.
        shapes: Those of the shapes of outputs for which the call allocates memory, by name.
    """

    sizes: Sequence[str]
    inputs: Sequence[str]
    outputs: Mapping[str, str]
    shapes: Mapping[str, str]


@dataclass(frozen=True)
class StaticModel:
    """A model as C code.

    Attributes:
        name: The prefix of its C names.
        manifest: Its description; its weights have their offsets.
        fields: The names of the fields of a call's record.
        program: The code of its functions.
        code: The code of `main`.
        kernels: Its kernels by name.
        one_thread: Whether one call of the model runs at a time, by one thread, without thread-local memory.
    """

    name: str
    manifest: Manifest
    fields: FieldNames
    program: Program
    code: MainCode
    kernels: Mapping[str, tirx.PrimFunc]
    one_thread: bool


def name_fields(manifest: Manifest, code: MainCode) -> FieldNames:
    """Return names of the fields of a call's record."""
    inputs = [tensor.name for tensor in manifest.inputs]
    outputs = [tensor.name for tensor in list_own_outputs(manifest)]
    allocated = [manifest.outputs[k].name for k in code.allocated]
    names = iter(
        choose_names(
            [*code.sizes, *inputs, *outputs, *(f"{name}_shape" for name in allocated)],
            ("weights", "workspace", "memory", "threads"),
        )
    )
    return FieldNames(
        [next(names) for _ in code.sizes],
        [next(names) for _ in inputs],
        {name: next(names) for name in outputs},
        {name: next(names) for name in allocated},
    )


def list_own_outputs(manifest: Manifest) -> list[TensorSpec]:
    """Return the outputs that have memory of their own."""
    return [tensor for tensor in manifest.outputs if tensor.name not in manifest.donated.values()]
