"""How rows lie in memory: the axes of a buffer, and which slot of a cache holds which key."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

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
    the number of a page, or the first slot of one.

    With `apart` the table is [B, 2, n]: keys and values have entries of their own.
    """

    size: int
    entries: Literal["page", "slot"] = "page"
    apart: bool = False


@dataclass(frozen=True)
class Ring:
    """Key t has slot t among the first `sinks`, then first + (t - sinks) % capacity: new keys take the place of old.

    Such a store holds the sinks and the last `capacity` keys before its length; a window must hide the others.
    """

    sinks: int
    first: int
    capacity: int


@dataclass(frozen=True)
class Beams:
    """Batch b is beam b % count of request b // count. Key t is that of beam 0 where t < prompts[request], else of beam
    beam_of[request, b % count, t]; int64 parameters [B / count] and [B / count, count, n]."""

    count: int


@dataclass(frozen=True)
class Codec:
    """Elements are stored in the type `dtype` and mean dtype * scale.

    group says how many neighbours in a row of a head share a scale: then scales are a buffer like the store's own, of
    D / group elements in a row. 0: one scale for all keys, and one for all values.
    """

    dtype: Literal["int8", "float8_e4m3fn"]
    group: int
    scale_dtype: str = "float32"


@dataclass(frozen=True)
class Store:
    """Keys and values: in buffers k and v, or in one, kv, with an axis c. layer is the index on an axis l."""

    axes: Axes = "bhtd"
    slots: Whole | Offset | Pages = Whole()
    ring: Ring | None = None
    beams: Beams | None = None
    codec: Codec | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        where = {Whole: "b", Offset: "", Pages: "p" if getattr(self.slots, "entries", "") == "page" else ""}
        wanted = {"t", *where[type(self.slots)], *("e" if "e" in self.axes else "hd")}
        if {*self.axes} - {*"lc"} != wanted or len({*self.axes}) < len(self.axes) or self.axes[-1] not in "de":
            raise ValueError(f"a store of {self.slots} cannot have the axes '{self.axes}'")

    @property
    def joint(self) -> bool:
        """Whether keys and values are in one buffer."""
        return "c" in self.axes

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
        return (*slots, *(("prompts", "beam_of") if self.beams is not None else ()))

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold; what is nothing special is left out."""
        data: dict[str, Any] = {"axes": self.axes, "layer": self.layer}
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if type(part) in kind and part != Whole():
                data[name] = {"kind": type(part).__name__} | {f.name: getattr(part, f.name) for f in fields(part)}
        return data

    @staticmethod
    def from_data(data: dict[str, Any]) -> Store:
        given = dict(data)
        for name, kinds in _PARTS.items():
            if name in given:
                values = dict(given[name])
                given[name] = {kind.__name__: kind for kind in kinds}[values.pop("kind")](**values)
        return Store(**given)


DENSE = Store()

_PARTS: dict[str, tuple[type, ...]] = {
    "slots": (Whole, Offset, Pages),
    "ring": (Ring,),
    "beams": (Beams,),
    "codec": (Codec,),
}
