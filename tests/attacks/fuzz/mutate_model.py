"""Mutations of ONNX models that stay protobufs: fields set, cleared, repeated, exchanged, at any depth."""

from __future__ import annotations

import random
from typing import Any

import onnx

_SIZES = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1)
_FLOATS = (0.0, -1.0, 0.5, 1e38, float("nan"), float("inf"))
_TEXTS = ("", "x0", "y0", "Add", "Reshape", "Loop", "ai.onnx", "com.microsoft", "N", "\n", "a'b", "\0", "x" * 300, "ö")

Slot = tuple[Any, Any]  # a message and one of its fields


def mutated(data: bytes, rng: random.Random, limit: int) -> bytes | None:
    """Return a model like that in `data`, of at most `limit` bytes; None if `data` is not a model."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return None
    for _ in range(rng.choice((1, 1, 2, 4))):
        slots = _list_slots(model)
        _mutate(*rng.choice(slots), rng, slots)
    result = model.SerializePartialToString()
    return result if len(result) <= limit else None


def _list_slots(message: Any) -> list[Slot]:
    """List every field that is set, and some that are not, in the message and below."""
    slots: list[Slot] = [(message, f) for f in message.DESCRIPTOR.fields]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else [value]:
                slots += _list_slots(child)
    return slots


def _mutate(message: Any, field: Any, rng: random.Random, slots: list[Slot]) -> None:
    if rng.random() < 0.15:
        message.ClearField(field.name)
        return
    if field.message_type is not None:
        _mutate_messages(message, field, rng, slots)
    elif field.is_repeated:
        values = getattr(message, field.name)
        choice = rng.random()
        if values and choice < 0.3:
            del values[rng.randrange(len(values))]
        elif values and choice < 0.8:
            values[rng.randrange(len(values))] = _scalar(field, rng)
        else:
            values.append(_scalar(field, rng))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _mutate_messages(message: Any, field: Any, rng: random.Random, slots: list[Slot]) -> None:
    """Copy a message of the same type from elsewhere, exchange two, or take one out."""
    candidates = [
        candidate
        for owner, f in slots
        if f.message_type is field.message_type and owner.ByteSize()
        for candidate in (getattr(owner, f.name) if f.is_repeated else [getattr(owner, f.name)])
    ]
    if not field.is_repeated:
        if candidates:
            copy = type(candidates[0])()
            copy.CopyFrom(rng.choice(candidates))
            getattr(message, field.name).CopyFrom(copy)
        return
    values, choice = getattr(message, field.name), rng.random()
    if values and choice < 0.3:
        del values[rng.randrange(len(values))]
    elif len(values) > 1 and choice < 0.5:
        first, second = rng.sample(range(len(values)), 2)
        copy = type(values[first])()
        copy.CopyFrom(values[first])
        values[first].CopyFrom(values[second])
        values[second].CopyFrom(copy)
    elif candidates:
        copy = type(candidates[0])()
        copy.CopyFrom(rng.choice(candidates))
        values.add().CopyFrom(copy)
    else:
        values.add()


def _scalar(field: Any, rng: random.Random) -> Any:
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    number = rng.choice(_SIZES) if rng.random() < 0.7 else rng.randrange(30)
    bits, signed = (64 if "64" in _name(field) else 32), not _name(field).startswith("U")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return min(max(number, low), high)


def _name(field: Any) -> str:
    names = ("INT32", "INT64", "UINT32", "UINT64")
    return next(n for n in names if getattr(field, f"CPPTYPE_{n}") == field.cpp_type)
