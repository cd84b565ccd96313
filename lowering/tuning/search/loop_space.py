"""The search space of loops: the schedules that MetaSchedule's own rules generate for a function in blocks.

It is for functions that no attention or matmul kernel of the compiler supports. A schedule determines tiling,
vectorization, threads and unrolling. The choice of a candidate is the hash of the scheduled function.
"""

from __future__ import annotations

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from ...tuning_records.candidate_choices import DEFAULT, ROOT, annotate_choice
from ...tuning_records.database import hash_task
from .context import TuningContext, create_search_strategy

_MAX_STATIC_SHARED = 48 << 10  # bytes of static shared memory of a thread block (CUDA C++ Programming Guide)
_READ_INSTRUCTION = "GetSBlock"  # an instruction without effect


class LoopSpace:
    """The schedules of a task's `main`."""

    kind = "loops"
    default = DEFAULT

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target, threads: int) -> None:
        self._module, self._kind = module, target.kind.name
        # From the number of cores MetaSchedule derives the number of parallel tasks of a loop. Its shared memory is
        # static.
        attributes = (
            {"num-cores": threads} if self._kind == "llvm" else {"max_shared_memory_per_block": _MAX_STATIC_SHARED}
        )
        self.target = tvm.target.Target({**target.export(), **attributes})

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to choose: MetaSchedule's rules do not change the function, or fail on it."""
        context = TuningContext(self._module, self.target, self.generator(), create_search_strategy(), "", 1)
        try:
            designs = context.generate_design_space()
        except Exception:  # TVM may raise any exception
            return True
        return all(inst.kind.name == _READ_INSTRUCTION for design in designs for inst in design.trace.insts)

    def generator(self) -> ms.space_generator.PostOrderApply:
        kind = self._kind
        # Rules that operators name themselves are not in the package, and TVM warns of each.
        rules = [
            rule
            for rule in ms.schedule_rule.ScheduleRule.create(kind)
            if not isinstance(rule, ms.schedule_rule.ApplyCustomRule)
        ]
        postprocs = [*ms.postproc.Postproc.create(kind), _HashAnnotator()]
        return ms.space_generator.PostOrderApply(
            sch_rules=rules, postprocs=postprocs, mutator_probs=ms.mutator.Mutator.create(kind)
        )

    def default_trace(self, module: tvm.IRModule) -> Trace:
        schedule = Schedule(module)
        schedule.enter_postproc()
        annotate_choice(schedule, ROOT, DEFAULT)
        return schedule.trace


@derived_object
class _HashAnnotator(ms.postproc.PyPostproc):
    """Annotates a schedule with the hash of its result, so that equal results are one candidate."""

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        annotate_choice(schedule, ROOT, hash_task(schedule.mod))
        return True

    def clone(self) -> _HashAnnotator:
        return _HashAnnotator()
