"""MetaSchedule's context of a task, and its search strategy."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logger, get_logging_func

from ...tuning_records.task import MAIN

_POPULATION = 48


class TuningContext(ms.TuneContext):
    """MetaSchedule's context without the intrinsics of all targets, whose import takes half a minute."""

    def __init__(  # replaces that of the base class
        self,
        module: tvm.IRModule,
        target: tvm.target.Target,
        generator: Any,
        strategy: Any,
        name: str,
        seed: int,
    ) -> None:
        log = get_logging_func(get_logger(__name__))
        self.__init_handle_by_constructor__(
            _ffi_api.TuneContext, module, target, generator, strategy, name, 1, seed, log
        )
        _ffi_api.TuneContextInitialize(self)


def create_search_strategy() -> ms.search_strategy.EvolutionarySearch:
    return ms.search_strategy.EvolutionarySearch(
        population_size=_POPULATION,
        init_measured_ratio=0.2,
        init_min_unmeasured=_POPULATION // 2,
        max_fail_count=8,
        genetic_num_iters=3,
        genetic_mutate_prob=0.85,
        genetic_max_fail_count=10,
        eps_greedy=0.1,
    )


def create_candidate(module: tvm.IRModule, trace: Trace) -> ms.MeasureCandidate:
    """Return the candidate that a trace produces from a task."""
    schedule = Schedule(module)
    trace.apply_to_schedule(schedule, remove_postproc=False)
    return ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_prim_func(module[MAIN]))
