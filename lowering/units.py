"""Numbers with units, as text."""

from __future__ import annotations


def format_size(count: float) -> str:
    """Return a number of bytes as text."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count:g} B"


def format_time(seconds: float) -> str:
    """Return a duration as text: three digits, or more of seconds."""
    larger = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, factor = next(((unit, factor) for unit, factor in larger if seconds >= 0.9995 * factor), ("ns", 1e-9))
    count = seconds / factor
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"


def format_rate(per_second: float, what: str) -> str:
    """Return operations ("FLOP") or bytes ("B") per second as text."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {unit}{what}/s"
    return f"{per_second:.3g} {what}/s"
