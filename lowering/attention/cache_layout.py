"""How rows lie in memory: the axes of a buffer, and which slot of a cache holds which key."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

Axes = str
"""The axes of a buffer, slowest first: b batch, h head, t query row or slot of a key, d element of a row of a head, e
all elements of all heads of a row, p page, l layer, c 0 for keys and 1 for values.

"bhtd" and "bte" are the 4-D and the 3-D form of ONNX; query rows without b are packed, one batch behind the other.
"""


@dataclass(frozen=True)
class Whole:
    """Slot s of batch b is slot s of row b of the buffer."""


@dataclass(frozen=True)
class Offset:
    """Slot s of batch b is slot slot_starts[b] + s of the buffer; slot_starts is an int64 [B] parameter."""


@dataclass(frozen=True)
class Pages:
    """Slot s of batch b lies in entry pages[b, s // size] of an int64 [B, n] parameter, at place s % size: an entry is
    the number of a page, or the first slot of one. Numbered pages of size None are as long as the buffer says, and each
    batch has one: s // size is 0.

    With `apart` the table is [B, 2, n]: keys and values lie in one buffer, in pages of their own.
    """

    size: int | None
    entries: Literal["page", "slot"] = "page"
    apart: bool = False


@dataclass(frozen=True)
class Ring:
    """Key t has slot t among the first `sinks`, then first + (t - sinks) % capacity: new keys take the place of old.

    Such a cache holds the sinks and the last `capacity` keys before its length; a window must hide the others.
    """

    sinks: int
    first: int
    capacity: int


@dataclass(frozen=True)
class GivenRing:
    """A ring whose sinks, first slot and capacity are an int64 [3] parameter, `ring`."""


@dataclass(frozen=True)
class Beams:
    """Batch b is beam b % count of request b // count. Key t is that of beam 0 where t < prompts[request], else of beam
    beam_of[request, b % count, t]; int64 parameters [B / count] and [B / count, count, n]."""

    count: int


CodeType: TypeAlias = Literal["int8", "float8_e4m3fn", "int4"]


@dataclass(frozen=True)
class Codec:
    """Elements are stored in the type `dtype` and mean dtype * scale.

    group says how many neighbors in a row of a head share a scale: then scales are a buffer like the cache's own, of
    D / group elements in a row, and the product is one of scale_dtype, rounded to it. 0: one scale for all keys, and
    one for all values; or, with channels, a [heads, D] buffer for all keys and one for all values ([2, heads, D] where
    they are in one buffer).

    Of int4 two neighbors share a byte, the first in its low bits; each is stored plus 8.
    """

    dtype: CodeType
    group: int
    scale_dtype: str = "float32"
    channels: bool = False

    def __post_init__(self) -> None:
        if self.group and (self.channels or self.dtype == "int4"):
            raise ValueError("scales of groups go with codes of 8 bits, and without scales of channels")

    @property
    def stored(self) -> str:
        """The element type of buffers: of float8 and int4 their bits."""
        return "int8" if self.dtype == "int8" else "uint8"

    @property
    def packing(self) -> int:
        """How many codes share an element of the buffer."""
        return 2 if self.dtype == "int4" else 1

    @property
    def rounds(self) -> bool:
        """Whether the product has fewer digits than arithmetic has."""
        return self.group > 0 and self.scale_dtype == "float16"


@dataclass(frozen=True)
class CacheLayout:
    """Keys and values: in buffers k and v, or in one, kv, with an axis c. layer is the index on an axis l."""

    axes: Axes = "bhtd"
    slots: Whole | Offset | Pages = Whole()
    ring: Ring | GivenRing | None = None
    beams: Beams | None = None
    codec: Codec | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        where = {Whole: "b", Offset: "", Pages: "p" if getattr(self.slots, "entries", "") == "page" else ""}
        wanted = {"t", *where[type(self.slots)], *("e" if "e" in self.axes else "hd")}
        if {*self.axes} - {*"lc"} != wanted or len({*self.axes}) < len(self.axes) or self.axes[-1] not in "de":
            raise ValueError(f"a cache of {self.slots} cannot have the axes '{self.axes}'")
        if isinstance(self.slots, Pages) and self.slots.apart and "c" in self.axes:
            raise ValueError("pages apart tell keys and values from each other, as an axis c does")
        if isinstance(self.slots, Pages) and self.slots.size is None and self.slots.entries != "page":
            raise ValueError("pages by their first slot have a size")

    @property
    def packing(self) -> int:
        """How many elements of keys and values share one of the buffer."""
        return 1 if self.codec is None else self.codec.packing

    @property
    def joint(self) -> bool:
        """Whether keys and values are in one buffer."""
        return "c" in self.axes or (isinstance(self.slots, Pages) and self.slots.apart)

    @property
    def mapped(self) -> bool:
        """Whether the buffer does not tell how many keys a batch can have."""
        return self.ring is not None or not isinstance(self.slots, Whole)

    @property
    def looked_up(self) -> bool:
        """Whether it takes tables or a ring to find a key."""
        return self.mapped or self.beams is not None

    @property
    def run(self) -> int | None:
        """How many keys have consecutive slots, counted from each multiple of it; None for all keys of a batch."""
        if self.ring is not None or self.beams is not None:
            return 1
        return self.slots.size if isinstance(self.slots, Pages) else None

    def tables(self) -> tuple[str, ...]:
        """Names of the kernel's parameters that say where slots are."""
        slots = {Whole: (), Offset: ("slot_starts",), Pages: ("pages",)}[type(self.slots)]
        ring = ("ring",) if isinstance(self.ring, GivenRing) else ()
        return (*slots, *ring, *(("prompts", "beam_of") if self.beams is not None else ()))

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold; what is nothing special is left out."""
        data: dict[str, Any] = {"axes": self.axes, "layer": self.layer}
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if type(part) in kind and part != Whole():
                data[name] = {"kind": type(part).__name__} | {f.name: getattr(part, f.name) for f in fields(part)}
        return data

    @staticmethod
    def from_data(data: dict[str, Any]) -> CacheLayout:
        given = dict(data)
        for name, kinds in _PARTS.items():
            if name in given:
                values = dict(given[name])
                given[name] = {kind.__name__: kind for kind in kinds}[values.pop("kind")](**values)
        return CacheLayout(**given)


DENSE = CacheLayout()

_PARTS: dict[str, tuple[type, ...]] = {
    "slots": (Whole, Offset, Pages),
    "ring": (Ring, GivenRing),
    "beams": (Beams,),
    "codec": (Codec,),
}
