"""The model of main loops: a loop counted by hand, and the bounds of shipped and recorded kernels."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math

import pytest

from schedules.cuda.primitives.device import DEVICES
from tests.cuda.audits.loop_kernels import ARCHITECTURES, LARGE, attention, compiled, matmul, recorded
from tests.cuda.audits.loop_model import GPUS, Bound, Gpu, Kernel, bound, count_overlapped_exponentials, steps
from tests.cuda.audits.peer_kernels import by_warps, compiler
from tests.cuda.audits.sass import loops, main_loop, read, successors
from tests.cuda.audits.test_estimates import problem as sized

pytestmark = pytest.mark.no_gpu

# A consumer of a kernel for Hopper. It waits for a tile, out of line; multiplies 64 x 128 x 16 from shared memory, and
# 64 x 64 x 16 with A in registers; waits for each; and has code for a mask between, which a full tile skips.
LISTING = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   MOV R1, 0x1 ;
        /*0010*/              @!P0 EXIT ;
.L_x_0:
        /*0018*/                   BSSY B0, `(.L_x_1) ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0040*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0050*/                   HGMMA.64x64x16.F32 R88, R152, gdesc[UR12].tnspB, R88, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/              @!P1 BRA P2, `(.L_x_2) ;
        /*0080*/                   FSEL R24, R24, -INF , P3 ;
        /*0090*/                   FSEL R25, R25, -INF , P4 ;
.L_x_2:
        /*00a0*/                   FMNMX R3, R24, R25, !PT ;
        /*00b0*/                   FFMA R24, R24, R4, -R3 ;
        /*00c0*/                   MUFU.EX2 R24, R24 ;
        /*00d0*/                   LDS.64 R6, [R7] ;
        /*00e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00f0*/                   MUFU.EX2 R25, R25 ;
        /*0100*/              @!P5 CALL.REL.NOINC `(.L_x_4) ;
        /*0108*/                   BRA `(.L_x_0) ;
.L_x_4:
        /*0110*/                   EXIT ;
.L_x_3:
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8+URZ], R2 ;
        /*0130*/              @!P0 BRA `(.L_x_3) ;
        /*0140*/                   BSYNC B0 ;
        /*0150*/                   BRA `(.L_x_3) ;
"""
H100 = GPUS["sm_90a"]


def listed(text: str = LISTING, warps: int = 8) -> Kernel:
    """Return 64 x 128 x 16 and 64 x 64 x 16 of each warpgroup, for which 1280 bytes arrive."""
    work = warps // 4 * 2 * 64 * (128 + 64) * 16
    return Kernel("kernel", "sm_90a", "", steps(main_loop(read(text))), warps, work, 1280, 640)


def test_the_way_of_a_full_tile() -> None:
    (function,) = read(LISTING)
    paths = {loop.header: [function.instructions[n].opcode for n in loop.path] for loop in loops(function)}
    waiting, around = paths[20], paths[2]
    assert waiting == ["SYNCS", "BRA"]
    body = "BSSY SYNCS BRA HGMMA HGMMA WARPGROUP BRA FMNMX FFMA MUFU LDS WARPGROUP MUFU CALL BRA"
    assert " ".join(around) == body
    assert successors(function, 17) == [function.labels[".L_x_4"], 18]  # CALL is a jump
    assert successors(function, 22) == [function.labels[".L_x_1"]]  # BSYNC, to the target of BSSY


def test_counted_by_hand() -> None:
    """Two warpgroups, 15 instructions each warp, 64 x 192 x 16 of a warpgroup at 4096 operations in a cycle."""
    kernel = listed()
    b = bound(kernel, H100)
    assert b.pipes == {
        "tensor": 2 * (64 + 32),
        "issue": 2 * 15,
        "MUFU": 2 * 2 * 8,
        "FP32": 2 * 1 * 1,
        "ALU": 2 * 1 * 2,
        # LDS.64 of eight warps, A and B of 64 x 128 x 16, B of 64 x 64 x 16, and arriving bytes
        "shared": (8 * 256 + 2 * (2 * 16 * (64 + 128) + 2 * 16 * 64) + 1280) / 128,
        "L2": 640 / 30,
    }
    assert count_overlapped_exponentials(kernel.steps) == 1
    # In step: S at 8 + 128 cycles, O 64 later, overlapped by 16 of an exponential, and 16 of the next after it.
    assert b.in_step == 8 + 128 + 64 + 16
    assert b.order == 4 + 64 + 32 + 8
    assert (b.binding, b.inside, b.share) == ("tensor", 1, 1)


def test_matmuls_by_warps_counted_by_hand() -> None:
    """mma.sync on A100: two of 8 cycles, hidden by 3 reads of 16 cycles each and by 11 of 2 cycles."""
    matmul = "HMMA.16816.F32 R4, R8, R12, R4 ;"
    load, add, jump = "LDSM.16.M88.4 R8, [R2] ;", "FFMA R3, R3, R3, R3 ;", "@P0 BRA `(.L_x_0) ;"
    lines = [matmul, load, load, load, matmul, *11 * [add], jump]
    text = ".section .text.kernel,\n.L_x_0:\n" + "\n".join(f"/*{n:04x}*/ {line}" for n, line in enumerate(lines))
    kernel = Kernel("kernel", "sm_80", "", steps(main_loop(read(text))), 4, 4 * 2 * 4096, 0, 0)
    b = bound(kernel, GPUS["sm_80"])
    assert b.pipes == {
        "tensor": 16, "issue": 17, "MUFU": 0, "FP32": 22, "ALU": 0, "shared": 4 * 3 * 512 / 128, "L2": 0,
    }  # fmt: skip
    assert b.order == b.in_step == 1 + 48 + 22


