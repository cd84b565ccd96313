"""Constants of a model: small ones are embedded in its code, large ones are weights, parameters after the inputs."""

from __future__ import annotations

import numpy as np
from tvm import relax

from .quantized_matrix import QuantizedMatrix

# Constants below this many bytes are embedded in the code, where TVM can fold them.
_EMBED_BYTES = 256

# Number of leading elements that distinguish most weights of one shape.
_PREFIX = 16


class ModelWeights:
    """The weights of one import: their variables, in order, and their arrays by name."""

    def __init__(self) -> None:
        self.variables: list[relax.Var] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._quantized: dict[str, QuantizedMatrix] = {}
        # By element type, shape and leading elements.
        self._alike: dict[tuple[str, tuple[int, ...], bytes], list[relax.Var]] = {}

    def copy(self) -> ModelWeights:
        """Return an independent copy, to which weights can be added."""
        other = ModelWeights()
        other.variables, other._arrays, other._quantized = (
            list(self.variables),
            dict(self._arrays),
            dict(self._quantized),
        )
        other._alike = {key: list(alike) for key, alike in self._alike.items()}
        return other

    @property
    def contents(self) -> dict[str, np.ndarray | QuantizedMatrix]:
        return {**self._arrays, **self._quantized}

    def add_array(self, array: np.ndarray) -> relax.Expr:
        """Return an array as a constant, or add it as a weight."""
        # TVM cannot load a module with an empty constant.
        if 0 < array.nbytes <= _EMBED_BYTES:
            return relax.const(np.asarray(array, order="C"), array.dtype.name)
        # Exporters write tied weights twice. Bytes are compared only if the leading ones agree: every read of a mapped
        # file takes time and memory.
        alike = self._alike.setdefault((array.dtype.name, array.shape, array.flat[:_PREFIX].tobytes()), [])
        for variable in alike:
            if _same_bytes(self._arrays[variable.name], array):
                return variable
        name = f"weight_{len(self._arrays)}"
        self._arrays[name] = array
        alike.append(self._variable(name, array.shape, array.dtype.name))
        return alike[-1]

    def add_quantized(self, matrix: QuantizedMatrix) -> relax.Var:
        name = f"quantized_{len(self._quantized)}"
        self._quantized[name] = matrix
        return self._variable(name, matrix.shape, matrix.dtype.name)

    def _variable(self, name: str, shape: tuple[int, ...], dtype: str) -> relax.Var:
        self.variables.append(relax.Var(name, relax.TensorType(shape, dtype)))
        return self.variables[-1]


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays of one type and shape have the same bits, NaNs and signed zeros included."""
    return np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
