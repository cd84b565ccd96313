"""A compiled model that runs, from any number of threads at once."""

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
from .background import Answer, Background
from .checks import check_room, checked_threads
from .copies import copy_artifact
from .decoder import Decoder
from .devices import Gpu
from .failures import sentence
from .files import Files
from .folders import replaced_folder
from .graphs import Graph, check_graph
from .inputs import Port, Sizes, check_apart, check_targets
from .library import Instrument, Library, Machine
from .lists import put_together, take_apart
from .outputs import FromDLPack, OutputPort, check_output, kind_of, write_output
from .pickling import packed, unpacked
from .signature import SigningKey, sign
from .strings import Dictionary
from .tensors import Tensor, copy_of, held_elsewhere, item
from .weights import Weights

Arrays = Mapping[str, Any]

# By address: the memory of a call's inputs, and for donated ones the output that takes it over and the caller's
# array.
_Memory = dict[int, tuple[str, Any] | None]
# By output name: arrays that the caller provides for results, as tensors and as they are.
_Targets = dict[str, tuple[Tensor, Any]]


class Model:
    """A loaded artifact (`lowering.load`).

    Arrays are NumPy's or those of any library that speaks DLPack, in the CPU's memory or, for a model on a GPU, in
    that GPU's; what is not there is copied. Outputs come back in the kind and the memory of the first input that is
    not NumPy's, in NumPy's otherwise. Inputs are read in place at any alignment; only strided ones are copied, and
    strings. Outputs are new arrays that own their memory, but for those that take over a donated input's: they are
    the array object that the caller passed. Any number of threads may run one model at the same time.

    An input or output that is a sequence in the ONNX model is a list of arrays, as long as it was when the model was
    compiled, and an optional one without an element is None. `inputs` and `outputs` name the tensors of lists, by which
    they can be given one by one: x[0], x[1].

    `setup` is, for a decoder that reads an encoder's output, the model of what is computed of it once per sequence; its
    outputs are inputs of this model, by name. None for all others.
    """

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        library: Library,
        weights: memoryview,
        threads: int | None = None,
        setup: Model | None = None,
    ) -> None:
        self.manifest = manifest
        self.setup = setup
        self._files = files
        self._library = library
        self.gpu = None if library.gpu is None else Gpu(library.gpu)
        self._weights = Weights(weights, manifest, self.gpu)
        self._threads = manifest.threads if threads is None else threads
        self._ports = [
            Port(t, "input", manifest.ranges, self._donation(t.name), t.name in manifest.donated, library.gpu)
            for t in manifest.inputs
        ]
        self._outputs = [OutputPort(t) for t in manifest.outputs]
        # The last call's shapes, which need no second look.
        self._shapes: list[Any] = []
        # Virtual machines that no call uses now. A call takes one for itself: two calls on one would crash.
        self._machines: list[Machine] = [library.new_machine()]
        self._background = Background("onnx-lowering", lambda task, _: [task])

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call takes, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call gives, in order."""
        return self.manifest.outputs

    def __repr__(self) -> str:
        taken = arguments(self.inputs, self.manifest.input_lists)
        given = arguments(self.outputs, self.manifest.output_lists)
        return f"Model({', '.join(map(str, taken))} -> {', '.join(map(str, given))})"

    def _repr_html_(self) -> str:
        from ..notebook import of_model  # what only runs needs no HTML

        return of_model(self.manifest)

    def run(self, inputs: Arrays, threads: int | None = None) -> dict[str, Any]:
        """The outputs by name, for arrays by input name.

        threads is the number of threads for this call, else what the model was loaded with. Raises InputError for
        arrays that the model does not take, before any donated one is written, and for sizes that do not fit together
        inside the model.
        """
        inputs = self._taken_apart(inputs)
        strings = Dictionary(self.manifest.strings)
        from_dlpack, on_host = kind_of(inputs)
        shapes = [getattr(inputs.get(port.name), "shape", None) for port in self._ports]
        tensors = self._accept(self._ports, inputs, None if shapes == self._shapes else {}, strings)
        self._shapes = shapes
        threads = self._threads if threads is None else checked_threads(threads)
        if self.gpu is None:
            results = self._call(tensors, threads, release=True)
            return self._deliver(results, self._memory(tensors, inputs), {}, from_dlpack, False, strings)
        with self.gpu.stream_of(inputs.values()):
            placed = self.gpu.place(self._ports, tensors, in_place=False)
            results = self._call(placed, threads, release=True)
            self.gpu.take_back(self._ports, tensors, placed)
            return self._deliver(results, self._memory(placed, inputs), {}, from_dlpack, on_host, strings)

    def accept(self, inputs: Arrays) -> dict[str, Any]:
        """Return copies of arrays for some of the inputs, checked as by `run`, which takes them at any later time.

        Arrays in a GPU's memory are imported and not copied. Raises InputError for arrays that the model does not take,
        and for names that are not inputs.
        """
        inputs = self._taken_apart(inputs, is_whole=False)
        _check_names(inputs, self.manifest.inputs)
        ports, strings = {port.name: port for port in self._ports}, Dictionary(self.manifest.strings)
        sizes: Sizes = {}
        return {name: ports[name].keep(array, sizes, strings) for name, array in inputs.items()}

    def submit(self, inputs: Arrays, threads: int | None = None) -> Future[dict[str, Any]]:
        """`run` in the background: a future of the outputs, or of what it raises.

        Calls that are submitted run one after the other, in that order; the arrays must stay as they are until then.
        """

        def task(answer: Answer) -> Callable[[], None]:
            return lambda: answer.compute(self.run, inputs, threads) if answer.set_running_or_notify_cancel() else None

        return self._background.submit(task)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """`run` with inputs as keyword arguments."""
        return self.run(inputs)

    def bind(
        self, inputs: Arrays, outputs: Arrays | None = None, threads: int | None = None, graph: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """A function that runs the model on these arrays, checked here once and for all, and returns what `run` does.

        What the arrays hold when it is called counts. outputs, by name, are arrays that results are written to; the
        returned dictionary has them in place of new ones. The arrays must be contiguous and, but for donated ones and
        outputs, may be read-only. Calls from several threads are as safe as the arrays are.

        graph, for models on GPUs, makes the first call a CUDA graph, which all others launch: one call of the driver
        instead of one for each kernel. The outputs are then the same arrays in every call. Raises InputError, at once
        or in the first call, where the host reads what arrays hold, on which sizes or kernels depend.
        """
        if outputs is not None and not isinstance(outputs, Mapping):
            raise InputError(f"outputs must map names to arrays, not {type(outputs).__name__}.")
        inputs = dict(self._taken_apart(inputs))  # the caller's may change
        outputs = take_apart(outputs or {}, [t.name for t in self.outputs], self.manifest.output_lists, "output")
        strings = Dictionary(self.manifest.strings)
        from_dlpack, on_host = kind_of(inputs)
        gpu = check_graph(self.manifest, self.gpu, inputs, outputs) if graph else self.gpu
        threads = self._threads if threads is None else checked_threads(threads)
        sizes: Sizes = {}
        ports = [
            Port(
                t,
                "input",
                self.manifest.ranges,
                self._donation(t.name) or "a bound call reads it in place",
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
                raise InputError(f"there is no output '{name}'. The outputs are {_names(self.manifest.outputs)}.")
            reason = "a bound call writes results to it"
            port = Port(spec, "output", {}, reason, True, None if gpu is None else gpu.number)
            tensor = port.accept(array, sizes, strings)
            targets[name] = (tensor if gpu is None else gpu.place([port], [tensor], in_place=True)[0]), array
        if gpu is not None:
            tensors = gpu.place(ports, tensors, in_place=True)
        kept = {self.manifest.donated[p.name]: tensor for p, tensor in zip(ports, tensors) if p.written}
        check_targets({name: tensor for name, (tensor, _) in targets.items()}, kept)
        memory = self._memory(tensors, inputs)

        slots = self.manifest.slots
        arrays = list(inputs.values())
        if graph and gpu is not None:
            donated = frozenset(address for address, owner in memory.items() if owner is not None)

            def delivered(results: list[Tensor]) -> dict[str, Any]:
                made = {}
                for port, tensor in zip(self._outputs, results):
                    owner, array = memory.get(tensor.data_ptr()) or (None, None)
                    made[port.name] = array if owner == port.name else port.deliver(tensor, from_dlpack, strings)
                return put_together(made, self.outputs, self.manifest.output_lists)

            captured = Graph(self._library, gpu, (*tensors, *self._weights.argument), donated, delivered)

            def launch() -> dict[str, Any]:
                with gpu.stream_of(arrays) as stream:
                    return captured(stream)

            return launch
        if slots is not None:
            rows, length = self._new_rows(slots, tensors), inputs[slots.length]
            if gpu is None:  # the memory that the code reads, whatever becomes of the caller's array object
                length = np.from_dlpack(self._tensor(slots.length, tensors))

        def call() -> dict[str, Any]:
            if slots is not None:  # what the length holds may have changed
                check_room(slots, length, rows)
            results = self._call(tensors, threads, release=False)
            return self._deliver(results, memory, targets, from_dlpack, on_host, strings)

        if gpu is None:
            return call

        def call_in_order() -> dict[str, Any]:
            with gpu.stream_of(arrays):
                return call()

        return call_in_order

    def decoder(self, ids: str = "", mask: str = "", positions: str = "", fixed: Arrays | None = None) -> Decoder:
        """Return a decoder that keeps the caches of this model, which was compiled with static_cache.

        Args:
            ids: The input of token ids, int [B, S], or of embeddings, float [B, S, H]. Found by what it feeds if "".
                Others of that form are values of tokens, too.
            mask: The input of the attention mask, [B, P + S]; likewise.
            positions: The input of positions, [B, S]; likewise.
            fixed: Arrays for all other inputs, the same in every call, and for those of the setup, which runs here, or
                all that it gives: a row for one sequence, or for a group of them side by side. An input
                `source_lengths`, int64 [B], may say how many rows of each source count; all do without it.

        Raises:
            InputError: The model keeps no caches, has an input that none of these is, or none that has such a name.
        """
        return Decoder(self, ids, mask, positions, fixed or {})

    def save(self, folder: str | Path, sign_key: SigningKey | None = None) -> None:
        """Writes the artifact to `folder`, all of it or nothing, whatever has become of the folder it came from.

        sign_key, the private half of an Ed25519 key (a PEM file, its 32 bytes, or a key of the package `cryptography`),
        signs it for `load(verify_key=)`; without one, a signature that is there stays. Raises ArtifactError if the
        files have been written to since the load, if `folder` holds something else, or if it cannot be written, and for
        a setup.
        """
        if self.manifest.part != MODEL:
            raise ArtifactError("a setup is a part of its decoder: save that.")
        signature = None if sign_key is None else sign(self._files.read(FILE), sign_key)
        with replaced_folder(Path(folder)) as new:
            copy_artifact(self._files, self.manifest, new, signature)

    def __copy__(self) -> Model:
        """The model itself, which nothing changes."""
        return self

    def __deepcopy__(self, memo: Any) -> Model:
        return self

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        """All files of the artifact, for a process that may be elsewhere. Raises ArtifactError as `save` does."""
        if self.manifest.part != MODEL:
            raise ArtifactError("a setup is a part of its decoder: pickle that.")
        return unpacked, (packed(self._files, self.manifest), self._threads, self.gpu.number if self.gpu else 0)

    def to_numpy(self, name: str, array: Any) -> np.ndarray:
        """An output as NumPy's array, copied and waited for where it is in a GPU's memory."""
        if self.gpu is None:
            return array
        port = next(port for port in self._outputs if port.name == name)
        return port.deliver(self.gpu.to_host(array), np.from_dlpack, Dictionary(self.manifest.strings))

    def wait(self) -> None:
        """Until a GPU has done what calls have asked of it."""
        if self.gpu is not None:
            self.gpu.wait()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """While it is open, calls from this thread, if no other runs the model, report each kernel to `instrument`."""
        machine = self._library.new_machine(instrument)
        self._machines.append(machine)
        try:
            yield
        finally:
            self._machines.remove(machine)

    def function(self, name: str) -> tvm_ffi.Function:
        """A compiled function by name, for tools."""
        return self._library.function(name)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor that a kernel is called with is a weight."""
        return self._weights.hold(tensor.data_ptr())

    # -- the parts of a call
    # ------------------------------------------------------------------------------------------

    def _donation(self, name: str) -> str | None:
        output = self.manifest.donated.get(name)
        return None if output is None else f"it is donated: its memory becomes output '{output}'"

    def _taken_apart(self, inputs: Arrays, is_whole: bool = True) -> Arrays:
        """The arrays of inputs, those of lists by the names of tensors. Raises InputError as `take_apart`."""
        lists = self.manifest.input_lists
        return take_apart(inputs, [t.name for t in self.inputs], lists, "input", is_whole) if lists else inputs

    def _accept(self, ports: list[Port], inputs: Arrays, sizes: Sizes | None, strings: Dictionary) -> list[Tensor]:
        tensors = []
        for port in ports:
            array = inputs.get(port.name)
            if array is None:
                _check_names(inputs, self.manifest.inputs)
                raise InputError(f"input '{port.name}' is missing; the model takes {port.spec}.")
            tensors.append(port.accept(array, sizes, strings))
        if len(inputs) > len(tensors):
            _check_names(inputs, self.manifest.inputs)
        if self.manifest.donated:
            check_apart(ports, tensors, self.manifest.donated)
        slots = self.manifest.slots
        if slots is not None:
            check_room(slots, inputs[slots.length], self._new_rows(slots, tensors))
        return tensors

    def _new_rows(self, slots: SlotCaches, tensors: list[Tensor]) -> int:
        """How many rows a call adds to the caches."""
        if slots.tokens is None:
            return 0
        name, axis = slots.tokens
        return self._tensor(name, tensors).shape[axis]

    def _tensor(self, name: str, tensors: list[Tensor]) -> Tensor:
        return next(tensor for port, tensor in zip(self._ports, tensors) if port.name == name)

    def _memory(self, tensors: list[Tensor], inputs: Arrays) -> _Memory:
        memory: _Memory = {tensor.data_ptr(): None for tensor in tensors}
        if self.manifest.donated:
            for port, tensor in zip(self._ports, tensors):
                if port.written:
                    memory[tensor.data_ptr()] = (self.manifest.donated[port.name], inputs[port.name])
        return memory

    def _call(self, tensors: list[Tensor], threads: int | None, release: bool) -> tvm_ffi.Array:
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
            raise InputError(f"the model cannot run on these inputs: {sentence(error)}") from error
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
        strings: Dictionary,
    ) -> dict[str, Any]:
        outputs = {}
        given: set[int] = set()
        bound: list[tuple[Tensor, Tensor]] = []
        for index, port in enumerate(self._outputs):
            try:
                tensor = item(results, index)
            except IndexError as error:
                raise ArtifactError(
                    f"the code gives {index} results, and {FILE} names {len(self._outputs)}: it is not the one that "
                    "this code was made with. Compile the model again."
                ) from error
            address = tensor.data_ptr()
            if targets and port.name in targets:
                target, outputs[port.name] = targets[port.name]
                check_output(port.name, tensor, target)
                # Of an input that is also an output, to which another output may be written.
                bound.append((copy_of(tensor) if memory.get(address, self) is None else tensor, target))
                continue
            owner = memory.get(address)
            if owner is not None and owner[0] == port.name:
                outputs[port.name] = owner[1]
                continue
            if to_host and self.gpu is not None:
                tensor = self.gpu.to_host(tensor)
            elif address in memory or address in given or self._weights.hold(address) or held_elsewhere(tensor):
                # Memory of an input that is also an output, of a weight, of another output, or a constant of the code.
                tensor = copy_of(tensor)
            else:
                given.add(address)
            outputs[port.name] = port.deliver(tensor, from_dlpack, strings)
        for tensor, target in bound:
            write_output(tensor, target)
        return put_together(outputs, self.outputs, self.manifest.output_lists)


def _check_names(arrays: Arrays, specs: tuple[TensorSpec, ...]) -> None:
    unknown = next((name for name in arrays if all(name != spec.name for spec in specs)), None)
    if unknown is not None:
        raise InputError(f"there is no input '{unknown}'. The inputs are {_names(specs)}.")


def _names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(t.name for t in specs)
