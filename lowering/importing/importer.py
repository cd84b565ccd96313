"""Walks an ONNX graph and emits Relax: an abstract interpreter over `Value`s.

Each node goes to the newest registered lowering of its (domain, operator); failing that to its ONNX function body;
failing that it is an error that names the node. Nodes whose inputs are all known numbers are folded with onnx's own
evaluator.
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

from .. import ops
from ..errors import LoweringError, ModelError, NodeError
from ..graph.fold import fold
from ..graph.legality import declared_opset
from ..graph.model import dtype_name
from .function_body import function_body
from .imported import Imported, Port
from .node import Node, array_of
from .origins import Builder
from .outputs import output_ports, shape_contradiction, type_problem
from .random_streams import RandomStreams
from .tensors import Tensors, shape_expr, tensor_type
from .type_rules import check_types
from .undecided import UndecidedTypeError
from .values import (
    MOST_SIZE,
    AbsentValue,
    Shape,
    Value,
    as_text,
    flatten_values,
    storage_dtype,
    storage_shape,
)

# By how many bytes folding may make numbers more where recipes are kept (Importer.body).
_SMALL_BYTES = 256


def import_model(model: ir.Model, sizes: Collection[str] = (), checks: bool = True, seed: int | str = 0) -> Imported:
    """Lowers the model's graph to Relax. `sizes` names inputs (int64 scalars) that the model uses as sizes. checks says
    whether runs look at the tables of serving operators. seed is that of random nodes, or the name of the input (int64
    scalar) that gives it.

    Raises NodeError at the first node that cannot be lowered.
    """
    return Importer(model, sizes=sizes, checks=checks, seed=seed).run()


class Importer(Tensors):
    """The state of one import.

    `errors`, when a list is given, collects what blocks each node instead of stopping.
    """

    def __init__(
        self,
        model: ir.Model,
        errors: list[NodeError] | None = None,
        sizes: Collection[str] = (),
        checks: bool = True,
        seed: int | str = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self._seed_input = seed if isinstance(seed, str) else None
        self.random = RandomStreams.from_number(0 if isinstance(seed, str) else seed)
        self.sizes = sizes
        self.checks = checks
        self.first_to_check: dict[Any, str] = {}  # what is checked -> the node that errors name
        self.errors = errors
        self.recipes = False  # whether it keeps recipes
        self.undecided: set[str] = set()  # outputs of the branch that is lowered whose types others may decide
        self.conditions: set[str] = set()  # outputs of the graph that is lowered of which only the truth is read
        self._opsets = {_domain(d): v for d, v in model.opset_imports.items()}
        self._declared_opset = declared_opset(model)
        self.warnings: list[str] = []
        self.unexamined = 0  # nodes that depend on a blocked node's output of unknown type
        self._unknown: set[str] = set()
        self._failed: set[str] = set()  # outputs of blocked nodes, and what depends on them
        self._values: dict[str, Value | None] = {}

    def run(self) -> Imported:
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
                    self._values[port.name] = self.size_of(port.name, param)
            try:
                results = self.graph(graph)
                self._check_outputs(results)
            except BaseException:
                self.builder._end_block()  # else the builder's own warning follows our error
                raise
            output = relax.Tuple([self.tensor(v) for v in flatten_values(results)])
            self.builder.emit_func_output(output, params + self._weights.variables)
        outputs, lists = output_ports(graph.outputs, results, self._as_port)
        module, origins, weights = self.builder.finalize(), self.builder.origins, self._weights.contents
        derived = self.expected.derived((port.shape, port.dims) for port in ports)
        return Imported(
            module,
            weights,
            ports,
            outputs,
            lists,
            list(self.strings),
            self.warnings,
            origins,
            self._assertions,
            derived,
        )

    def _port(self, value: ir.Value) -> Port:
        name = value.name or ""
        if not isinstance(value.type, ir.TensorType):
            raise ModelError(f"Input '{name}' is a {value.type}, of which nobody has said how many tensors it has.")
        if value.shape is None:
            raise ModelError(f"Input '{name}' has no shape. Give it one (dimensions may be symbolic names).")
        shape = tuple(
            dim if isinstance(dim, int) else self.symbols.named(dim.value or f"{name}_{axis}")
            for axis, dim in enumerate(value.shape)
        )
        return self._as_port(name, dtype_name(value.dtype), shape)

    def _as_port(self, name: str, dtype: str, shape: Shape) -> Port:
        return Port(name, dtype, shape, tuple(map(self.symbols.as_dim, shape)))

    def _check_outputs(self, results: list[Value]) -> None:
        """Refuse outputs of another element type than is declared; warn of other shapes: the computed ones count."""
        for declared, computed in zip(self.model.graph.outputs, results):
            if declared.name in self._failed:
                continue
            if problem := type_problem(declared, computed):
                self._refuse_output(declared, *problem)
            elif contradiction := shape_contradiction(declared, computed):
                self.warnings.append(f"output '{declared.name}' {contradiction}, which counts")

    def _refuse_output(self, output: ir.Value, what: str, remedy: str) -> None:
        error = NodeError(f"output '{output.name}'", what, remedy)
        if self.errors is None:
            raise error
        self.errors.append(error)

    def said_version(self, node: ir.Node, version: int) -> int:
        """Return the version that errors give of an operator: by the opset that the model declares, where it has it."""
        declared = self._declared_opset
        has_it = declared is not None and not _domain(node.domain) and onnx.defs.has(node.op_type, declared, "")
        return declared if declared is not None and has_it else version

    # -- the walk -----------------------------------------------------------------------------------------------------

    def graph(
        self, graph: ir.Graph, then: Sequence[ir.Node] = (), outputs: Sequence[ir.Value] | None = None
    ) -> list[Value]:
        """Lowers a graph whose inputs are already known, and then those nodes; returns the values of the outputs, by
        default of the graph's."""
        outputs = graph.outputs if outputs is None else outputs
        self.read_initializers(graph)
        self.lower_nodes([*graph, *then], outputs)
        return [self._read(v) for v in outputs]

    def read_initializers(self, graph: ir.Graph) -> None:
        for name, initializer in graph.initializers.items():
            self._values[name] = self._initializer(initializer)

    def lower_nodes(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
        """Lower nodes in their order. Those that follow branches of different types are moved into the branches, until
        their results have equal types; outputs are what is read of the nodes elsewhere."""
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
        """What is emitted inside belongs to the node."""
        return self.builder.lowering(node.op_type, node.name or node.outputs[0].name or "")

    def body(
        self,
        graph: ir.Graph,
        inputs: Sequence[Value],
        where: str,
        recipes: bool = False,
        conditions: int = 0,
        is_open: bool = False,
    ) -> list[Value]:
        """Lowers a graph with these inputs, which sees the values around it; its own names mean nothing outside. Its
        operators are of the opsets that it imports, or else of the model's. where says in errors what the graph is.
        recipes says to compute what is made of a few numbers, such as positions, when the model runs: who reads the
        graph element by element wants to see how. The first outputs, `conditions` of them, are conditions: they may
        have any number of dimensions of 1. is_open says that what follows the node may decide the types of outputs."""
        outer = self._values, self.inside, self.recipes, self._opsets, self.conditions, self.undecided
        self.undecided = {value.name or "" for value in graph.outputs} if is_open else set()
        self.conditions = {value.name or "" for value in graph.outputs[:conditions]}
        self._opsets = {**self._opsets, **{_domain(name): version for name, version in graph.opset_imports.items()}}
        self._values = {**self._values, **{v.name or "": given for v, given in zip(graph.inputs, inputs, strict=True)}}
        self.inside, self.recipes = where, recipes
        try:
            return self.graph(graph)
        finally:
            self._values, self.inside, self.recipes, self._opsets, self.conditions, self.undecided = outer

    def branch(self, lower: Callable[[], list[Value]]) -> tuple[relax.SeqExpr, list[Value]]:
        """Lower what gives some values in a scope of its own, whose result is the tuple of their tensors. The values
        tell their types; their tensors exist inside the scope only, and so do all names."""
        outer, self._values = self._values, dict(self._values)
        try:
            with self.scope() as scope:
                values = lower()
                scope.result = relax.Tuple([self.tensor(v) for v in flatten_values(values)])
        finally:
            self._values = outer
        assert scope.sequence is not None
        return scope.sequence, values

    def rehearsal(self) -> Importer:
        """Return a copy that tells what nodes would give: what it emits is thrown away by `end_rehearsal`."""
        other = copy.copy(self)
        other.builder, other.errors, other._weights = Builder(), None, self._weights.copy()
        other.builder._begin_binding_block()
        other.warnings, other.strings, other._assertions = [], dict(self.strings), dict(self._assertions)
        other._values, other._materialized = dict(self._values), dict(self._materialized)
        other.first_to_check = dict(self.first_to_check)
        return other

    def end_rehearsal(self) -> None:
        self.builder._end_block()

    @contextmanager
    def undone(self, error: type[Exception]) -> Iterator[None]:
        """Where that error ends what is inside, nothing is left of it."""
        weights, warnings = self._weights.copy(), list(self.warnings)
        try:
            yield
        except error:
            self._weights, self.warnings = weights, warnings
            raise

    def value_of(self, name: str) -> Value | None:
        return self._values.get(name)

    def bind(self, names: Iterable[ir.Value], values: Iterable[Value]) -> None:
        """Give values their names."""
        self._values.update({name.name: value for name, value in zip(names, values) if name.name})

    def _initializer(self, value: ir.Value) -> Value:
        tensor = value.const_value
        if tensor is None:
            raise ModelError(f"Initializer '{value.name}' has no data.")
        return self.constant(array_of(tensor))

    def _read(self, value: ir.Value) -> Value:
        known = self._values.get(value.name or "")
        if known is None:
            raise ModelError(f"Value '{value.name}' is used before any node computes it.")
        return known

    def lower_node(self, node: ir.Node) -> None:
        version = self._opsets.get(_domain(node.domain), 1)
        read = (None if v is None or not v.name else self._read(v) for v in node.inputs)
        inputs = [None if isinstance(v, AbsentValue) else v for v in read]
        if self._unknown and any(v is not None and v.name in self._unknown for v in node.inputs):
            self.unexamined += 1
            self._values.update({v.name: self._stand_in(v) for v in node.outputs if v.name})
            self._failed.update(v.name or "" for v in node.outputs)
            return
        try:
            results = self._results(node, version, inputs)
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
        """Raise the error, or note it and go on behind the node."""
        if self.errors is None:
            raise error
        self.errors.append(error)
        self.bind(node.outputs, [self._stand_in(v) for v in node.outputs])
        self._failed.update(v.name or "" for v in node.outputs)

    def _results(self, node: ir.Node, version: int, inputs: list[Value | None]) -> list[Value | None]:
        arrays = [None if v is None else v.constant for v in inputs]
        if all(a is not None or v is None for a, v in zip(arrays, inputs)):
            folded = fold(node, version, arrays, _SMALL_BYTES) if self.recipes else fold(node, version, arrays)
            if folded is not None:
                return [None if a is None else self.constant(a) for a in folded]
        lowering = ops.lookup(node.domain, node.op_type, version)
        context = Node(self, node, version, inputs)
        try:
            if lowering is None:
                return self._without_lowering(context, node, version, inputs)
            check_types(context, inputs, node.domain, node.op_type)
            result = lowering(context, *inputs)
        except LoweringError:
            raise
        except Exception as error:
            shapes = ", ".join("-" if v is None else f"{v.dtype}[{', '.join(map(as_text, v.shape))}]" for v in inputs)
            raise context.error(
                f"cannot be lowered for inputs {shapes or 'none'}.",
                "Its attributes and these shapes may not fit together, or it is a form that nobody has met; the cause "
                "of this error has the details (-v on the command line).",
            ) from error
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for value in filter(None, results):
            huge = [d for d in value.shape if isinstance(d, int) and d > MOST_SIZE]
            if huge:
                raise context.error(f"a dimension of its result is {huge[0]}; the most is {MOST_SIZE}.")
        return results

    def _stand_in(self, value: ir.Value) -> Value:
        """Keeps `check` going behind a node that failed: a value of the type that the model declares or infers."""
        if value.dtype is None or value.shape is None or not isinstance(value.type, ir.TensorType):
            self._unknown.add(value.name or "")
        dtype = dtype_name(value.dtype) if value.dtype is not None else "float32"
        dims = value.shape if value.shape is not None else ()
        shape = tuple(d if isinstance(d, int) else self.symbols.fresh(value.name or "n") for d in dims)
        return Value(dtype, shape, relax.Var(value.name or "unknown", tensor_type(dtype, shape)))

    def _without_lowering(
        self, context: Node, node: ir.Node, version: int, inputs: list[Value | None]
    ) -> list[Value | None]:
        """Lowers an operator that is not registered, by its ONNX function body."""
        body = function_body(node, version, inputs)
        if body is None:
            raise context.error(
                "no lowering is registered for this operator, and it has no ONNX function body.",
                "See docs/operators.md for what is supported, docs/adding_an_operator.md to add it.",
            )
        outer = self._values, self._opsets, self.errors, self._declared_opset
        self._declared_opset = None
        self._values = {v.name or "": given for v, given in zip(body.inputs, inputs)}
        self._opsets = {_domain(domain): version for domain, version in body.opset_imports.items()}
        self.errors = None
        try:
            self.lower_nodes(list(body), body.outputs)
            return [self._values.get(v.name or "") for v in body.outputs[: len(node.outputs)]]
        except NodeError as error:
            raise context.error(f"its ONNX function body cannot be lowered: {error}") from error
        finally:
            self._values, self._opsets, self.errors, self._declared_opset = outer


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
