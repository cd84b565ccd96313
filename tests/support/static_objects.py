"""Calls of static objects through a shared library of their object file and weights."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lowering.manifest import Manifest


class Error(ctypes.Structure):
    _fields_ = (("code", ctypes.c_char * 64), ("text", ctypes.c_char * 960))


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, TASK, ctypes.c_void_p, ctypes.c_int)


class Threads(ctypes.Structure):
    _fields_ = (("pool", ctypes.c_void_p), ("count", ctypes.c_int), ("run", RUN))


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


MOST_BYTES = 1 << 30


class MemoryRecord(ctypes.Structure):
    _fields_ = (("owner", ctypes.c_void_p), ("allocate", ALLOCATE), ("release", RELEASE))


class Memory:
    """Memory of the caller: blocks with guards around poisoned bytes, of which the `fails_at`-th is refused.

    Attributes:
        outputs: After a call, the outputs for which it has allocated memory, by field.
        calls: How many blocks were requested.
    """

    def __init__(self, fails_at: int = -1) -> None:
        self._blocks: dict[int, np.ndarray] = {}
        self._fails_at, self.calls = fails_at, 0
        self.outputs: dict[str, np.ndarray] = {}
        self.record = MemoryRecord(None, ALLOCATE(self._allocate), RELEASE(self._release))

    def _allocate(self, _: int, count: int) -> int | None:
        self.calls += 1
        if self.calls == self._fails_at or count > MOST_BYTES:
            return None
        block = np.full(count + 144, 0xA5, np.uint8)
        start = -block.ctypes.data % 16 + 64  # a multiple of 16, of 64 by chance
        address = int(block.ctypes.data + start)
        self._blocks[address] = block[start - 64 : start + count + 64]
        return address

    def _release(self, _: int, address: int) -> None:
        block = self._blocks.pop(address)
        assert (block[:64] == 0xA5).all() and (block[-64:] == 0xA5).all()
        block[:] = 0xFF  # whoever reads it later finds NaN

    def take(self, address: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """Take over the memory of an output."""
        data = self._blocks[address][64:-64]
        count = math.prod(shape) * dtype.itemsize
        assert len(data) == max(count, 1)
        output = data[:count].view(dtype).reshape(shape).copy()
        self._release(0, address)
        return output

    def assert_released(self) -> None:
        assert not self._blocks


class StaticError(Exception):
    def __init__(self, error: Error) -> None:
        self.code, self.text = error.code.decode(), error.text.decode()
        super().__init__(f"[{self.code}] {self.text}")


class StaticHeader:
    """The record of a call in model.h.

    Attributes:
        fields: Its fields, in order.
        sizes: Fields of sizes, by their names in the model.
        elements: Sizes that are in the data of an input: its name, and the index in its data, by field.
        allocated: Fields of outputs for which a call allocates memory, and those of their shapes.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: str) -> None:
        self.folder, self.manifest, self.name = folder, manifest, name
        header = (folder / "model.h").read_text()
        (body,) = re.findall(rf"typedef struct \{{\n([^{{}}]*)\}} {name}_call;", header)
        self.sizes = {name: field for field, name in re.findall(r"int64_t (\w+); /\* size '(.*?)'", body)}
        pattern = r"int64_t (\w+); /\*.*, what element (\d+) of input '(.*)' says \*/"
        self.elements = {size: (tensor, int(index)) for size, index, tensor in re.findall(pattern, body)}
        body = re.sub(r"/\*.*?\*/", "", body)
        self.fields: list[str] = re.findall(r"(\w+);", body)
        self.allocated: dict[str, str] = dict(re.findall(r"\*\* (\w+);\s*int64_t\* (\w+);", body))

    def tensor_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the fields of inputs, and of outputs with memory of their own, by their names in the model."""
        inputs = [tensor.name for tensor in self.manifest.inputs]
        donated = self.manifest.donated.values()
        outputs = [tensor.name for tensor in self.manifest.outputs if tensor.name not in donated]
        last = self.fields.index("weights" if self.manifest.weights else "workspace")
        tensors = [field for field in self.fields[:last] if field not in self.allocated.values()]
        fields = tensors[len(tensors) - len(inputs) - len(outputs) :]
        return dict(zip(inputs, fields)), dict(zip(outputs, fields[len(inputs) :]))

    def read_sizes(self, inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Return the sizes of a call with these inputs, by field."""
        sizes = {
            self.sizes[dim]: size
            for tensor in self.manifest.inputs
            for dim, size in zip(tensor.dims, inputs[tensor.name].shape)
            if dim in self.sizes
        }
        return sizes | {size: int(inputs[name].reshape(-1)[index]) for size, (name, index) in self.elements.items()}


