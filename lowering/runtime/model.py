"""Compiled models, which any number of threads may run at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import ArtifactError, InputError
from ..manifest import FILE, MODEL, Manifest, SlotCaches, TensorSpec, arguments
from .arrays.inputs import InputPort, Sizes, check_donated_memory, check_output_memory
from .arrays.lists import collect_lists, flatten_lists
from .arrays.outputs import FromDLPack, OutputPort, check_output, detect_array_kind, write_output
from .arrays.strings import StringTable
from .arrays.tensors import Tensor, copy_tensor, is_shared, item
from .artifact.checks import check_slot_capacity, check_threads
from .artifact.copies import copy_artifact
from .artifact.files import ArtifactFiles
from .artifact.folders import replace_folder
from .artifact.pickling import pack_model, unpack_model
from .artifact.signature import SigningKey, sign
from .artifact.weights import ModelWeights
from .background import BackgroundThread, WorkerFuture
from .decoding.decoder import Decoder
from .devices import Gpu
from .failures import describe_failure
from .graphs import Graph, check_graph
from .library import Instrument, Machine, ModelLibrary

Arrays = Mapping[str, Any]

# By address: the memory of a call's inputs. For donated ones, the output that takes it over and the caller's array.
_Memory = dict[int, tuple[str, Any] | None]
# By output name: arrays that the caller provides for results, as tensors and as passed.
_Targets = dict[str, tuple[Tensor, Any]]


class Model:
    """A loaded artifact (`lowering.load`).

    Arrays are NumPy arrays, or arrays of any library with DLPack. They are in CPU memory or, for a model on a GPU, in
    that GPU's memory; arrays elsewhere are copied. Outputs are returned in the kind and memory of the first input that
    is not a NumPy array, and otherwise as NumPy arrays. Inputs are read in place at any alignment. Only strided arrays
    and strings are copied. Outputs are new arrays that own their memory. The exception is an output that takes over a
    donated input's memory: it is the array object that the caller passed. Any number of threads may run one model at
    the same time.

    An input or output that is a sequence in the ONNX model is a list of arrays. Its length is fixed when the model is
    compiled. An optional one without an element is None. `inputs` and `outputs` name the tensors of lists, by which
    they can be passed one by one: x[0], x[1].

    `setup` is the model that a decoder with an encoder's output runs once per sequence. Its outputs are inputs of this
    model, by name. It is None for all other models.
    """

    def __init__(
        self,
        files: ArtifactFiles,
        manifest: Manifest,
        library: ModelLibrary,
        weights: memoryview,
        threads: int | None = None,
        setup: Model | None = None,
    ) -> None:
        self.manifest = manifest
        self.setup = setup
        self._files = files
        self._library = library
        self.gpu = None if library.gpu is None else Gpu(library.gpu)
        self._weights = ModelWeights(weights, manifest, self.gpu)
        self._threads = manifest.threads if threads is None else threads
        self._ports = [
            InputPort(
                t, "input", manifest.ranges, self._describe_donation(t.name), t.name in manifest.donated, library.gpu
            )
            for t in manifest.inputs
        ]
        self._outputs = [OutputPort(t) for t in manifest.outputs]
        # The shapes of the last call, which need no second check.
        self._shapes: list[Any] = []
        # Idle virtual machines. Each call takes one, since two calls on one machine would crash.
        self._machines: list[Machine] = [library.new_machine()]
        self._background = BackgroundThread("onnx-lowering", lambda task, _: [task])

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call takes, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call returns, in order."""
        return self.manifest.outputs

    def __repr__(self) -> str:
        input_arguments = arguments(self.inputs, self.manifest.input_lists)
        output_arguments = arguments(self.outputs, self.manifest.output_lists)
        return f"Model({', '.join(map(str, input_arguments))} -> {', '.join(map(str, output_arguments))})"

    def _repr_html_(self) -> str:
        from ..notebook import format_model  # not needed to run models

        return format_model(self.manifest)

    def run(self, inputs: Arrays, threads: int | None = None) -> dict[str, Any]:
        """Run the model on arrays by input name, and return the outputs by name.

        Args:
            inputs: Arrays by input name; lists of arrays for sequences.
            threads: Number of threads for this call. None means the number that the model was loaded with.

        Returns:
            The outputs by name.

        Raises:
            InputError: The model does not take the arrays, which is found before any donated array is written, or their
                sizes do not fit together inside the model.
        """
        inputs = self._flatten_lists(inputs)
        strings = StringTable(self.manifest.strings)
        from_dlpack, on_host = detect_array_kind(inputs)
        shapes = [getattr(inputs.get(port.name), "shape", None) for port in self._ports]
        tensors = self._accept(self._ports, inputs, None if shapes == self._shapes else {}, strings)
        self._shapes = shapes
        threads = self._threads if threads is None else check_threads(threads)
        if self.gpu is None:
            results = self._run_code(tensors, threads, release=True)
            return self._deliver(results, self._index_memory(tensors, inputs), {}, from_dlpack, False, strings)
        with self.gpu.use_stream_of(inputs.values()):
            device_tensors = self.gpu.move_to_device(self._ports, tensors, in_place=False)
            results = self._run_code(device_tensors, threads, release=True)
            self.gpu.copy_back(self._ports, tensors, device_tensors)
            return self._deliver(results, self._index_memory(device_tensors, inputs), {}, from_dlpack, on_host, strings)

    def accept(self, inputs: Arrays) -> dict[str, Any]:
        """Return copies of arrays for some of the inputs, checked as by `run`, for a later call of `run`.

        Args:
            inputs: Arrays for any subset of the inputs, by name. Arrays in a GPU's memory are imported and not copied.

        Raises:
            InputError: The model does not take an array, or a name is not an input.
        """
        inputs = self._flatten_lists(inputs, is_complete=False)
        _check_input_names(inputs, self.manifest.inputs)
        ports, strings = {port.name: port for port in self._ports}, StringTable(self.manifest.strings)
        sizes: Sizes = {}
        return {name: ports[name].snapshot(array, sizes, strings) for name, array in inputs.items()}

    def submit(self, inputs: Arrays, threads: int | None = None) -> Future[dict[str, Any]]:
        """Queue a call of `run`, and return a future of the outputs, or of its exception.

        Submitted calls run one after the other, in that order.

        Args:
            inputs: Arrays by input name. They must not be modified before the call is done.
            threads: Number of threads, as for `run`.

        Returns:
            A future of the outputs by name.
        """

        def task(answer: WorkerFuture) -> Callable[[], None]:
            return lambda: answer.compute(self.run, inputs, threads) if answer.set_running_or_notify_cancel() else None

        return self._background.submit(task)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """Run the model with inputs as keyword arguments."""
        return self.run(inputs)

    def bind(
        self, inputs: Arrays, outputs: Arrays | None = None, threads: int | None = None, graph: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that runs the model on these arrays, which are checked here only.

        Each call reads the current contents of the arrays. Calls from several threads are as safe as the arrays are.

        Args:
            inputs: Arrays by input name. They must be contiguous. They may be read-only, except for donated ones.
            outputs: Arrays by output name that results are written to. They must be contiguous and writable.
            threads: Number of threads of a call, as for `run`.
            graph: For models on GPUs: the first call becomes a CUDA graph, which all later calls launch. That takes one
                call of the driver instead of one for each kernel. The outputs are then the same arrays in every call.

        Returns:
            A function that returns what `run` returns, with the arrays in `outputs` in place of new ones.

        Raises:
            InputError: An array does not fit. With `graph`, also if sizes or kernels depend on array contents that the
                host reads; then it is raised here or by the first call.
        """
        if outputs is not None and not isinstance(outputs, Mapping):
            raise InputError(
                "output.mapping_required", f"outputs must map names to arrays, not {type(outputs).__name__}."
            )
        inputs = dict(self._flatten_lists(inputs))  # the caller may change the mapping
        outputs = flatten_lists(outputs or {}, [t.name for t in self.outputs], self.manifest.output_lists, "output")
        strings = StringTable(self.manifest.strings)
        from_dlpack, on_host = detect_array_kind(inputs)
        gpu = check_graph(self.manifest, self.gpu, inputs, outputs) if graph else self.gpu
        threads = self._threads if threads is None else check_threads(threads)
        sizes: Sizes = {}
        ports = [
            InputPort(
                t,
                "input",
                self.manifest.ranges,
                self._describe_donation(t.name) or "a bound call reads it in place",
                t.name in self.manifest.donated,
                None if gpu is None else gpu.number,
            )
            for t in self.manifest.inputs
        ]
        tensors = self._accept(ports, inputs, sizes, strings)
        targets: _Targets = {}
        for name, array in outputs.items():
            spec = next((t for t in self.manifest.outputs if t.name == name), None)
            if spec is None:
                raise InputError(
                    "output.name_unknown",
                    f"there is no output '{name}'. The outputs are {_list_names(self.manifest.outputs)}.",
                )
            reason = "a bound call writes results to it"
            port = InputPort(spec, "output", {}, reason, True, None if gpu is None else gpu.number)
            tensor = port.accept(array, sizes, strings)
            targets[name] = (tensor if gpu is None else gpu.move_to_device([port], [tensor], in_place=True)[0]), array
        if gpu is not None:
            tensors = gpu.move_to_device(ports, tensors, in_place=True)
        donated_targets = {self.manifest.donated[p.name]: tensor for p, tensor in zip(ports, tensors) if p.is_written}
        check_output_memory({name: tensor for name, (tensor, _) in targets.items()}, donated_targets)
        memory = self._index_memory(tensors, inputs)

        slots = self.manifest.slots
        arrays = list(inputs.values())
        if graph and gpu is not None:
            donated = frozenset(address for address, owner in memory.items() if owner is not None)

            def deliver(results: list[Tensor]) -> dict[str, Any]:
                delivered = {}
                for port, tensor in zip(self._outputs, results):
                    owner, array = memory.get(tensor.data_ptr()) or (None, None)
                    delivered[port.name] = array if owner == port.name else port.deliver(tensor, from_dlpack, strings)
                return collect_lists(delivered, self.outputs, self.manifest.output_lists)

            graph_call = Graph(self._library, gpu, (*tensors, *self._weights.argument), donated, deliver)

            def launch() -> dict[str, Any]:
                with gpu.use_stream_of(arrays) as stream:
                    return graph_call(stream)

            return launch
        if slots is not None:
            rows, length = self._count_new_rows(slots, tensors), inputs[slots.length]
            if gpu is None:  # the memory that the code reads, even if the caller's array object changes
                length = np.from_dlpack(self._find_tensor(slots.length, tensors))

        def call() -> dict[str, Any]:
            if slots is not None:  # the value of the length may have changed
                check_slot_capacity(slots, length, rows)
            results = self._run_code(tensors, threads, release=False)
            return self._deliver(results, memory, targets, from_dlpack, on_host, strings)

        if gpu is None:
            return call

        def call_in_order() -> dict[str, Any]:
            with gpu.use_stream_of(arrays):
                return call()

        return call_in_order

    def decoder(self, ids: str = "", mask: str = "", positions: str = "", fixed: Arrays | None = None) -> Decoder:
        """Return a decoder that owns the caches of this model, which was compiled with static_cache.

        Args:
            ids: The input of token ids, int [B, S], or of embeddings, float [B, S, H]. "" finds it by its use. Other
                inputs of that form are values of tokens, too.
            mask: The input of the attention mask, [B, P + S]; "" finds it likewise.
            positions: The input of positions, [B, S]; "" finds it likewise.
            fixed: Arrays for all other inputs, equal in every call, and for those of the setup, which runs here; or all
                outputs of the setup. Each has a row for one sequence, or for a group of adjacent ones. An input
                `source_lengths`, int64 [B], may limit the rows of each source; all rows count without it.

        Raises:
            InputError: The model lacks caches or a named input, or has an input that is none of these.
        """
        return Decoder(self, ids, mask, positions, fixed or {})

    def save(self, folder: str | Path, sign_key: SigningKey | None = None) -> None:
        """Write the artifact to `folder` atomically, even if its original folder has changed.

        Args:
            folder: The folder to write or replace.
            sign_key: Private half of an Ed25519 key: a PEM file, its 32 bytes, or a key of the package `cryptography`.
                It signs the artifact for `load(verify_key=)`. Without a key an existing signature remains.

        Raises:
            ArtifactError: The files were written to since the load, `folder` has other content or cannot be written, or
                this model is a setup.
        """
        if self.manifest.part != MODEL:
            raise ArtifactError("artifact.part_not_standalone", "a setup is part of its decoder: save the decoder.")
        signature = None if sign_key is None else sign(self._files.read(FILE), sign_key)
        with replace_folder(Path(folder)) as new:
            copy_artifact(self._files, self.manifest, new, signature)

    def __copy__(self) -> Model:
        """Return the model itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: Any) -> Model:
        return self

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        """Pickle all files of the artifact for another process.

        Raises ArtifactError as `save` does.
        """
        if self.manifest.part != MODEL:
            raise ArtifactError("artifact.part_not_standalone", "a setup is part of its decoder: pickle the decoder.")
        return unpack_model, (pack_model(self._files, self.manifest), self._threads, self.gpu.number if self.gpu else 0)

    def to_numpy(self, name: str, array: Any) -> np.ndarray:
        """Return an output as a NumPy array, copied and waited for if it is in a GPU's memory."""
        if self.gpu is None:
            return array
        port = next(port for port in self._outputs if port.name == name)
        return port.deliver(self.gpu.to_host(array), np.from_dlpack, StringTable(self.manifest.strings))

    def wait(self) -> None:
        """Wait until a GPU has finished all calls."""
        if self.gpu is not None:
            self.gpu.wait()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Report each kernel of calls from this thread to `instrument` in the block.

        No other thread may run the model meanwhile.
        """
        machine = self._library.new_machine(instrument)
        self._machines.append(machine)
        try:
            yield
        finally:
            self._machines.remove(machine)

    def function(self, name: str) -> tvm_ffi.Function:
        """Return a compiled function by name, for tools."""
        return self._library.function(name)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor that is an argument of a kernel is a weight."""
        return self._weights.contains(tensor.data_ptr())

    # -- steps of a call ----------------------------------------------------------------------------------------------

    def _describe_donation(self, name: str) -> str | None:
        output = self.manifest.donated.get(name)
        return None if output is None else f"it is donated: its memory becomes output '{output}'"

    def _flatten_lists(self, inputs: Arrays, is_complete: bool = True) -> Arrays:
        """Return the arrays of inputs, those of lists by the names of tensors. Raises InputError as `flatten_lists`."""
        lists = self.manifest.input_lists
        return flatten_lists(inputs, [t.name for t in self.inputs], lists, "input", is_complete) if lists else inputs

    def _accept(
        self, ports: list[InputPort], inputs: Arrays, sizes: Sizes | None, strings: StringTable
    ) -> list[Tensor]:
        tensors = []
        for port in ports:
            array = inputs.get(port.name)
            if array is None:
                _check_input_names(inputs, self.manifest.inputs)
                raise InputError("input.missing", f"input '{port.name}' is missing; the model takes {port.spec}.")
            tensors.append(port.accept(array, sizes, strings))
        if len(inputs) > len(tensors):
            _check_input_names(inputs, self.manifest.inputs)
        if self.manifest.donated:
            check_donated_memory(ports, tensors, self.manifest.donated)
        slots = self.manifest.slots
        if slots is not None:
            check_slot_capacity(slots, inputs[slots.length], self._count_new_rows(slots, tensors))
        return tensors

    def _count_new_rows(self, slots: SlotCaches, tensors: list[Tensor]) -> int:
        """Return how many rows a call adds to the caches."""
        if slots.tokens is None:
            return 0
        name, axis = slots.tokens
        return self._find_tensor(name, tensors).shape[axis]

    def _find_tensor(self, name: str, tensors: list[Tensor]) -> Tensor:
        return next(tensor for port, tensor in zip(self._ports, tensors) if port.name == name)

    def _index_memory(self, tensors: list[Tensor], inputs: Arrays) -> _Memory:
        memory: _Memory = {tensor.data_ptr(): None for tensor in tensors}
        if self.manifest.donated:
            for port, tensor in zip(self._ports, tensors):
                if port.is_written:
                    memory[tensor.data_ptr()] = (self.manifest.donated[port.name], inputs[port.name])
        return memory

    def _run_code(self, tensors: list[Tensor], threads: int | None, release: bool) -> tvm_ffi.Array:
        try:
            machine = self._machines.pop()
        except IndexError:
            machine = self._library.new_machine()
        try:
            if threads is None:
                return machine.main(*tensors, *self._weights.argument)
            self._library.set_threads(threads)
            try:
                return machine.main(*tensors, *self._weights.argument)
            finally:
                self._library.set_threads(0)
        except Exception as error:
            code, reason = describe_failure(error)
            raise InputError(code, f"the model cannot run on these inputs: {reason}") from error
        finally:
            if release:
                machine.release()
            self._machines.append(machine)

    def _deliver(
        self,
        results: tvm_ffi.Array,
        memory: _Memory,
        targets: _Targets,
        from_dlpack: FromDLPack,
        to_host: bool,
        strings: StringTable,
    ) -> dict[str, Any]:
        outputs = {}
        returned: set[int] = set()
        copies: list[tuple[Tensor, Tensor]] = []
        for index, port in enumerate(self._outputs):
            try:
                tensor = item(results, index)
            except IndexError as error:
                raise ArtifactError(
                    "artifact.output_count_mismatch",
                    f"the code returns {index} results, and {FILE} names {len(self._outputs)}: it belongs to "
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
            elif address in memory or address in returned or self._weights.contains(address) or is_shared(tensor):
                # Copy memory of an input that is also an output, of a weight, of another output, or of a constant of
                # the code.
                tensor = copy_tensor(tensor)
            else:
                returned.add(address)
            outputs[port.name] = port.deliver(tensor, from_dlpack, strings)
        for tensor, target in copies:
            write_output(tensor, target)
        return collect_lists(outputs, self.outputs, self.manifest.output_lists)


def _check_input_names(arrays: Arrays, specs: tuple[TensorSpec, ...]) -> None:
    unknown = next((name for name in arrays if all(name != spec.name for spec in specs)), None)
    if unknown is not None:
        raise InputError("input.name_unknown", f"there is no input '{unknown}'. The inputs are {_list_names(specs)}.")


def _list_names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(t.name for t in specs)
