"""The importer: an abstract interpreter over `Value`s that walks an ONNX graph and emits Relax.

It has the values of names, in the scopes of graphs and branches. node_lowering.py has the rules for one node.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import onnx
import onnx_ir as ir
from tvm import relax

from ..errors import ModelError, NodeError
from ..graph.loading.legality import declared_opset
from ..graph.loading.model import dtype_name
from ..graph.options.weight_schemes import NodeSchemes
from .function_body import read_function_body
from .imported_model import ImportedModel, Port
from .node import Node, read_array
from .node_lowering import Lookup, lower_operator
from .origins import OriginBuilder
from .outputs import find_shape_contradiction, find_type_problem, make_output_ports
from .random_streams import RandomStreams
from .tensors import FunctionTensors, shape_expr, tensor_type
from .undecided_types import UndecidedTypeError
from .values import AbsentValue, Shape, Value, flatten_values, storage_dtype, storage_shape


def import_model(
    model: ir.Model,
    lookup: Lookup,
    sizes: Collection[str] = (),
    checks: bool = True,
    seed: int | str = 0,
    schemes: NodeSchemes | None = None,
) -> ImportedModel:
    """Lower the model's graph to Relax.

    Args:
        model: The model.
        lookup: The registry of lowerings.
        sizes: Names of inputs (int64 scalars) that the model uses as sizes.
        checks: Whether each run checks the tables of serving operators.
        seed: The seed of random nodes, or the name of the input (int64 scalar) that has it.
        schemes: How constants are compressed, None for none.

    Returns:
        The imported model.

    Raises:
        NodeError: at the first node that cannot be lowered.
    """
    return Importer(model, lookup, sizes=sizes, checks=checks, seed=seed, schemes=schemes).run()


class Importer(FunctionTensors):
    """The state of one import.

    If `errors` is a list, it collects the error of each node that cannot be lowered, and the import continues.
    """

    def __init__(
        self,
        model: ir.Model,
        lookup: Lookup,
        errors: list[NodeError] | None = None,
        sizes: Collection[str] = (),
        checks: bool = True,
        seed: int | str = 0,
        schemes: NodeSchemes | None = None,
    ) -> None:
        super().__init__(schemes)
        self.model = model
        self.lookup = lookup
        self._seed_input = seed if isinstance(seed, str) else None
        self.random = RandomStreams.from_number(0 if isinstance(seed, str) else seed)
        self.sizes = sizes
        self.checks = checks
        self.first_to_check: dict[Any, str] = {}  # checked tensors -> the node named in errors
        self.errors = errors
        self.recipes = False  # whether computations of small constants are preserved
        self.undecided: set[str] = set()  # outputs of the current branch whose types later nodes may decide
        self.conditions: set[str] = set()  # outputs of the current graph that are read as conditions only
        self._opsets = {_domain(d): v for d, v in model.opset_imports.items()}
        self._declared_opset = declared_opset(model)
        self.warnings: list[str] = []
        self.unexamined = 0  # nodes that depend on a blocked node's output of unknown type
        self._unknown: set[str] = set()
        self._failed: set[str] = set()  # outputs of blocked nodes, and of nodes that depend on them
        self._values: dict[str, Value | None] = {}

    def run(self) -> ImportedModel:
        graph = self.model.graph
        with_default = set(graph.initializers)
        ports = [self._port(v) for v in graph.inputs if v.name not in with_default]
        params = [
            relax.Var(
                f"input_{k}",
                relax.TensorType(shape_expr(storage_shape(p.dtype, p.shape)), storage_dtype(p.dtype)),
            )
            for k, p in enumerate(ports)
        ]
        for port, param in zip(ports, params):
            self._values[port.name] = Value(port.dtype, port.shape, param)
            if port.name == self._seed_input:
                self.random.seed = Value(port.dtype, port.shape, param)
        with self.builder.function("main", attrs={"num_input": len(params)}):
            for port, param in zip(ports, params):
                if port.name in self.sizes:
                    self._values[port.name] = self.bind_size_input(port.name, param)
            try:
                results = self.lower_graph(graph)
                self._check_outputs(results)
            except BaseException:
                self.builder._end_block()  # else the builder's own warning follows our error
                raise
            output = relax.Tuple([self.tensor(v) for v in flatten_values(results)])
            self.builder.emit_func_output(output, params + self._weights.variables)
        outputs, lists = make_output_ports(graph.outputs, results, self._as_port)
        module, origins, weights = self.builder.finalize(), self.builder.origins, self._weights.contents
        derived = self.expected.derive_sizes((port.shape, port.dims) for port in ports)
        return ImportedModel(
            module,
            weights,
            ports,
            outputs,
            lists,
            list(self.strings),
            self.warnings,
            origins,
            self.builder.schemes,
            self._assertions,
            derived,
        )

    def _port(self, value: ir.Value) -> Port:
        name = value.name or ""
        if not isinstance(value.type, ir.TensorType):
            raise ModelError(
                "model.input_type_unsupported",
                f"Input '{name}' is a {value.type} without a number of tensors. Give the number with dims= (--dim).",
            )
        if value.shape is None:
            raise ModelError(
                "model.input_shape_missing",
                f"Input '{name}' has no shape. Give it one (dimensions may be symbolic names).",
            )
        shape = tuple(
            dim if isinstance(dim, int) else self.symbols.get_named(dim.value or f"{name}_{axis}")
            for axis, dim in enumerate(value.shape)
        )
        return self._as_port(name, dtype_name(value.dtype), shape)

    def _as_port(self, name: str, dtype: str, shape: Shape) -> Port:
        return Port(name, dtype, shape, tuple(map(self.symbols.to_dim, shape)))

    def _check_outputs(self, results: list[Value]) -> None:
        """Reject outputs of another element type than declared; warn about other shapes: the computed ones are used."""
        for declared, computed in zip(self.model.graph.outputs, results):
            if declared.name in self._failed:
                continue
            if problem := find_type_problem(declared, computed):
                self._refuse_output(declared, *problem)
            elif contradiction := find_shape_contradiction(declared, computed):
                self.warnings.append(f"output '{declared.name}' {contradiction}, which counts")

    def _refuse_output(self, output: ir.Value, what: str, remedy: str) -> None:
        error = NodeError("model.output_type_mismatch", f"output '{output.name}'", what, remedy)
        if self.errors is None:
            raise error
        self.errors.append(error)

    def declared_version(self, node: ir.Node, version: int) -> int:
        """Return the version of an operator in errors: by the opset that the model declares, if it has the operator."""
        declared = self._declared_opset
        has_it = declared is not None and not _domain(node.domain) and onnx.defs.has(node.op_type, declared, "")
        return declared if declared is not None and has_it else version

    # -- the walk -----------------------------------------------------------------------------------------------------

    def lower_graph(
        self, graph: ir.Graph, then: Sequence[ir.Node] = (), outputs: Sequence[ir.Value] | None = None
    ) -> list[Value]:
        """Lower a graph whose inputs are bound, and then the nodes of `then`; return the values of its outputs.

        outputs are those of the graph by default.
        """
        outputs = graph.outputs if outputs is None else outputs
        self.read_initializers(graph)
        self.lower_nodes([*graph, *then], outputs)
        return [self._read(v) for v in outputs]

    def read_initializers(self, graph: ir.Graph) -> None:
        for name, initializer in graph.initializers.items():
            self._values[name] = self._initializer(initializer)

    def lower_nodes(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
        """Lower nodes in order.

        Nodes that follow branches of different types are moved into the branches, until their results have equal types.
        outputs are the values that are read outside the nodes.
        """
        rest = deque(nodes)
        while rest:
            node = rest.popleft()
            with self.lowering(node):
                try:
                    self.lower_node(node)
                except UndecidedTypeError as undecided:
                    try:
                        rest = deque(undecided.move(rest, outputs))
                    except UndecidedTypeError:
                        raise
                    except NodeError as error:
                        self._block(node, error)

    def lowering(self, node: ir.Node) -> AbstractContextManager[None]:
        """Attribute all that is emitted inside to the node."""
        return self.builder.lowering(node)

    def lower_body(
        self,
        graph: ir.Graph,
        inputs: Sequence[Value],
        where: str,
        recipes: bool = False,
        conditions: int = 0,
        is_open: bool = False,
    ) -> list[Value]:
        """Lower a graph with these inputs in the scope of the surrounding values; its own names are local.

        Its operators have the opsets that it imports, or else the model's.

        Args:
            graph: The graph.
            inputs: The values of its inputs.
            where: The graph's description in errors.
            recipes: Whether to compute values built from a few numbers, such as positions, at run time. A reader of the
                graph that evaluates it element by element needs the computation.
            conditions: How many of the first outputs are conditions: these may have any number of dimensions of 1.
            is_open: Whether the nodes after this one may decide the types of outputs.
        """
        outer = self._values, self.inside, self.recipes, self._opsets, self.conditions, self.undecided
        self.undecided = {value.name or "" for value in graph.outputs} if is_open else set()
        self.conditions = {value.name or "" for value in graph.outputs[:conditions]}
        self._opsets = {**self._opsets, **{_domain(name): version for name, version in graph.opset_imports.items()}}
        self._values = {**self._values, **{v.name or "": value for v, value in zip(graph.inputs, inputs, strict=True)}}
        self.inside, self.recipes = where, recipes
        try:
            return self.lower_graph(graph)
        finally:
            self._values, self.inside, self.recipes, self._opsets, self.conditions, self.undecided = outer

    def lower_branch(self, lower: Callable[[], list[Value]]) -> tuple[relax.SeqExpr, list[Value]]:
        """Lower values in their own scope, whose result is the tuple of their tensors.

        The values have their types; their tensors and all names exist inside the scope only.
        """
        outer, self._values = self._values, dict(self._values)
        try:
            with self.scope() as scope:
                values = lower()
                scope.result = relax.Tuple([self.tensor(v) for v in flatten_values(values)])
        finally:
            self._values = outer
        assert scope.sequence is not None
        return scope.sequence, values

    def start_rehearsal(self) -> Importer:
        """Return a copy that tells the types of results; `end_rehearsal` discards what it emits."""
        other = copy.copy(self)
        other.builder, other.errors, other._weights = OriginBuilder(), None, self._weights.copy()
        other.builder._begin_binding_block()
        other.warnings, other.strings, other._assertions = [], dict(self.strings), dict(self._assertions)
        other._values, other._materialized = dict(self._values), dict(self._materialized)
        other.first_to_check = dict(self.first_to_check)
        return other

    def end_rehearsal(self) -> None:
        self.builder._end_block()

    @contextmanager
    def roll_back_on(self, error: type[Exception]) -> Iterator[None]:
        """Restore weights and warnings if the block ends with that error."""
        weights, warnings = self._weights.copy(), list(self.warnings)
        try:
            yield
        except error:
            self._weights, self.warnings = weights, warnings
            raise

    def get_value(self, name: str) -> Value | None:
        return self._values.get(name)

    def bind(self, names: Iterable[ir.Value], values: Iterable[Value]) -> None:
        """Bind names to values."""
        self._values.update({name.name: value for name, value in zip(names, values) if name.name})

    def _initializer(self, value: ir.Value) -> Value:
        tensor = value.const_value
        if tensor is None:
            raise ModelError(
                "model.initializer_data_missing",
                f"Initializer '{value.name}' has no data. Save the model with its weights.",
            )
        return self.constant(read_array(tensor))

    def _read(self, value: ir.Value) -> Value:
        bound = self._values.get(value.name or "")
        if bound is None:
            raise ModelError(
                "model.value_undefined",
                f"Value '{value.name}' is used before any node computes it. Sort the nodes topologically.",
            )
        return bound

    def lower_node(self, node: ir.Node) -> None:
        version = self._opsets.get(_domain(node.domain), 1)
        read = (None if v is None or not v.name else self._read(v) for v in node.inputs)
        inputs = [None if isinstance(v, AbsentValue) else v for v in read]
        if self._unknown and any(v is not None and v.name in self._unknown for v in node.inputs):
            self.unexamined += 1
            self._values.update({v.name: self._make_placeholder(v) for v in node.outputs if v.name})
            self._failed.update(v.name or "" for v in node.outputs)
            return
        try:
            results = lower_operator(self, node, version, inputs)
        except UndecidedTypeError:
            raise
        except NodeError as error:
            self._block(node, error)
            return
        if self._failed and any(v is not None and v.name in self._failed for v in node.inputs):
            self._failed.update(v.name or "" for v in node.outputs)
        for output, result in zip(node.outputs, results):
            if output.name and result is not None:
                self._values[output.name] = result

    def _block(self, node: ir.Node, error: NodeError) -> None:
        """Raise the error, or record it and continue after the node."""
        if self.errors is None:
            raise error
        self.errors.append(error)
        self.bind(node.outputs, [self._make_placeholder(v) for v in node.outputs])
        self._failed.update(v.name or "" for v in node.outputs)

    def _make_placeholder(self, value: ir.Value) -> Value:
        """Return a value of the declared or inferred type, so that `check` continues after a failed node."""
        if value.dtype is None or value.shape is None or not isinstance(value.type, ir.TensorType):
            self._unknown.add(value.name or "")
        dtype = dtype_name(value.dtype) if value.dtype is not None else "float32"
        dims = value.shape if value.shape is not None else ()
        shape = tuple(d if isinstance(d, int) else self.symbols.fresh(value.name or "n") for d in dims)
        return Value(dtype, shape, relax.Var(value.name or "unknown", tensor_type(dtype, shape)))

    def lower_function_body(
        self, context: Node, node: ir.Node, version: int, inputs: list[Value | None]
    ) -> list[Value | None]:
        """Lower an operator that is not registered by its ONNX function body."""
        body = read_function_body(node, version, inputs)
        if body is None:
            raise context.error(
                "node.operator_unsupported",
                "no lowering is registered for this operator, and it has no ONNX function body.",
                "See docs/operators.md for supported operators, and docs/adding_an_operator.md to add one.",
            )
        outer = self._values, self._opsets, self.errors, self._declared_opset
        self._declared_opset = None
        self._values = {v.name or "": value for v, value in zip(body.inputs, inputs)}
        self._opsets = {_domain(domain): version for domain, version in body.opset_imports.items()}
        self.errors = None
        try:
            self.lower_nodes(list(body), body.outputs)
            return [self._values.get(v.name or "") for v in body.outputs[: len(node.outputs)]]
        except NodeError as error:
            raise context.error(
                "node.function_body_unsupported", f"its ONNX function body cannot be lowered: {error}"
            ) from error
        finally:
            self._values, self._opsets, self.errors, self._declared_opset = outer


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
