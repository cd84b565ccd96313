"""Cache layouts: the axes of a buffer, and which slot of a cache stores which key."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

Axes = str
"""The axes of a buffer, slowest first: b batch, h head, t query row or slot of a key, d element of a row of a head, e
all elements of all heads of a row, p page, l layer, c 0 for keys and 1 for values.

"bhtd" and "bte" are the 4-D and the 3-D form of ONNX. Query rows without b are ragged: the batches are concatenated.
"""


@dataclass(frozen=True)
class Whole:
    """Slot s of batch b is slot s of row b of the buffer."""


@dataclass(frozen=True)
class Offset:
    """Slot s of batch b is slot slot_starts[b] + s of the buffer; slot_starts is an int64 [B] parameter."""


@dataclass(frozen=True)
class Pages:
    """Slot s of batch b is at offset s % size of the page in entry pages[b, s // size], an int64 [B, n] parameter.

    An entry is the number of a page, or the first slot of one. Numbered pages of size None have the length that the
    buffer gives, and each batch has one page: s // size is 0.

    With `apart` the table is [B, 2, n]: keys and values are in one buffer, in separate pages.
    """

    size: int | None
    entries: Literal["page", "slot"] = "page"
    apart: bool = False


@dataclass(frozen=True)
class Ring:
    """Key t has slot t among the first `sinks`, then first + (t - sinks) % capacity: new keys overwrite old ones.

    Such a cache stores the sinks and the last `capacity` keys before its length; a window must mask the others.
    """

    sinks: int
    first: int
    capacity: int


@dataclass(frozen=True)
class GivenRing:
    """A ring whose sinks, first slot and capacity are an int64 [3] parameter, `ring`."""


@dataclass(frozen=True)
class Beams:
    """Batch b is beam b % count of request b // count.

    Key t is that of beam 0 if t < prompts[request], else of beam beam_of[request, b % count, t]. The int64 parameters
    are prompts [B / count] and beam_of [B / count, count, n].
    """

    count: int


QuantizedType: TypeAlias = Literal["int8", "float8_e4m3fn", "int4"]


@dataclass(frozen=True)
class KvQuantization:
    """Elements are stored in the type `dtype` and represent stored value * scale.

    group is the number of neighbors in a row of a head that share a scale. Scales are then a buffer like that of the
    cache, with D / group elements in a row, and the scaled element is rounded to scale_dtype. With group 0 there is one
    scale for all keys and one for all values. With channels there is a [heads, D] buffer for all keys and one for all
    values ([2, heads, D] if they are in one buffer).

    Two neighbors of int4 share a byte, the first in its low bits; each is stored plus 8.
    """

    dtype: QuantizedType
    group: int
    scale_dtype: str = "float32"
    channels: bool = False

    def __post_init__(self) -> None:
        if self.group and (self.channels or self.dtype == "int4"):
            raise ValueError("scales of groups need 8-bit quantized values, and exclude scales of channels")

    @property
    def storage_dtype(self) -> str:
        """The element type of buffers; float8 and int4 are stored as raw bits."""
        return "int8" if self.dtype == "int8" else "uint8"

    @property
    def packing(self) -> int:
        """How many quantized values share an element of the buffer."""
        return 2 if self.dtype == "int4" else 1

    @property
    def has_rounded_scaling(self) -> bool:
        """Whether the scaled element has less precision than the arithmetic."""
        return self.group > 0 and self.scale_dtype == "float16"


@dataclass(frozen=True)
class CacheLayout:
    """Keys and values: in buffers k and v, or in one, kv, with an axis c. layer is the index on an axis l."""

    axes: Axes = "bhtd"
    slots: Whole | Offset | Pages = Whole()
    ring: Ring | GivenRing | None = None
    beams: Beams | None = None
    quantization: KvQuantization | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        slot_axes = {Whole: "b", Offset: "", Pages: "p" if getattr(self.slots, "entries", "") == "page" else ""}
        expected_axes = {"t", *slot_axes[type(self.slots)], *("e" if "e" in self.axes else "hd")}
        if {*self.axes} - {*"lc"} != expected_axes or len({*self.axes}) < len(self.axes) or self.axes[-1] not in "de":
            raise ValueError(f"a cache of {self.slots} cannot have the axes '{self.axes}'")
        if isinstance(self.slots, Pages) and self.slots.apart and "c" in self.axes:
            raise ValueError("separate pages of keys and values exclude an axis c")
        if isinstance(self.slots, Pages) and self.slots.size is None and self.slots.entries != "page":
            raise ValueError("pages that are addressed by their first slot need a size")

    @property
    def packing(self) -> int:
        """How many elements of keys and values share one element of the buffer."""
        return 1 if self.quantization is None else self.quantization.packing

    @property
    def is_joint(self) -> bool:
        """Whether keys and values are in one buffer."""
        return "c" in self.axes or (isinstance(self.slots, Pages) and self.slots.apart)

    @property
    def is_mapped(self) -> bool:
        """Whether the shape of the buffer does not give the maximum number of keys of a batch."""
        return self.ring is not None or not isinstance(self.slots, Whole)

    @property
    def has_lookup(self) -> bool:
        """Whether finding a key takes tables or a ring."""
        return self.is_mapped or self.beams is not None

    @property
    def run(self) -> int | None:
        """How many keys have consecutive slots, counted from each multiple of it; None for all keys of a batch."""
        if self.ring is not None or self.beams is not None:
            return 1
        return self.slots.size if isinstance(self.slots, Pages) else None

    def tables(self) -> tuple[str, ...]:
        """Return the names of the kernel's parameters that locate slots."""
        slots = {Whole: (), Offset: ("slot_starts",), Pages: ("pages",)}[type(self.slots)]
        ring = ("ring",) if isinstance(self.ring, GivenRing) else ()
        return (*slots, *ring, *(("prompts", "beam_of") if self.beams is not None else ()))

    def to_data(self) -> dict[str, Any]:
        """Return data that JSON can represent, without default values."""
        data: dict[str, Any] = {"axes": self.axes, "layer": self.layer}
        for name, kinds in _RECORD_FIELDS.items():
            value = getattr(self, name)
            if type(value) in kinds and value != Whole():
                data[name] = {"kind": type(value).__name__} | {f.name: getattr(value, f.name) for f in fields(value)}
        return data

    @staticmethod
    def from_data(data: dict[str, Any]) -> CacheLayout:
        fields_data = dict(data)
        for name, kinds in _RECORD_FIELDS.items():
            if name in fields_data:
                values = dict(fields_data[name])
                fields_data[name] = {kind.__name__: kind for kind in kinds}[values.pop("kind")](**values)
        return CacheLayout(**fields_data)


DENSE = CacheLayout()

_RECORD_FIELDS: dict[str, tuple[type, ...]] = {
    "slots": (Whole, Offset, Pages),
    "ring": (Ring, GivenRing),
    "beams": (Beams,),
    "quantization": (KvQuantization,),
}
