"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count:g} B"


def time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def rate(per_second: float, what: str) -> str:
    """Operations ("FLOP") or bytes ("B") per second."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {unit}{what}/s"
    return f"{per_second:.3g} {what}/s"
