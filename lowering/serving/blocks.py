"""Pool of numbered blocks with reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import InputError


class PoolFullError(InputError):
    """Fewer blocks are free than needed: `needed` of `total`, of which `free` are free. Nothing has changed.

    unit is "block", "state slot" or "source block".
    """

    def __init__(self, code: str, requester: str, needed: int, free: int, total: int, unit: str = "block") -> None:
        self.needed, self.free, self.total, self.unit = needed, free, total, unit
        remedy = "free or truncate other requests and try again" if needed <= total else "reserve less"
        super().__init__(
            code,
            f"{requester} needs {needed} more {unit}{'s' * (needed != 1)}, and {free} of the pool's {total} are free: "
            f"{remedy}, or make a pool of more {unit}s.",
        )


class BlockPool:
    """Blocks 0 to total - 1. An owner takes a free block, others may share it, and the last release frees it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.shared = 0  # blocks with several owners
        self._owners = [0] * total
        self._free = list(reversed(range(total)))  # a stack: recently freed blocks are reused while in CPU caches

    @property
    def free(self) -> int:
        return len(self._free)

    def count_owners(self, block: int) -> int:
        """Return the number of owners of a block, 0 for a free one."""
        return self._owners[block]

    def choose_evictions(
        self, owner_blocks: Sequence[Sequence[int]], needed: int, copied: int | None = None
    ) -> list[int] | None:
        """Return the indices of the owners that must release their blocks, so that `needed` blocks are free.

        owner_blocks has the blocks of each candidate. One more block must be free if another owner still shares the
        block `copied`. The first candidates are spared if possible, and so are those whose release would free nothing.
        Returns None if releasing all of them is not enough.
        """
        remaining_owners = Counter({block: self._owners[block] for blocks in owner_blocks for block in blocks})
        for blocks in owner_blocks:
            remaining_owners.subtract(blocks)
        free = len(self._free) + sum(not count for count in remaining_owners.values())

        def is_short() -> bool:
            owner_count = 0 if copied is None else remaining_owners.get(copied, self._owners[copied])
            return free < needed + (owner_count > 1)

        if is_short():
            return None
        chosen = []
        for index, blocks in enumerate(owner_blocks):
            freed = sum(not remaining_owners[block] for block in blocks)
            free -= freed
            remaining_owners.update(blocks)
            if is_short():
                chosen.append(index)
                free += freed
                remaining_owners.subtract(blocks)
        return chosen

    def take(self) -> int:
        """Take a free block, which then has one owner. To take several, check `free` first."""
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these blocks, none of which is free."""
        for block in blocks:
            self._owners[block] += 1
            self.shared += self._owners[block] == 2

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each of these blocks."""
        for block in blocks:
            self._owners[block] -= 1
            self.shared -= self._owners[block] == 1
            if not self._owners[block]:
                self._free.append(block)
