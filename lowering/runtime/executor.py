"""The steps of a call of a model: accept the arrays, run the code, and return the outputs.

A call begins with arrays by input name and ends with arrays by output name. In between are tensors in the order of the
manifest. Each call runs on a virtual machine of its own, and idle ones wait for later calls.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tvm_ffi

from ..errors import ArtifactError, InputError
from ..manifest import FILE, Manifest, SlotCaches, TensorSpec
from .arrays.inputs import InputPort, Sizes, check_donated_memory
from .arrays.lists import collect_lists, flatten_lists
from .arrays.outputs import FromDLPack, OutputPort, check_output, write_output
from .arrays.strings import StringTable
from .arrays.tensors import Tensor, copy_tensor, is_shared, item
from .artifact.checks import check_slot_capacity, check_threads
from .artifact.weights import ModelWeights
from .devices import Gpu
from .failures import describe_failure
from .library import Instrument, Machine, ModelLibrary

Arrays = Mapping[str, Any]

# By address: the memory of a call's inputs. For donated ones, the output that takes it over and the caller's array.
Memory = dict[int, tuple[str, Any] | None]
# By output name: arrays that the caller provides for results, as tensors and as passed.
Targets = dict[str, tuple[Tensor, Any]]


_MAX_ITEMSIZE = 16  # bytes of the largest element
_SMALL_BYTES = 1 << 16  # of all outputs of a call, which an idle virtual machine may keep

_NO_STRINGS = StringTable(())


class _ThreadState(threading.local):
    """The number of threads that the code uses for calls from a thread: None for the default, -1 before a call."""

    threads: int | None = -1


class ModelExecutor:
    """The code of a model with its weights, which any number of threads may run at once."""

    def __init__(
        self, manifest: Manifest, library: ModelLibrary, weights: ModelWeights, gpu: Gpu | None, threads: int | None
    ) -> None:
        self.manifest = manifest
        self.library = library
        self.weights = weights
        self.gpu = gpu
        self._threads = threads
        self.ports = [
            InputPort(
                t, "input", manifest.ranges, self.describe_donation(t.name), t.name in manifest.donated, library.gpu
            )
            for t in manifest.inputs
        ]
        self.outputs = [OutputPort(t) for t in manifest.outputs]
        # Idle virtual machines. Each call takes one, since two calls on one machine would crash.
        self._machines: list[Machine] = [library.new_machine()]
        self._local = _ThreadState()
        self._has_strings = any(t.dtype == "string" for t in (*manifest.inputs, *manifest.outputs))
        self._may_keep_results = not manifest.donated and _has_small_outputs(manifest)

    def new_strings(self) -> StringTable:
        """Return the strings of a new call."""
        return StringTable(self.manifest.strings) if self._has_strings else _NO_STRINGS

    @contextmanager
    def use_instrument(self, instrument: Instrument) -> Iterator[None]:
        """Report each kernel of calls from this thread to `instrument` in the block."""
        machine = self.library.new_machine(instrument)
        self._machines.append(machine)
        try:
            yield
        finally:
            self._machines.remove(machine)

    def choose_threads(self, threads: int | None) -> int | None:
        """Return the number of threads of a call: the model's own where the call names none."""
        return self._threads if threads is None else check_threads(threads)

    def describe_donation(self, name: str) -> str | None:
        """Return why an input must be used in place, or None for an input that is not donated."""
        output = self.manifest.donated.get(name)
        return None if output is None else f"it is donated: its memory becomes output '{output}'"

    def flatten_inputs(self, inputs: Arrays, is_complete: bool = True) -> Arrays:
        """Return the arrays of inputs, those of lists by the names of tensors. Raises InputError as `flatten_lists`."""
        lists = self.manifest.input_lists
        if not lists:
            return inputs
        return flatten_lists(inputs, [t.name for t in self.manifest.inputs], lists, "input", is_complete)

    def accept_inputs(
        self, ports: list[InputPort], inputs: Arrays, sizes: Sizes | None, strings: StringTable
    ) -> list[Tensor]:
        """Return the inputs as tensors. Raises InputError for arrays that the model does not take."""
        tensors = []
        for port in ports:
            array = inputs.get(port.name)
            if array is None:
                check_input_names(inputs, self.manifest.inputs)
                raise InputError("input.missing", f"input '{port.name}' is missing; the model takes {port.spec}.")
            tensors.append(port.accept(array, sizes, strings))
        if len(inputs) > len(tensors):
            check_input_names(inputs, self.manifest.inputs)
        if self.manifest.donated:
            check_donated_memory(ports, tensors, self.manifest.donated)
        slots = self.manifest.slots
        if slots is not None:
            check_slot_capacity(slots, inputs[slots.length], self.count_new_rows(slots, tensors))
        return tensors

    def count_new_rows(self, slots: SlotCaches, tensors: list[Tensor]) -> int:
        """Return how many rows a call adds to the caches."""
        if slots.tokens is None:
            return 0
        name, axis = slots.tokens
        return self.find_tensor(name, tensors).shape[axis]

    def find_tensor(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return the tensor of an input."""
        return next(tensor for port, tensor in zip(self.ports, tensors) if port.name == name)

    def index_memory(self, tensors: list[Tensor], inputs: Arrays) -> Memory:
        """Return the memory of a call's inputs by address."""
        memory: Memory = {tensor.data_ptr(): None for tensor in tensors}
        if self.manifest.donated:
            for port, tensor in zip(self.ports, tensors):
                if port.is_written:
                    memory[tensor.data_ptr()] = (self.manifest.donated[port.name], inputs[port.name])
        return memory

    def run_code(self, tensors: list[Tensor], threads: int | None, release: bool) -> tvm_ffi.Array:
        """Run the code, and return its results.

        With `release` the virtual machine keeps no reference to them, unless they are small.
        """
        try:
            machine = self._machines.pop()
        except IndexError:
            machine = self.library.new_machine()
        try:
            if threads != self._local.threads:
                self.library.set_threads(threads or 0)
                self._local.threads = threads
            return machine.main(*tensors, *self.weights.argument)
        except Exception as error:
            code, reason = describe_failure(error)
            raise InputError(code, f"the model cannot run on these inputs: {reason}") from error
        finally:
            if release and not self._may_keep_results:
                machine.release()
            self._machines.append(machine)

    def deliver_outputs(
        self,
        results: tvm_ffi.Array,
        memory: Memory,
        targets: Targets,
        from_dlpack: FromDLPack,
        to_host: bool,
        strings: StringTable,
    ) -> dict[str, Any]:
        """Return the outputs by name, in the caller's arrays where there are any, and else in memory of their own."""
        outputs = {}
        returned: set[int] = set()
        copies: list[tuple[Tensor, Tensor]] = []
        for index, port in enumerate(self.outputs):
            try:
                tensor = item(results, index)
            except IndexError as error:
                raise ArtifactError(
                    "artifact.output_count_mismatch",
                    f"the code returns {index} results, and {FILE} names {len(self.outputs)}: it belongs to "
                    "other code. Compile the model again.",
                ) from error
            address = tensor.data_ptr()
            if targets and port.name in targets:
                target, outputs[port.name] = targets[port.name]
                check_output(port.name, tensor, target)
                # Copy an input that is also an output, since another output may be written to it.
                copies.append((copy_tensor(tensor) if memory.get(address, self) is None else tensor, target))
                continue
            owner = memory.get(address)
            if owner is not None and owner[0] == port.name:
                outputs[port.name] = owner[1]
                continue
            if to_host and self.gpu is not None:
                tensor = self.gpu.to_host(tensor)
            elif address in memory or address in returned or self.weights.contains(address) or is_shared(tensor):
                # Copy memory of an input that is also an output, of a weight, of another output, or of a constant of
                # the code.
                tensor = copy_tensor(tensor)
            else:
                returned.add(address)
            outputs[port.name] = port.deliver(tensor, from_dlpack, strings)
        for tensor, target in copies:
            write_output(tensor, target)
        return collect_lists(outputs, self.manifest.outputs, self.manifest.output_lists)


def _has_small_outputs(manifest: Manifest) -> bool:
    sizes = [[dim for dim in t.dims if isinstance(dim, int)] for t in manifest.outputs]
    is_static = all(len(dims) == len(t.dims) for dims, t in zip(sizes, manifest.outputs))
    elements = sum(math.prod(dims) for dims in sizes)
    return is_static and elements * _MAX_ITEMSIZE <= _SMALL_BYTES


def check_input_names(arrays: Arrays, specs: tuple[TensorSpec, ...]) -> None:
    unknown = next((name for name in arrays if all(name != spec.name for spec in specs)), None)
    if unknown is not None:
        raise InputError("input.name_unknown", f"there is no input '{unknown}'. The inputs are {list_names(specs)}.")


def list_names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(t.name for t in specs)
