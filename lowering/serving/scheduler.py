"""Which tokens of which requests the next call reads, and what each request has of the pools for that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..manifest import ServedCache
from .blocks import PoolFullError
from .pools import Pools, names_of
from .source_pool import Source

_T = TypeVar("_T")


@dataclass(eq=False)
class Request:
    """All tokens, of which `read` are in cache and states, and what it has a source of.

    admitted: the cache knows it. answered: the number of tokens behind which it had its last answer, 0 before the first
    one. slot is that of its states, while it is admitted.
    """

    name: Hashable
    tokens: list[Any]
    source: Source | None = None
    read: int = 0
    admitted: bool = False
    answered: int = 0
    slot: int | None = None

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return len(self.tokens) - self.read

    @property
    def waits(self) -> bool:
        """Whether there is something to answer to: one that was put back behind its answer waits for more tokens."""
        return len(self.tokens) > self.answered


@dataclass
class _Plan:
    """How many tokens of which requests a call reads, and how many rows the sources have whose setup has run for it."""

    counts: dict[Request, int] = field(default_factory=dict)
    rows: int = 0


class Scheduler:
    """Requests in the order in which they came, and the pools that they have parts of.

    Prompts wait for their turn: oldest first, so many tokens in a call. Where a pool runs out, the youngest requests
    give up theirs, if that makes enough room for an older one.
    """

    def __init__(self, served: ServedCache, pools: Pools, budget: int, gpu: Any, can_share: bool) -> None:
        """budget is the largest number of tokens of a call, can_share whether tokens tell all that the cache holds."""
        self.requests: dict[Hashable, Request] = {}
        self.failed: dict[Hashable, Exception] = {}  # what no step has raised yet
        self._served, self._pools, self._budget, self._gpu, self._can_share = served, pools, budget, gpu, can_share
        self._paged = names_of(served.pools)
        self._source_arrays = [] if served.sources is None else names_of(served.sources.pools)

    def plan(self, only: Request | None = None) -> dict[Request, int]:
        """Return how many tokens of which requests the call reads, for which there is room now; of one if it is given.

        Raises PoolFullError where there is none for any.
        """
        plan = _Plan()
        full: PoolFullError | None = None
        room = self._budget
        ready = [ours for ours in self.requests.values() if ours.waits and only in (None, ours)]
        for ours in sorted(ready, key=lambda ours: not ours.answered):  # who has begun goes first
            if not room:
                break
            try:
                # not before its turn: until then others may write what it can share
                if not (ours.admitted or self._admit(ours, plan)):
                    continue
                count = min(ours.left, room)
                self._reserve(ours, count, plan)
            except PoolFullError as error:
                full = full or error
            else:
                plan.counts[ours] = count
                room -= count
        if full is not None and not plan.counts and not self.failed:
            raise full
        return plan.counts

    def _admit(self, ours: Request, plan: _Plan) -> bool:
        """Give a request its source, a slot of states, and the blocks that it shares, unless it cannot begin now."""
        if not self._has_source(ours, plan):
            return False
        if self._served.states:
            holders = [o for o in self._younger(ours, plan) if o.slot is not None]
            self._with_room(lambda: self._take_slot(ours), lambda: holders[-1:], self.drop)
        if self._pools.cache is not None:
            ours.read = self._pools.cache.add(ours.name, ours.tokens if self._can_share else None)
        ours.admitted = True
        return True

    def _has_source(self, ours: Request, plan: _Plan) -> bool:
        """Whether the pools hold a request's source, for which the setup runs if its turn has come.

        A request on whose source the setup fails is freed.
        """
        pool, source = self._pools.sources, ours.source
        if pool is None or source is None or source in pool:
            return True
        if plan.counts and plan.rows and plan.rows + source.rows > self._budget:
            return False
        stores = {name: self._pools.stores[name] for name in self._source_arrays}
        try:
            self._with_room(
                lambda: pool.put(source, ours.name, stores),
                lambda: pool.fewest(source, self._sources_of_younger(ours, plan)),
                self._evict,
            )
        except PoolFullError:
            raise
        except Exception as error:
            self.fail(ours, error)
        plan.rows += source.rows
        return ours.name in self.requests

    def _take_slot(self, ours: Request) -> None:
        if not self._pools.slots.free:
            raise PoolFullError(f"request {ours.name!r}", 1, 0, self._pools.slots.total, "state slot")
        ours.slot = self._pools.slots.take()

    def _reserve(self, ours: Request, count: int, plan: _Plan) -> None:
        """Room for so many tokens of a request."""
        cache = self._pools.cache
        if cache is None:
            return
        copies = self._with_room(
            lambda: cache.reserve(ours.name, count),
            lambda: cache.fewest(ours.name, count, [o.name for o in self._younger(ours, plan) if o.admitted]),
            lambda name: self.drop(self.requests[name]),
        )
        for source, target in copies:
            for store in [self._pools.stores[name] for name in self._paged]:
                if self._gpu is not None:
                    self._gpu.copy_row(store, source, target)
                elif store is not cache.pool:  # which the cache has copied
                    store[target] = store[source]

    def _with_room(
        self, take: Callable[[], _T], fewest: Callable[[], list[Any] | None], give_up: Callable[[Any], None]
    ) -> _T:
        """Return what `take` gives where a pool has room, for which those that `fewest` says give up their own."""
        try:
            return take()
        except PoolFullError:
            chosen = fewest()
            if not chosen:
                raise
        for each in chosen:
            give_up(each)
        return take()

    def _younger(self, ours: Request, plan: _Plan) -> list[Request]:
        """The requests that may give something up for this one, the oldest first."""
        order = list(self.requests.values())
        return [other for other in order[order.index(ours) + 1 :] if other not in plan.counts]

    def _sources_of_younger(self, ours: Request, plan: _Plan) -> list[Source]:
        """The sources in the pools that nobody else reads, those of the oldest ones first."""
        younger = dict.fromkeys(self._younger(ours, plan))
        kept = {other.source for other in self.requests.values() if other not in younger}
        sources = dict.fromkeys(other.source for other in younger if other.source not in kept)
        return [
            source for source in sources if source is not None and self._pools.sources and source in self._pools.sources
        ]

    def _evict(self, source: Source) -> None:
        """Its blocks are free, and all who read it are put back."""
        for ours in self.requests.values():
            if ours.source is source:
                self.drop(ours)
        if self._pools.sources is not None:
            self._pools.sources.evict(source)

    def drop(self, ours: Request) -> None:
        """Its blocks and its slot are free, and all of its tokens to be read again."""
        if ours.admitted and self._pools.cache is not None:
            self._pools.cache.free(ours.name)
        if ours.slot is not None:
            self._pools.slots.release([ours.slot])
        ours.admitted, ours.read, ours.slot = False, 0, None

    def fail(self, ours: Request, error: Exception) -> None:
        """Free a request that ends by an error of its own."""
        self.failed[ours.name] = error
        self.free(ours)

    def free(self, ours: Request) -> None:
        """Forgets a request."""
        self.drop(ours)
        if self._pools.sources is not None and ours.source is not None:
            self._pools.sources.release(ours.source)
        del self.requests[ours.name]
