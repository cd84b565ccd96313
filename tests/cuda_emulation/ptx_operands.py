"""Operands of PTX instructions, and the C++ that reads and writes them.

A scalar is a C++ expression, `_` a target that is not used, a tuple a vector, and an Address what stands in brackets.
"""

from dataclasses import dataclass

TYPES = {
    "pred": "bool", "f32": "float", "f64": "double",
    "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t",
}  # fmt: skip


@dataclass
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor map."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


Operand = str | Address | tuple[str, ...]  # a tuple is {a, b, c}


def declare_array(ctype: str, name: str, values: tuple[str, ...]) -> str:
    return f"{ctype} {name}[] = {{{', '.join(f'emu::as<{ctype}>({v})' for v in values)}}};"


def assign(target: Operand, value: str) -> str:
    return "" if target == "_" else f"{target} = emu::as<std::remove_reference_t<decltype({target})>>({value});"


def shared(operand: Operand) -> str:
    """Return the address as it stands: of shared memory it has 32 bits."""
    assert isinstance(operand, Address), operand
    return f"{operand.base} + {operand.offset}" if operand.offset else operand.base


pointer = shared


def generic(operand: Operand) -> str:
    """Return the address as a pointer. The operand is a pointer or a 32-bit address of shared memory."""
    assert isinstance(operand, Address), operand
    return f"((char*)emu_generic({operand.base}) + {operand.offset})"


def declare_coordinates(operand: Operand) -> str:
    assert isinstance(operand, Address), operand
    return f"const int emu_at[] = {{{', '.join(f'(int)({c})' for c in operand.coordinates)}}};"