def test_what_is_changed_is_noticed() -> None:
    before = bound(listed(), H100)
    more = 20 * "\n/*0000*/ MUFU.EX2 R26, R26 ;"
    exponentials = bound(listed(LISTING.replace("MUFU.EX2 R25, R25 ;", "MUFU.EX2 R25, R25 ;" + more)), H100)
    assert exponentials.binding == "MUFU" and exponentials.cycles == 2 * 22 * 8
    assert exponentials.in_step > before.in_step + 300
    # The same instructions, but the second exponential is before the wait for O.
    early = LISTING.replace("        /*00f0*/                   MUFU.EX2 R25, R25 ;\n", "")
    early = early.replace("LDS.64 R6, [R7] ;", "LDS.64 R6, [R7] ;\n/*0000*/ MUFU.EX2 R25, R25 ;")
    overlapped = bound(listed(early), H100)
    assert overlapped.pipes == before.pipes and overlapped.in_step == before.in_step - 12
    assert count_overlapped_exponentials(listed(early).steps) == 2
    # An exponential before matmuls that nothing waits for, and two after them.
    unwaited = "".join(line + "\n" for line in early.splitlines() if "WARPGROUP" not in line)
    unwaited = unwaited.replace("BSSY B0,", "MUFU.EX2 R25, R25 ;\n/*0000*/ BSSY B0,")
    assert bound(listed(unwaited), H100).order == 3 * 8
    # A mask that every tile needs.
    assert bound(listed(LISTING.replace("@!P1 BRA P2,", "@!P1 NOP")), H100).pipes["ALU"] == 2 * 3 * 2


GOAL = 0.85
"""The least share of tensor cores of the busiest pipe in attention; in matmuls of large tiles it is 0.9."""


def test_attention_on_hopper() -> None:
    """D 128: two warpgroups of 64 x 128 x 128, twice, and 66 exponentials of each thread; and FlashAttention-3's."""
    kernel = attention("sm_90a", 128, False)
    b = bound(kernel, H100)
    assert (b.pipes["tensor"], b.pipes["MUFU"], b.pipes["shared"]) == (2048, 1056, 1792)
    assert b.share >= GOAL and b.in_step < b.pipes["tensor"] * 1.25
    (flash_attention,) = (k for k in recorded()["kernels"]["FlashAttention-3"] if k.tiles == kernel.tiles)
    assert b.pipes["issue"] < 1.15 * bound(flash_attention, H100).pipes["issue"]


def test_matmul_on_hopper() -> None:
    """128 x 256 x 64 in 1024 cycles, for which the cache would be too slow if no cluster shared B."""
    kernel = matmul("sm_90a")
    b = bound(kernel, H100)
    steps_of_k = kernel.operations / kernel.work
    assert b.pipes["tensor"] == b.pipes["shared"] == 1024 * steps_of_k and b.inside == 1
    assert b.share > GOAL
    single = bound(dataclasses.replace(kernel, read=kernel.brought), H100)
    assert single.binding == "L2" and single.share < 0.65


def test_recorded_loops_multiply_whole_tiles() -> None:
    """Recorded tiles of other kernels fit the shapes in their machine code."""
    for kernel in itertools.chain(*recorded()["kernels"].values()):
        assert kernel.operations and kernel.operations % kernel.work == 0, kernel.name


def check(b: Bound, share: float, goal: float) -> None:
    slowest = {name: round(cycles) for name, cycles in b.pipes.items()}
    assert share >= goal, f"{b.kernel.name} on {b.gpu.name}: {b.binding}, {share:.0%}, {slowest}, order {b.order:.0f}"


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim"), itertools.product(ARCHITECTURES, (64, 128, 256)))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_attention_is_bound_by_tensor_cores(arch: str, head_dim: int, causal: bool) -> None:
    kernel = attention(arch, head_dim, causal)
    b = bound(kernel, GPUS[arch])
    if (arch, head_dim) == ("sm_80", 256):  # eight warps read all of K and V each
        assert b.binding == "shared" and b.share > 0.75
        return
    check(b, b.share, GOAL)
    # The estimate by which a tuner orders tiles is about the same, for cards with the full rate.
    p, device, (tiles, _) = sized(4096, head_dim, causal), DEVICES[arch], compiled(arch, head_dim, causal)
    bound_per_work = bound(kernel, Gpu(arch, device, 1.0)).cycles / kernel.operations * kernel.work
    share_of_keys = 0.5 if causal else 1.0
    assert p.batch and p.q_len and p.kv_len
    tiles_each = -(-p.batch * p.q_heads * p.q_len // tiles.q // device.sm_count) * p.kv_len / tiles.kv
    ratio = math.exp(tiles.estimate(p, device)) / (bound_per_work * tiles_each * share_of_keys)
    assert 0.9 < ratio < 1.25, ratio


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_matmuls_are_bound_by_tensor_cores(name: str) -> None:
    kernel = matmul(name)
    b = bound(kernel, GPUS[kernel.arch])
    if name == "sm_90a, gate":  # which reads A for both of its halves
        assert b.inside == pytest.approx(1024 / 1152)
        return
    if name == "sm_90a, ping-pong":  # whose consumers read a tile of B each
        assert b.inside == pytest.approx(512 / 640)
        return
    check(b, b.inside, 0.9)


@pytest.mark.slow
def test_the_record_is_what_compilers_make() -> None:
    """CUTLASS's loop by mma.sync, compiled again."""
    record = recorded()
    if (record["nvcc"], record["cutlass"]) != (compiler(), importlib.metadata.version("nvidia-cutlass")):
        pytest.skip("The record is of other versions.")
    assert by_warps() in record["kernels"]["CUTLASS"]
