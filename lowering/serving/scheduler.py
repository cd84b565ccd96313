"""Scheduling of served requests: the tokens that the next call reads, and the pool resources for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..manifest import ServedCache
from .blocks import PoolFullError
from .pools import ServingPools, list_pool_inputs
from .source_pool import RequestSource

_T = TypeVar("_T")


@dataclass(eq=False)
class ScheduledRequest:
    """A request: its tokens, of which `read` are in cache and states, and its source.

    is_admitted: the cache has it. answered: the number of its tokens at its last output, 0 before the first one. slot
    is that of its states, while it is admitted.
    """

    name: Hashable
    tokens: list[Any]
    source: RequestSource | None = None
    read: int = 0
    is_admitted: bool = False
    answered: int = 0
    slot: int | None = None

    @property
    def remaining(self) -> int:
        """Number of tokens that are not read yet."""
        return len(self.tokens) - self.read

    @property
    def is_waiting(self) -> bool:
        """Whether a further output is due. A request preempted after its last output waits for a new token."""
        return len(self.tokens) > self.answered


@dataclass
class _CallPlan:
    """The number of tokens that a call reads of each request, and the rows of sources that were set up for it."""

    counts: dict[ScheduledRequest, int] = field(default_factory=dict)
    rows: int = 0


class RequestScheduler:
    """Requests in the order of arrival, and the pools that they share.

    Prompts are scheduled oldest first, up to a number of tokens in a call. If a pool runs out, the youngest requests
    are preempted, if that makes enough room for an older one.
    """

    def __init__(self, served: ServedCache, pools: ServingPools, token_budget: int, gpu: Any, can_share: bool) -> None:
        """Set the limits. token_budget is the largest number of tokens of a call.

        can_share says whether tokens determine the contents of the cache.
        """
        self.requests: dict[Hashable, ScheduledRequest] = {}
        self.failed: dict[Hashable, Exception] = {}  # not yet raised by a step
        self._served, self._pools, self._token_budget, self._gpu, self._can_share = (
            served,
            pools,
            token_budget,
            gpu,
            can_share,
        )
        self._paged_inputs = list_pool_inputs(served.pools)
        self._source_inputs = [] if served.sources is None else list_pool_inputs(served.sources.pools)

    def plan(self, only_request: ScheduledRequest | None = None) -> dict[ScheduledRequest, int]:
        """Return the number of tokens to read of each request, after reserving room for them.

        With `only_request`, plan only that one. Raises PoolFullError without room for any.
        """
        plan = _CallPlan()
        pool_error: PoolFullError | None = None
        token_room = self._token_budget
        waiting = [
            candidate
            for candidate in self.requests.values()
            if candidate.is_waiting and only_request in (None, candidate)
        ]
        for candidate in sorted(waiting, key=lambda candidate: not candidate.answered):  # running requests come first
            if not token_room:
                break
            try:
                # admit late: until then others may write blocks that it can share
                if not (candidate.is_admitted or self._admit(candidate, plan)):
                    continue
                count = min(candidate.remaining, token_room)
                self._reserve(candidate, count, plan)
            except PoolFullError as error:
                pool_error = pool_error or error
            else:
                plan.counts[candidate] = count
                token_room -= count
        if pool_error is not None and not plan.counts and not self.failed:
            raise pool_error
        return plan.counts

    def _admit(self, request: ScheduledRequest, plan: _CallPlan) -> bool:
        """Assign a request its source, a slot of states, and shared blocks. Return False if it must wait."""
        if not self._ensure_source(request, plan):
            return False
        if self._served.states:
            holders = [other for other in self._list_younger(request, plan) if other.slot is not None]
            self._make_room(lambda: self._take_slot(request), lambda: holders[-1:], self.drop)
        if self._pools.cache is not None:
            request.read = self._pools.cache.add(request.name, request.tokens if self._can_share else None)
        request.is_admitted = True
        return True

    def _ensure_source(self, request: ScheduledRequest, plan: _CallPlan) -> bool:
        """Return whether the pools have a request's source, after running the setup if it fits the budget.

        If the setup fails on the source of a request, that request is freed.
        """
        pool, source = self._pools.sources, request.source
        if pool is None or source is None or source in pool:
            return True
        if plan.counts and plan.rows and plan.rows + source.rows > self._token_budget:
            return False
        arrays = {name: self._pools.arrays[name] for name in self._source_inputs}
        try:
            self._make_room(
                lambda: pool.compute(source, request.name, arrays),
                lambda: pool.choose_evictions(source, self._list_younger_sources(request, plan)),
                self._evict,
            )
        except PoolFullError:
            raise
        except Exception as error:
            self.fail(request, error)
        plan.rows += source.rows
        return request.name in self.requests

    def _take_slot(self, request: ScheduledRequest) -> None:
        if not self._pools.slots.free:
            raise PoolFullError(
                "batcher.state_slots_exhausted",
                f"request {request.name!r}",
                1,
                0,
                self._pools.slots.total,
                "state slot",
            )
        request.slot = self._pools.slots.take()

    def _reserve(self, request: ScheduledRequest, count: int, plan: _CallPlan) -> None:
        """Reserve room for so many tokens of a request."""
        cache = self._pools.cache
        if cache is None:
            return
        copies = self._make_room(
            lambda: cache.reserve(request.name, count),
            lambda: cache.fewest(
                request.name, count, [other.name for other in self._list_younger(request, plan) if other.is_admitted]
            ),
            lambda name: self.drop(self.requests[name]),
        )
        for source, target in copies:
            for array in [self._pools.arrays[name] for name in self._paged_inputs]:
                if self._gpu is not None:
                    self._gpu.copy_row(array, source, target)
                elif array is not cache.pool:  # the cache has copied its own pool
                    array[target] = array[source]

    def _make_room(
        self, take: Callable[[], _T], choose: Callable[[], list[Any] | None], evict: Callable[[Any], None]
    ) -> _T:
        """Return the result of `take`. If the pool is full, first evict the owners that `choose` returns."""
        try:
            return take()
        except PoolFullError:
            chosen = choose()
            if not chosen:
                raise
        for owner in chosen:
            evict(owner)
        return take()

    def _list_younger(self, request: ScheduledRequest, plan: _CallPlan) -> list[ScheduledRequest]:
        """Return the requests that may be preempted for this one, the oldest first."""
        order = list(self.requests.values())
        return [other for other in order[order.index(request) + 1 :] if other not in plan.counts]

    def _list_younger_sources(self, request: ScheduledRequest, plan: _CallPlan) -> list[RequestSource]:
        """Return the pooled sources that only younger requests read, those of the oldest ones first."""
        younger = dict.fromkeys(self._list_younger(request, plan))
        shared_sources = {other.source for other in self.requests.values() if other not in younger}
        sources = dict.fromkeys(other.source for other in younger if other.source not in shared_sources)
        return [
            source for source in sources if source is not None and self._pools.sources and source in self._pools.sources
        ]

    def _evict(self, source: RequestSource) -> None:
        """Free the blocks of a source, and preempt all requests that read it."""
        for request in self.requests.values():
            if request.source is source:
                self.drop(request)
        if self._pools.sources is not None:
            self._pools.sources.evict(source)

    def drop(self, request: ScheduledRequest) -> None:
        """Preempt a request: free its blocks and its slot, so that all of its tokens are read again."""
        if request.is_admitted and self._pools.cache is not None:
            self._pools.cache.free(request.name)
        if request.slot is not None:
            self._pools.slots.release([request.slot])
        request.is_admitted, request.read, request.slot = False, 0, None

    def fail(self, request: ScheduledRequest, error: Exception) -> None:
        """Free a request that ends with an error of its own."""
        self.failed[request.name] = error
        self.free(request)

    def free(self, request: ScheduledRequest) -> None:
        """Remove a request."""
        self.drop(request)
        if self._pools.sources is not None and request.source is not None:
            self._pools.sources.release(request.source)
        del self.requests[request.name]
