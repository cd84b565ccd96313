"""PTX instructions as C++: each is a call of the emulator (include/interface.h).

`INSTRUCTIONS` lists, in order, a pattern of the instruction's name and the function that writes the C++.
"""

import re
from collections.abc import Callable

from .ptx_operands import (
    TYPES,
    Address,
    Operand,
    assign,
    declare_array,
    declare_coordinates,
    generic,
    pointer,
    shared,
)

_KIND = {"f16": 0, "bf16": 1, "tf32": 2}
_HALF = {"f16": "half", "bf16": "nv_bfloat16"}
_Writer = Callable[[re.Match, list[Operand]], str]
INSTRUCTIONS: list[tuple[re.Pattern, _Writer]] = []


def _instruction(pattern: str) -> Callable[[_Writer], _Writer]:
    def register(writer: _Writer) -> _Writer:
        INSTRUCTIONS.append((re.compile(pattern + r"\Z"), writer))
        return writer

    return register


# ---- matrices in registers


@_instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared(::cta)?\.b16")
def _(m, o):
    loads = " ".join(assign(d, f"emu_d[{i}]") for i, d in enumerate(o[0]))
    return f"uint32_t emu_d[{m[1]}]; emu_ldmatrix(emu_d, {m[1]}, {int(bool(m[2]))}, {shared(o[1])}); {loads}"


@_instruction(r"stmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared(::cta)?\.b16")
def _(m, o):
    values = declare_array("uint32_t", "emu_s", o[1])
    return f"{values} emu_stmatrix(emu_s, {m[1]}, {int(bool(m[2]))}, {shared(o[0])});"


