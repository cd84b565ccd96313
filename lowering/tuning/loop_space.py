"""The space of loops: what MetaSchedule's own rules make of a function in blocks.

For functions that none of our kernels for attention and matmuls takes. What is searched is a schedule, with tiling,
vectors, threads and unrolling; a candidate's text is the hash of what came out.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from .choices import DEFAULT, annotate, annotated, without
from .context import Context, strategy
from .database import identity
from .task import MAIN

_ROOT = "root"
_STATIC = 48 << 10  # bytes of static shared memory that a block can have (CUDA C++ Programming Guide)
_READ = "GetSBlock"  # an instruction that changes nothing


class LoopSpace:
    """The schedules of a task's `main`."""

    kind = "loops"
    default = DEFAULT

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target, threads: int) -> None:
        self._module, self._kind = module, target.kind.name
        # By the number of cores MetaSchedule says how many tasks loops are cut into; its shared memory is static.
        known = {"num-cores": threads} if self._kind == "llvm" else {"max_shared_memory_per_block": _STATIC}
        self.target = tvm.target.Target({**target.export(), **known})

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to choose: MetaSchedule's rules do nothing to the function, or cannot read it."""
        context = Context(self._module, self.target, self.generator(), strategy(), "", 1)
        try:
            designs = context.generate_design_space()
        except Exception:  # TVM raises what it likes
            return True
        return all(inst.kind.name == _READ for design in designs for inst in design.trace.insts)

    def generator(self) -> ms.space_generator.PostOrderApply:
        kind = self._kind
        # Rules that operators name themselves are not in the package, and TVM warns of each.
        rules = [
            rule
            for rule in ms.schedule_rule.ScheduleRule.create(kind)
            if not isinstance(rule, ms.schedule_rule.ApplyCustomRule)
        ]
        postprocs = [*ms.postproc.Postproc.create(kind), _Name()]
        return ms.space_generator.PostOrderApply(
            sch_rules=rules, postprocs=postprocs, mutator_probs=ms.mutator.Mutator.create(kind)
        )

    def default_trace(self, module: tvm.IRModule) -> Trace:
        schedule = Schedule(module)
        schedule.enter_postproc()
        annotate(schedule, _ROOT, DEFAULT)
        return schedule.trace


def code(module: tvm.IRModule) -> tirx.PrimFunc | None:
    """The function of a candidate; None for the default, which no schedule has made."""
    if annotated(module) in (None, DEFAULT):
        return None
    return without(Schedule(module), _ROOT)[MAIN]


@derived_object
class _Name(ms.postproc.PyPostproc):
    """Names a schedule by what came out, so that equal ones are one candidate."""

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        annotate(schedule, _ROOT, identity(schedule.mod))
        return True

    def clone(self) -> _Name:
        return _Name()
