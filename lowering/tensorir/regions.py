"""Regions of buffers, which blocks declare as read and written."""

from __future__ import annotations

from tvm import tirx


def full_region(buffer: tirx.Buffer) -> tirx.BufferRegion:
    """Return the region of a whole buffer."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]
