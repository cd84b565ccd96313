"""The record of a fusion: stages over the caller's tensors that become one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from schedules.reading.epilogues import EPILOGUES, EpilogueSpec, EpilogueUpdate, FusedEpilogue, to_json
from schedules.reading.matmul import MATMULS, read_matmul
from schedules.reading.row_segments import SEGMENTS
from schedules.reading.stages import Stage, write_stages

from ...tensorir.expressions import Expr, loads, walk
from ...tensorir.scatter import emit_update


@dataclass(frozen=True, eq=False)
class FusionGroup:
    """Stages that become one function, over tensors and symbols of the caller.

    Attributes:
        name: The name of the function.
        segments: The stages, by row segment (schedules/reading/row_segments.py).
        outputs: The new results of the call.
        nodes: The ONNX nodes that it computes.
        matmul_mode: How float32 matmuls are computed (MATMULS), "" by default.
        epilogues: The fused epilogues, whose updates of caches follow the stages.
        updated: The results that are caches updated in place, in the order of the updates.
        binding: The unchanged binding that the group was read from, if any.
    """

    name: str
    segments: tuple[Sequence[Stage], ...]
    outputs: Sequence[tirx.Buffer]
    nodes: tuple[str, ...]
    matmul_mode: str = ""
    epilogues: tuple[FusedEpilogue, ...] = ()
    updated: tuple[tirx.Buffer, ...] = ()
    binding: relax.Binding | None = None

    @property
    def stages(self) -> list[Stage]:
        return [stage for segment in self.segments for stage in segment]

    @property
    def updates(self) -> list[EpilogueUpdate]:
        return [epilogue.update for epilogue in self.epilogues if epilogue.update is not None]

    def list_inputs(self) -> list[tirx.Buffer]:
        computed = {stage.output for stage in self.stages}
        read = [node.source for stage in self.stages for node in loads(stage.value)]
        read += [buffer for update in self.updates for buffer in update.inputs()]
        return [buffer for buffer in dict.fromkeys(read) if buffer not in computed]

    def build_function(self) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
        """Return the function, and its arguments before outputs: tensors, and integers that are not sizes of these."""
        tensors = [*self.list_inputs(), *self.outputs]
        bound = {extent for buffer in tensors for extent in buffer.shape}
        bound |= {axis.var for stage in self.stages for axis in (*stage.axes, *stage.reduce)}
        used = [*(extent for buffer in tensors for extent in buffer.shape), *self._list_expressions()]
        free = (node for expr in used for node in walk(expr) if isinstance(node, tirx.Var) and node not in bound)
        lengths = (update.length_parameter for update in self.updates if update.length_parameter is not None)
        arguments = [*self.list_inputs(), *dict.fromkeys((*free, *lengths))]
        func = write_stages(self.stages, [*arguments, *self.outputs], self._write_updates)
        if self.matmul_mode and any(map(read_matmul, self.stages)):
            func = func.with_attr(MATMULS, self.matmul_mode)
        if len(self.segments) > 1 or self.epilogues:
            func = func.with_attr(SEGMENTS, [len(segment) for segment in self.segments])
        if self.epilogues:
            func = func.with_attr(EPILOGUES, to_json([*self._describe_epilogues([*arguments, *self.outputs])]))
        return func, arguments

    def _write_updates(self, to_parameter: Callable[[tirx.Var], tirx.Var]) -> None:
        for update in self.updates:
            optional = (update.indices, update.length_parameter)
            indices, length = (None if x is None else to_parameter(x) for x in optional)
            rows, cache = to_parameter(update.rows), to_parameter(update.cache)
            emit_update(EpilogueUpdate(update.record, rows, cache, indices, length).bound())

    def _list_expressions(self) -> Iterator[Expr]:
        for stage in self.stages:
            yield from (*(axis.extent for axis in (*stage.axes, *stage.reduce)), *stage.output.shape, stage.value)

    def _describe_epilogues(self, parameters: Sequence[tirx.Var]) -> Iterator[EpilogueSpec]:
        numbers: dict[tirx.Var | None, int] = {param: k for k, param in enumerate(parameters)}
        for epilogue in self.epilogues:
            spec = EpilogueSpec(numbers.get(epilogue.rows, -1), bool(epilogue.stages))
            if (update := epilogue.update) is not None:
                accesses = update.cache, update.indices, update.length_parameter
                cache, indices, length = (numbers.get(parameter, -1) for parameter in accesses)
                record = update.record.to_json()
                spec = replace(spec, update=record, cache=cache, indices=indices, length=length)
            yield spec


def concatenate_groups(groups: Sequence[FusionGroup], outputs: Sequence[tirx.Buffer] | None = None) -> FusionGroup:
    """Return groups as one, computed in order; its outputs are those of all groups by default."""
    return FusionGroup(
        "_".join(group.name for group in groups if group.name),
        tuple(segment for group in groups for segment in group.segments),
        [output for group in groups for output in group.outputs] if outputs is None else outputs,
        tuple(dict.fromkeys(node for group in groups for node in group.nodes)),
        next((group.matmul_mode for group in groups if group.matmul_mode), ""),
        tuple(epilogue for group in groups for epilogue in group.epilogues),
        tuple(buffer for group in groups for buffer in group.updated),
    )