@_instruction(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32")
def _(m, o):
    d, a, b, c = o
    inputs = (
        declare_array("uint32_t", "emu_a", a)
        + declare_array("uint32_t", "emu_b", b)
        + declare_array("float", "emu_c", c)
    )
    stores = " ".join(f"{x} = emu_d[{i}];" for i, x in enumerate(d))
    return f"float emu_d[4]; {inputs} emu_mma(emu_d, emu_a, emu_b, emu_c, {m[1]}, {_KIND[m[2]]}); {stores}"


# ---- cp.async


@_instruction(r"cp\.async\.(ca|cg)\.shared(::cta)?\.global(\.L2::\w+)*")
def _(m, o):
    return f"emu_cp_async({shared(o[0])}, {pointer(o[1])}, {o[2]}, {o[3] if len(o) > 3 else o[2]});"


@_instruction(r"cp\.async\.commit_group")
def _(m, o):
    return "emu_cp_async_commit();"


@_instruction(r"cp\.async\.wait_group")
def _(m, o):
    return f"emu_cp_async_wait({o[0]});"


@_instruction(r"cp\.async\.wait_all")
def _(m, o):
    return "emu_cp_async_wait(-1);"


@_instruction(r"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared(::cta)?\.b64")
def _(m, o):
    return f"emu_cp_async_arrive({shared(o[0])}, {int(bool(m[1]))});"


# ---- mbarriers

_AT = r"(\.(release|acquire|relaxed))?(\.(cta|cluster))?(\.shared(::cta)?)?\.b64"


@_instruction(r"mbarrier\.init" + _AT)
def _(m, o):
    return f"emu_mbarrier_init({shared(o[0])}, {o[1]});"


@_instruction(r"mbarrier\.inval" + _AT)
def _(m, o):
    return f"emu_mbarrier_invalidate({shared(o[0])});"


@_instruction(r"mbarrier\.arrive\.expect_tx" + _AT)
def _(m, o):
    return f"uint64_t emu_state = emu_mbarrier_arrive({shared(o[1])}, 1, {o[2]}, 0); {assign(o[0], 'emu_state')}"


@_instruction(r"mbarrier\.arrive" + _AT)
def _(m, o):
    target, where, count = ["_", *o] if isinstance(o[0], Address) else o if len(o) > 2 else [*o, "1"]
    return f"uint64_t emu_state = emu_mbarrier_arrive({shared(where)}, {count}, 0, 0); {assign(target, 'emu_state')}"


@_instruction(r"mbarrier\.arrive((\.release|\.relaxed)?\.cluster)?\.shared::cluster\.b64")
def _(m, o):
    where, count = [*o, "1"][1:3] if o[0] == "_" else [*o, "1"][:2]
    return f"emu_mbarrier_arrive({shared(where)}, {count}, 0, 1);"


@_instruction(r"mbarrier\.expect_tx" + _AT)
def _(m, o):
    return f"emu_mbarrier_expect({shared(o[0])}, {o[1]});"


@_instruction(r"mbarrier\.(try|test)_wait(\.parity)?" + _AT)
def _(m, o):
    test = "emu_mbarrier_test" if m[2] else "emu_mbarrier_test_state"
    return f"{o[0]} = {test}({shared(o[1])}, {o[2]});"


# ---- bulk copies

_HINTS = r"(\.L2::cache_hint)?"
_TO_SHARED = r"\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"


@_instruction(r"cp\.async\.bulk\.tensor\.(\d)d" + _TO_SHARED + _HINTS)
def _(m, o):
    source = o[1]
    return f"{declare_coordinates(source)} emu_tma_load({shared(o[0])}, {source.base}, emu_at, {m[1]}, {shared(o[2])});"


@_instruction(r"cp\.async\.bulk\.tensor\.(\d)d" + _TO_SHARED + r"\.multicast::cluster")
def _(m, o):
    source, mask = o[1], f"(uint32_t)({o[3]})"
    where = f"{shared(o[0])}, {source.base}, emu_at, {m[1]}, {shared(o[2])}, {mask}"
    return f"{declare_coordinates(source)} emu_tma_multicast({where});"


@_instruction(r"cp\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta(\.tile)?\.bulk_group" + _HINTS)
def _(m, o):
    return f"{declare_coordinates(o[0])} emu_tma_store({o[0].base}, emu_at, {m[1]}, {shared(o[1])});"


@_instruction(r"cp\.async\.bulk" + _TO_SHARED + _HINTS)
def _(m, o):
    return f"emu_bulk_load({shared(o[0])}, {pointer(o[1])}, {o[2]}, {shared(o[3])});"


@_instruction(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group" + _HINTS)
def _(m, o):
    return f"emu_bulk_store((void*){pointer(o[0])}, {shared(o[1])}, {o[2]});"


@_instruction(r"cp\.async\.bulk\.commit_group")
def _(m, o):
    return "emu_bulk_commit();"


@_instruction(r"cp\.async\.bulk\.wait_group(\.read)?")
def _(m, o):
    return f"emu_bulk_wait({o[0]}, {int(bool(m[1]))});"


# ---- wgmma


@_instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2")
def _(m, o):
    d, a, b, scale_d, *immediates = o
    accumulators = f"float* emu_d[] = {{{', '.join('&' + x for x in d)}}};"
    if isinstance(a, tuple):
        a_code = f"const emu_register emu_a[] = {{{', '.join(a)}}};"
        descriptor, scale_a, scale_b, a_transposed, b_transposed = "0", *immediates[:2], "0", immediates[2]
    else:
        a_code, descriptor = "const emu_register* emu_a = nullptr;", a
        scale_a, scale_b, a_transposed, b_transposed = immediates
    return (
        f"{accumulators} {a_code} emu_wgmma(emu_d, {m[1]}, {_KIND[m[2]]}, emu_a, {descriptor}, {b}, {scale_d}, "
        f"{scale_a}, {scale_b}, {a_transposed}, {b_transposed});"
    )


@_instruction(r"wgmma\.fence\.sync\.aligned")
def _(m, o):
    return "emu_wgmma_fence();"


@_instruction(r"wgmma\.commit_group\.sync\.aligned")
def _(m, o):
    return "emu_wgmma_commit();"


@_instruction(r"wgmma\.wait_group\.sync\.aligned")
def _(m, o):
    return f"emu_wgmma_wait({o[0]});"


# ---- meeting points and fences


@_instruction(r"griddepcontrol\.(wait|launch_dependents)")
def _(m, o):
    return ""  # kernels follow each other here


@_instruction(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _(m, o):
    return f"emu_barrier({o[0]}, {o[1] if len(o) > 1 else 0}, {int(m[1] == 'arrive')});"


@_instruction(r"barrier\.cluster\.arrive(?:\.(release|relaxed))?(?:\.aligned)?")
def _(m, o):
    return f"emu_cluster_arrive({int(m[1] == 'relaxed')});"


@_instruction(r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?")
def _(m, o):
    return "emu_cluster_wait();"


@_instruction(r"mapa\.shared::cluster\.u32")
def _(m, o):
    return assign(o[0], f"emu_map_shared({o[1]}, {o[2]})")


@_instruction(r"fence\.mbarrier_init\.release\.cluster")
def _(m, o):
    return "emu_fence_mbarrier_init();"


@_instruction(r"fence\.proxy\.async(\.(shared::cta|shared::cluster|global))?")
def _(m, o):
    return "" if m[2] == "global" else "emu_fence_proxy_async();"


@_instruction(
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|griddepcontrol\.(wait|launch_dependents)|nanosleep\.u32"
    r"|(fence|membar)(\.\w+)*|prefetch\.tensormap|prefetch(u)?\.[\w.:]+"
)
def _(m, o):
    return ""  # ordinary accesses take effect at once, launches follow each other


@_instruction(r"elect\.sync")
def _(m, o):
    lane, predicate = str(o[0]).split("|")
    code = assign(lane.strip(), "(uint32_t)__builtin_ctz(emu_active_mask())")
    return f"{code} {predicate.strip()} = emu::lane() == __builtin_ctz(emu_active_mask());"


# ---- memory

_WAY = (
    r"((?:\.(?:volatile|relaxed|acquire|release|weak|gpu|cta|sys|nc|ca|cg|cs|cv|wb|wt|lu|L1::\w+|L2::\w+(?:::\w+)?))*)"
)


@_instruction(r"ld" + _WAY + r"\.(global|shared|shared::cta)" + _WAY + r"(?:\.v(\d))?\.(\w\d+)")
def _(m, o):
    kind, targets = TYPES[m[5]], o[0] if isinstance(o[0], tuple) else (o[0],)
    code = f"const char* emu_p = {generic(o[1])}; emu_access(emu_p, sizeof({kind}) * {len(targets)}, EMU_READ); "
    return code + " ".join(assign(t, f"emu::load<{kind}>(emu_p, {i} * sizeof({kind}))") for i, t in enumerate(targets))


@_instruction(r"st" + _WAY + r"\.(global|shared|shared::cta)" + _WAY + r"(?:\.v(\d))?\.(\w\d+)")
def _(m, o):
    kind, values = TYPES[m[5]], o[1] if isinstance(o[1], tuple) else (o[1],)
    code = f"char* emu_p = {generic(o[0])}; emu_access(emu_p, sizeof({kind}) * {len(values)}, EMU_WRITE); "
    stores = (f"emu::store<{kind}>(emu_p, emu::as<{kind}>({v}), {i} * sizeof({kind}));" for i, v in enumerate(values))
    return code + " ".join(stores)


@_instruction(r"(atom|red)" + _WAY + r"\.(global|shared|shared::cta)" + _WAY + r"\.(add|min|max|and|or|exch)\.(\w\d+)")
def _(m, o):
    target, where, value = ["_", *o] if m[1] == "red" else o
    kind, name = TYPES[m[6]], {"exch": "Exch"}.get(m[5], m[5].capitalize())
    update = f"{kind} emu_old = atomic{name}(({kind}*){generic(where)}, emu::as<{kind}>({value}));"
    return f"{update} {assign(target, 'emu_old')}"


# ---- arithmetic


@_instruction(r"setp\.(eq|ne|lt|le|gt|ge)\.(\w\d+)")
def _(m, o):
    op = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[m[1]]
    return f"{o[0]} = ({TYPES[m[2]]})({o[1]}) {op} ({TYPES[m[2]]})({o[2]});"


_SPECIAL = {
    "emu_laneid": "emu::lane()",
    "emu_tid.x": "threadIdx.x",
    "emu_ctaid.x": "blockIdx.x",
    "emu_cluster_ctarank": "emu_cluster_rank()",
}


@_instruction(r"mov\.(\w\d+)")
def _(m, o):
    special = _SPECIAL.get(str(o[1]))
    return assign(o[0], f"({TYPES[m[1]]}){special}" if special else str(o[1]))


@_instruction(r"selp\.(\w\d+)")
def _(m, o):
    return assign(o[0], f"({o[3]}) ? ({o[1]}) : ({o[2]})")


_UNARY = {"ex2": "exp2f(x)", "lg2": "log2f(x)", "rcp": "1.0f / x", "rsqrt": "1.0f / sqrtf(x)"}
_BINARY = {"add": "x + y", "sub": "x - y", "mul": "x * y", "max": "fmaxf(x, y)", "min": "fminf(x, y)"}


@_instruction(r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.(?:approx|rn)(?:\.ftz)?\.f32")
def _(m, o):
    return f"float x = {o[1]}; {o[0]} = emu::canonical({_UNARY.get(m[1], m[1] + 'f(x)')});"


@_instruction(r"(add|sub|mul|max|min)(?:\.(?:rn|ftz|NaN))*\.f32")
def _(m, o):
    return f"float x = {o[1]}, y = {o[2]}; {o[0]} = emu::canonical({_BINARY[m[1]]});"


@_instruction(r"fma(?:\.(?:rn|ftz))*\.f32")
def _(m, o):
    return f"{o[0]} = emu::canonical(fmaf({o[1]}, {o[2]}, {o[3]}));"


@_instruction(r"fma\.rn\.(f16|bf16)x2")
def _(m, o):
    return assign(o[0], f"emu::fma_pair<{_HALF[m[1]]}>({o[1]}, {o[2]}, {o[3]})")


@_instruction(r"prmt\.b32")
def _(m, o):
    return assign(o[0], f"emu::permute({o[1]}, {o[2]}, {o[3]})")


@_instruction(r"cvt\.rn\.f16x2\.e4m3x2")
def _(m, o):
    return assign(o[0], f"emu::pack<half>(emu::from_e4m3(({o[1]}) >> 8), emu::from_e4m3(({o[1]}) & 0xFF))")


@_instruction(r"cvt\.rn(?:\.satfinite)?\.(f16|bf16)x2\.f32")
def _(m, o):
    return assign(o[0], f"emu::pack<{_HALF[m[1]]}>({o[1]}, {o[2]})")


@_instruction(r"cvt\.rna\.tf32\.f32")
def _(m, o):
    return assign(o[0], f"emu::to_tf32({o[1]})")


@_instruction(r"cvt\.rn\.(f16|bf16)\.f32")
def _(m, o):
    return assign(o[0], f"{_HALF[m[1]]}((float)({o[1]})).bits")


@_instruction(r"cvt\.f32\.(f16|bf16)")
def _(m, o):
    return f"{_HALF[m[1]]} emu_h; emu_h.bits = (uint16_t)({o[1]}); {assign(o[0], '(float)emu_h')}"
