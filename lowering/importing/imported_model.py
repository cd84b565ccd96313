"""The result of an import: a model in Relax, with its external names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm

from ..choices import Scheme
from ..manifest import ListSpec
from .origins import Origins
from .quantized_matrix import QuantizedMatrix
from .sizes.expected_sizes import Linear
from .values import Shape


@dataclass(frozen=True)
class Port:
    """An input or output of the model: ONNX name, element type and shape. dims are the model's names of sizes."""

    name: str
    dtype: str
    shape: Shape
    dims: tuple[int | str, ...]


@dataclass
class ImportedModel:
    """A model in Relax, under the conventions of docs/architecture/importing.md."""

    module: tvm.IRModule
    weights: dict[str, np.ndarray | QuantizedMatrix]
    inputs: list[Port]
    outputs: list[Port]
    output_lists: list[ListSpec]
    strings: list[str]
    warnings: list[str]
    origins: Origins
    schemes: dict[str, Scheme | None]  # how the constants that a variable is computed from are compressed
    assertions: dict[str, str]  # error text of a failed assertion, by the name of its variable
    derived: dict[str, Linear]  # sizes of inputs that follow from other sizes
