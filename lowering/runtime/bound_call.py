"""Calls on arrays that are checked once (`Model.bind`).

The arrays are used in place: each call reads their current contents, in the memory that they had when they were bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .arrays.inputs import InputPort, Sizes, check_output_memory
from .arrays.lists import collect_lists, flatten_lists
from .arrays.outputs import FromDLPack, detect_array_kind
from .arrays.strings import StringTable
from .arrays.tensors import Tensor
from .artifact.checks import check_slot_capacity
from .devices import Gpu
from .executor import Arrays, Memory, ModelExecutor, Targets, list_names
from .graphs import Graph, check_graph


@dataclass(frozen=True)
class _BoundArrays:
    """The arrays of all calls: inputs as passed and as tensors, arrays for results, and the form of other results."""

    inputs: Arrays
    tensors: list[Tensor]
    memory: Memory
    targets: Targets
    from_dlpack: FromDLPack
    on_host: bool
    strings: StringTable


def bind_arrays(
    executor: ModelExecutor, inputs: Arrays, outputs: Arrays | None, *, threads: int | None, graph: bool
) -> Callable[[], dict[str, Any]]:
    """Return a function that runs the model on these arrays, which are checked here only.

    Arguments and errors are those of `Model.bind`.
    """
    manifest = executor.manifest
    if outputs is not None and not isinstance(outputs, Mapping):
        raise InputError("output.mapping_required", f"outputs must map names to arrays, not {type(outputs).__name__}.")
    inputs = dict(executor.flatten_inputs(inputs))  # the caller may change the mapping
    outputs = flatten_lists(outputs or {}, [t.name for t in manifest.outputs], manifest.output_lists, "output")
    strings = StringTable(manifest.strings)
    from_dlpack, on_host = detect_array_kind(inputs)
    gpu = check_graph(manifest, executor.gpu, inputs, outputs) if graph else executor.gpu
    threads = executor.choose_threads(threads)
    sizes: Sizes = {}
    ports = [_create_port(executor, spec) for spec in manifest.inputs]
    tensors = executor.accept_inputs(ports, inputs, sizes, strings)
    targets = {name: (_accept_target(executor, name, array, sizes, strings), array) for name, array in outputs.items()}
    if gpu is not None:
        tensors = gpu.move_to_device(ports, tensors, in_place=True)
    donated_targets = {manifest.donated[p.name]: tensor for p, tensor in zip(ports, tensors) if p.is_written}
    check_output_memory({name: tensor for name, (tensor, _) in targets.items()}, donated_targets)
    memory = executor.index_memory(tensors, inputs)
    arrays = _BoundArrays(inputs, tensors, memory, targets, from_dlpack, on_host, strings)
    if graph and gpu is not None:
        return _create_graph_call(executor, gpu, arrays)
    return _create_call(executor, arrays, threads)


def _create_port(executor: ModelExecutor, spec: TensorSpec) -> InputPort:
    """Return a port that accepts the array of an input only where it can be read in place."""
    manifest = executor.manifest
    reason = executor.describe_donation(spec.name) or "a bound call reads it in place"
    return InputPort(
        spec, "input", manifest.ranges, reason, spec.name in manifest.donated, _get_gpu_number(executor.gpu)
    )


def _accept_target(executor: ModelExecutor, name: str, array: Any, sizes: Sizes, strings: StringTable) -> Tensor:
    """Return the caller's array for an output as a tensor. Raises InputError if the output cannot be written to it."""
    gpu, specs = executor.gpu, executor.manifest.outputs
    spec = next((t for t in specs if t.name == name), None)
    if spec is None:
        raise InputError("output.name_unknown", f"there is no output '{name}'. The outputs are {list_names(specs)}.")
    port = InputPort(spec, "output", {}, "a bound call writes results to it", True, _get_gpu_number(gpu))
    tensor = port.accept(array, sizes, strings)
    return tensor if gpu is None else gpu.move_to_device([port], [tensor], in_place=True)[0]


def _get_gpu_number(gpu: Gpu | None) -> int | None:
    return None if gpu is None else gpu.number


def _create_graph_call(executor: ModelExecutor, gpu: Gpu, arrays: _BoundArrays) -> Callable[[], dict[str, Any]]:
    """Return a function that captures its first call as a CUDA graph, and launches the graph in later calls."""
    manifest, memory = executor.manifest, arrays.memory
    inputs = list(arrays.inputs.values())
    donated = frozenset(address for address, owner in memory.items() if owner is not None)

    def deliver(results: list[Tensor]) -> dict[str, Any]:
        delivered = {}
        for port, tensor in zip(executor.outputs, results):
            owner, array = memory.get(tensor.data_ptr()) or (None, None)
            is_donated = owner == port.name
            delivered[port.name] = array if is_donated else port.deliver(tensor, arrays.from_dlpack, arrays.strings)
        return collect_lists(delivered, manifest.outputs, manifest.output_lists)

    graph = Graph(executor.library, gpu, (*arrays.tensors, *executor.weights.argument), donated, deliver)

    def launch() -> dict[str, Any]:
        with gpu.use_stream_of(inputs) as stream:
            return graph(stream)

    return launch


def _create_call(executor: ModelExecutor, arrays: _BoundArrays, threads: int | None) -> Callable[[], dict[str, Any]]:
    """Return a function that runs the kernels one after the other."""
    gpu, slots = executor.gpu, executor.manifest.slots
    tensors, memory, targets, strings = arrays.tensors, arrays.memory, arrays.targets, arrays.strings
    from_dlpack, on_host = arrays.from_dlpack, arrays.on_host
    inputs = list(arrays.inputs.values())
    if slots is not None:
        rows, length = executor.count_new_rows(slots, tensors), arrays.inputs[slots.length]
        if gpu is None:  # the memory that the code reads, even if the caller's array object changes
            length = np.from_dlpack(executor.find_tensor(slots.length, tensors))

    def call() -> dict[str, Any]:
        if slots is not None:  # the value of the length may have changed
            check_slot_capacity(slots, length, rows)
        results = executor.run_code(tensors, threads, release=False)
        return executor.deliver_outputs(results, memory, targets, from_dlpack, on_host, strings)

    if gpu is None:
        return call

    def call_in_order() -> dict[str, Any]:
        with gpu.use_stream_of(inputs):
            return call()

    return call_in_order