class StaticObject(StaticHeader):
    """The functions of a folder that `compile_static` has written."""

    def __init__(self, folder: Path, manifest: Manifest, name: str = "model") -> None:
        super().__init__(folder, manifest, name)
        library = folder / "library.so"
        sources = [str(path) for path in (folder / "model.o", folder / "weights.S") if path.exists()]
        command = ["gcc", "-shared", f"-I{folder}", *sources, "-lm", "-o", str(library)]
        subprocess.run(command, check=True, cwd=folder)
        self.library = ctypes.CDLL(str(library))
        self.library[f"{name}_workspace_bytes"].restype = ctypes.c_int64

    def make_call(self, values: Mapping[str, int]) -> ctypes.Structure:
        """Return the record of a call; values are sizes and addresses by field."""
        kinds = [(field, ctypes.c_int64) for field in self.fields]
        call = type("Call", (ctypes.Structure,), {"_fields_": kinds})()
        for field, value in values.items():
            assert field in self.fields, field
            setattr(call, field, value)
        if self.manifest.weights and "weights" not in values:
            call.weights = ctypes.addressof(ctypes.c_char.in_dll(self.library, f"{self.name}_weights"))
        return call

    def call(self, function: str, call: ctypes.Structure) -> int:
        error = Error()
        result = self.library[f"{self.name}_{function}"](ctypes.byref(call), ctypes.byref(error))
        if result < 0:
            raise StaticError(error)
        return result

    def run(
        self,
        sizes: Mapping[str, int],
        arrays: Mapping[str, np.ndarray],
        threads: Threads | None = None,
        memory: Memory | None = None,
    ) -> np.ndarray:
        """Run on arrays by field: inputs and outputs. Return the workspace, poisoned before and followed by a guard."""
        addresses = {field: array.ctypes.data for field, array in arrays.items()}
        call = self.make_call({**sizes, **addresses})
        if threads is not None:
            call.threads = ctypes.addressof(threads)
        if memory is not None:
            call.memory = ctypes.addressof(memory.record)
        allocated = self._provide_pointers(call)
        count = self.call("workspace_bytes", call)
        workspace = np.full(count + 192, 0xA5, np.uint8)
        start = -workspace.ctypes.data % 64
        call.workspace = workspace.ctypes.data + start
        self.call("run", call)
        assert (workspace[:start] == 0xA5).all() and (workspace[start + count :] == 0xA5).all()
        if memory is not None:
            for field, (pointer, shape, dtype) in allocated.items():
                memory.outputs[field] = memory.take(int(pointer[0]), dtype, shape.tolist())
        return workspace[start : start + count]

    def compute(
        self,
        inputs: Mapping[str, np.ndarray],
        like: Mapping[str, np.ndarray],
        threads: Threads | None = None,
        memory: Memory | None = None,
    ) -> dict[str, np.ndarray]:
        """Run on inputs by their names; return outputs, in poisoned memory with the shapes of `like` before."""
        input_fields, output_fields = self.tensor_fields()
        inputs = {name: np.require(array, requirements=["C", "A"]) for name, array in inputs.items()}
        outputs = {
            name: np.frombuffer(bytearray(b"\xa5" * like[name].nbytes), like[name].dtype).reshape(like[name].shape)
            for name, field in output_fields.items()
            if field not in self.allocated
        }
        arrays = {input_fields[name]: inputs[name] for name in input_fields}
        arrays |= {output_fields[name]: array for name, array in outputs.items()}
        own_memory = memory or (Memory() if self.allocated or "memory" in self.fields else None)
        self.run(self.read_sizes(inputs), arrays, threads, own_memory)
        if own_memory is not None:
            own_memory.assert_released()
            outputs |= {
                name: own_memory.outputs[field] for name, field in output_fields.items() if field in self.allocated
            }
        return outputs

    def _provide_pointers(self, call: ctypes.Structure) -> dict[str, tuple[np.ndarray, np.ndarray, np.dtype]]:
        """Provide memory for the addresses and shapes of outputs; return it with their element types, by field."""
        fields = {field: name for name, field in self.tensor_fields()[1].items()}
        specs = {tensor.name: tensor for tensor in self.manifest.outputs}
        allocated = {}
        for field, shape_field in self.allocated.items():
            spec = specs[fields[field]]
            pointer, shape = np.zeros(1, np.uint64), np.full(len(spec.dims), -1)
            setattr(call, field, pointer.ctypes.data)
            setattr(call, shape_field, shape.ctypes.data)
            allocated[field] = (pointer, shape, np.dtype(spec.storage))
        return allocated
