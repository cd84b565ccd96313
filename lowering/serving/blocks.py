"""Blocks of a pool by number: which of them are free, and how many owners each of the others has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import InputError


class PoolFullError(InputError):
    """Fewer blocks are free than are needed: `needed`, of which there are `free`, of `total`. Nothing has changed.

    unit is "block", or "state slot" or "source block" where these are what is missing.
    """

    def __init__(self, who: str, needed: int, free: int, total: int, unit: str = "block") -> None:
        self.needed, self.free, self.total, self.unit = needed, free, total, unit
        remedy = "free or truncate other requests and try again" if needed <= total else "reserve less"
        super().__init__(
            f"{who} needs {needed} more {unit}{'s' * (needed != 1)}, and {free} of the pool's {total} are free: "
            f"{remedy}, or make a pool of more {unit}s."
        )


class Blocks:
    """Blocks 0 to total - 1. An owner takes a free block, others share it, and the last one to release it frees it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.shared = 0  # blocks with several owners
        self._owners = [0] * total
        self._free = list(reversed(range(total)))  # a stack: what was freed last is used next, while it is in caches

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, block: int) -> int:
        """How many owners a block has; 0 for a free one."""
        return self._owners[block]

    def fewest(self, owners: Sequence[Sequence[int]], needed: int, copied: int | None = None) -> list[int] | None:
        """Return the numbers of those of `owners`, each with the blocks of one, that must release them.

        Then `needed` blocks are free, and one more where somebody else still shares the block `copied`. The first of
        the owners are spared where that is possible, and whoever would free nothing is. None if all are too few.
        """
        left = Counter({block: self._owners[block] for blocks in owners for block in blocks})
        for blocks in owners:
            left.subtract(blocks)
        free = len(self._free) + sum(not count for count in left.values())

        def lacks() -> bool:
            sharers = 0 if copied is None else left.get(copied, self._owners[copied])
            return free < needed + (sharers > 1)

        if lacks():
            return None
        chosen = []
        for number, blocks in enumerate(owners):
            kept = sum(not left[block] for block in blocks)
            free -= kept
            left.update(blocks)
            if lacks():
                chosen.append(number)
                free += kept
                left.subtract(blocks)
        return chosen

    def take(self) -> int:
        """A free block, which has one owner now. Who takes several asks `free` first."""
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these blocks, none of which is free."""
        for block in blocks:
            self._owners[block] += 1
            self.shared += self._owners[block] == 2

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each of these blocks."""
        for block in blocks:
            self._owners[block] -= 1
            self.shared -= self._owners[block] == 1
            if not self._owners[block]:
                self._free.append(block)
