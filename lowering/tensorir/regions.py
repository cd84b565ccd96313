"""Regions of buffers, which blocks say that they read and write."""

from __future__ import annotations

from tvm import tirx


def whole(buffer: tirx.Buffer) -> tirx.BufferRegion:
    """All of a buffer."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]
