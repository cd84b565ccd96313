"""Inline PTX as C++: the text of an asm statement becomes calls of the emulator (include/interface.h).

A statement is split into instructions, an instruction into its name and operands; the first of INSTRUCTIONS
(ptx_instructions.py) whose pattern matches the name writes the C++. What no pattern matches is an error when the kernel
is built.
"""

import itertools
import re

from .ptx_instructions import INSTRUCTIONS
from .ptx_operands import TYPES, Address, Operand

_UNIQUE = itertools.count()


class UnknownInstruction(NotImplementedError):
    """PTX that the emulator does not know."""


def translate(text: str, operands: list[str]) -> str:
    """Return C++ statements for the PTX of one asm statement.

    text: as the assembler gets it, `%0` standing for operands[0]; operands: C++ expressions, outputs first.
    Raises UnknownInstruction.
    """
    text = " ".join(re.sub(r"//[^\n]*", "", text).split())
    if text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    unique = next(_UNIQUE)
    labels = re.findall(r"(?:^|;|:)\s*([A-Za-z_$][\w$]*):(?!:)", text)
    code = ["{"]
    for statement in text.split(";"):
        statement = statement.strip()
        while match := re.match(r"([A-Za-z_$][\w$]*):(?!:)\s*", statement):
            code.append(f"{match[1]}_{unique}:;")
            statement = statement[match.end() :]
        if statement:
            code.append(_statement(statement, operands, {label: f"{label}_{unique}" for label in labels}))
    return " ".join([*code, "}"])


def _statement(text: str, operands: list[str], labels: dict[str, str]) -> str:
    if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
        names = [name.strip().replace("%", "emu_") for name in match[2].split(",")]
        return f"{TYPES[match[1]]} {', '.join(name + ' = {}' for name in names)};"
    guard = ""
    if match := re.match(r"@(!?)%?(\w+)\s+", text):
        guard = f"if ({match[1]}{_scalar('%' + match[2] if text[1 + len(match[1])] == '%' else match[2], operands)}) "
        text = text[match.end() :]
    name, _, rest = text.partition(" ")
    arguments = [_operand(operand_text, operands) for operand_text in _split(rest)]
    if name in ("bra", "bra.uni"):
        return f"{guard}goto {labels[str(arguments[0])]};"
    for pattern, writer in INSTRUCTIONS:
        if matched := pattern.match(name):
            return f"{guard}{{ {writer(matched, arguments)} }}"
    raise UnknownInstruction(f"the emulator does not know the PTX instruction {text!r}")


def _operand(text: str, operands: list[str]) -> Operand:
    if text.startswith("{"):
        return tuple(_scalar(operand_text, operands) for operand_text in _split(text[1:-1]))
    if text.startswith("["):
        base, *coordinates = _split(text[1:-1])
        base, _, offset = base.partition("+")
        inner = coordinates[0][1:-1] if coordinates else ""
        return Address(
            _scalar(base.strip(), operands), int(offset or "0", 0), tuple(_scalar(c, operands) for c in _split(inner))
        )
    return _scalar(text, operands)


def _scalar(text: str, operands: list[str]) -> str:
    text = text.strip()
    if match := re.fullmatch(r"%(\d+)", text):
        return f"({operands[int(match[1])]})"
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"__uint_as_float(0x{match[1]}u)"
    return text.replace("%", "emu_")


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    fields, depth, field = [], 0, ""
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            fields.append(field.strip())
            field = ""
        else:
            field += c
    return [*fields, field.strip()] if field.strip() else fields


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if not depth:
            return i
    return -1
