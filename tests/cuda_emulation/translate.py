"""Translate CUDA C++ of TVM to C++ for g++: only asm statements, shared arrays and kernels change.

The types and functions of CUDA come from include/emulation.h.
"""

import re

from . import ptx

_SHARED = re.compile(
    r"(?P<extern>extern\s+)?__shared__\s+(?:(?:__align__|alignas)\((?P<alignment>\d+)\)\s*)?"
    r"(?P<type>[\w: ]+?)\s+(?P<name>\w+)(?:\[(?P<count>[^\]]*)\])?\s*;"
)
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\((?P<threads>\d+)[^)]*\)\s+)?'
    r"(?P<name>\w+)\((?P<parameters>[^)]*)\)\s*\{"
)
_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def translate(source: str) -> str:
    """Return the C++ of a CUDA source with one or more kernels.

    Raises ptx.UnknownInstruction.
    """
    source = _references(_replace_asm(source))
    chunks, end = [], 0
    for kernel in _KERNEL.finditer(source):
        body_end = _closing(source, kernel.end() - 1, "{", "}")
        chunks += [source[end : kernel.start()], _kernel(kernel, source[kernel.start() : body_end + 1])]
        end = body_end + 1
    return "".join([*chunks, source[end:]])


def _kernel(match: re.Match, text: str) -> str:
    """Return the function of a kernel, and the record that the emulated driver looks for."""
    arrays: list[str] = []
    alignments = [16]

    def declare(array: re.Match) -> str:
        kind, name, alignment = array["type"], array["name"], array["alignment"]
        if array["extern"]:
            alignments.append(int(alignment or 16))
            return f"{kind}* {name} = ({kind}*)emu_dynamic_shared();"
        arrays.append(f'{{"{name}", sizeof({kind}) * ({array["count"] or 1}), {alignment or f"alignof({kind})"}}}')
        if array["count"] is None:
            return f"{kind}& {name} = *({kind}*)emu_static_shared({len(arrays) - 1});"
        return f"{kind}* {name} = ({kind}*)emu_static_shared({len(arrays) - 1});"

    body = _SHARED.sub(declare, text)
    name = match["name"]
    parameters = [p for p in match["parameters"].split(",") if p.strip()]
    restricted = [f'"{p.split()[-1]}"' if "__restrict__" in p else "nullptr" for p in parameters]
    return f"""{body}
static const emu_shared_array emu_arrays_{name}[] = {{{", ".join([*arrays, "{}"])}}};
static const char* const emu_restricted_{name}[] = {{{", ".join([*restricted, "nullptr"])}}};
extern "C" {{
extern const emu_kernel emu_kernel_{name};
const emu_kernel emu_kernel_{name} = {{
  [](void** arguments) {{ emu_call(&{name}, arguments); }}, {match["threads"] or 0}, {max(alignments)},
  {len(arrays)}, emu_arrays_{name}, {len(parameters)}, emu_restricted_{name},
  emu_bytes(&{name}), EMU_FILE}};
}}
"""


def _replace_asm(source: str) -> str:
    chunks, end = [], 0
    for match in _ASM.finditer(source):
        if match.start() < end or source.startswith("#", source.rfind("\n", 0, match.start()) + 1):
            continue
        closing = _closing(source, match.end() - 1, "(", ")")
        chunks += [source[end : match.start()], _asm(source[match.end() : closing])]
        end = source.index(";", closing) + 1
    return "".join([*chunks, source[end:]])


def _asm(statement: str) -> str:
    """Return the C++ for the text between the parentheses of one asm statement."""
    sections = _sections(statement)
    text = "".join(_STRING.findall(sections[0])).encode().decode("unicode_escape").replace("%%", "%")
    if not text.strip():
        return ";"  # a fence for the compiler
    operands = [expression for section in sections[1:3] for expression in _operands(section)]
    return ptx.translate(text, operands)


def _sections(statement: str) -> list[str]:
    """Split text, outputs, inputs and clobbers at colons outside of strings and parentheses."""
    sections, section, depth, i = [], "", 0, 0
    while i < len(statement):
        if string := _STRING.match(statement, i):
            section += string[0]
            i = string.end()
            continue
        c = statement[i]
        depth += (c in "([") - (c in ")]")
        if c == ":" and not depth:
            sections.append(section)
            section = ""
        else:
            section += c
        i += 1
    return [*sections, section]


def _operands(section: str) -> list[str]:
    """Return the expressions of `"=r"(x), "r"(y)`."""
    expressions, i = [], 0
    while string := _STRING.search(section, i):
        begin = section.index("(", string.end())
        i = _closing(section, begin, "(", ")") + 1
        expressions.append(section[begin + 1 : i - 1].strip())
    return expressions


def _references(source: str) -> str:
    """Pass the registers of A to wgmma helpers by reference to the caller's variables, since wgmma reads them later."""

    def by_reference(match: re.Match) -> str:
        if "emu_register emu_a[]" not in match[0]:
            return match[0]
        return re.sub(r"uint32_t __a(\d)\b", r"emu_register __a\1", match[0])

    return re.sub(r"(?m)^(?:static )?__forceinline__ __device__ void \w+\([^)]*\) \{\n[^\n]*\n\}", by_reference, source)


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth, i = 0, at
    while True:
        if string := _STRING.match(text, i):
            i = string.end()
            continue
        depth += (text[i] == opening) - (text[i] == closing)
        if not depth:
            return i
        i += 1
