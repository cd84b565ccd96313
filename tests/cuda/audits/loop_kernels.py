"""The loops that docs/cuda_kernels.md compares: loops of our kernels, compiled now, and recorded loops of others."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles, pad_head_dim
from schedules.cuda.matmul.matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from schedules.cuda.primitives.cost_model import spread_blocks
from schedules.cuda.primitives.device import DEVICES
from tests.cuda.audits.loop_model import Kernel, Step
from tests.cuda.audits.machine_code import MachineCode, machine_code, prefill, problem

RECORD = Path(__file__).parent / "peers" / "loops.json"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_120")
LARGE = ("sm_80", "sm_120", "sm_90a", "sm_90a, gate", "sm_90a, ping-pong")  # of the audited matmuls


class Compiled(NamedTuple):
    """A compiled attention kernel."""

    tiles: MmaTiles | WgmmaTiles
    code: MachineCode


@functools.cache
def compiled(arch: str, head_dim: int, causal: bool) -> Compiled:
    """Compile the prefill kernel that an architecture gets by default."""
    func, tiles = prefill(problem(head_dim, causal), arch)
    return Compiled(tiles, machine_code(func, arch))


def attention(arch: str, head_dim: int, causal: bool) -> Kernel:
    """Return the loop of that kernel. A step is a tile of keys; head_dim is a multiple of 16, or of 64 with TMA."""
    tiles, code = compiled(arch, head_dim, causal)
    p = problem(head_dim, causal)
    brought = 2 * tiles.kv * (pad_head_dim(p.head_dim) + p.v_head_dim)
    return Kernel(
        name=attention_name(head_dim, causal),
        arch=arch,
        tiles=f"{tiles.q} x {tiles.kv}",
        steps=code.steps,
        warps=_warps(arch, tiles, code, tiles.shared_memory(p)),
        work=tiles.q * tiles.kv * 2 * (pad_head_dim(p.head_dim) + p.v_head_dim),
        brought=brought,
        read=brought,
    )


def attention_name(head_dim: int, causal: bool, dtype: str = "float16") -> str:
    """Return the name of an attention kernel on the page."""
    return f"attention, {head_dim}{', causal' if causal else ''}{'' if dtype == 'float16' else f', {dtype}'}"


@functools.cache
def matmul(name: str) -> Kernel:
    """Return the loop along k of an audited matmul."""
    # The emulator is imported only here: records of other kernels do not need it.
    from tests.cuda.matmul.test_matmul_on_gpus import AUDITED, first_variant

    arch = name.split(",")[0]
    variant = first_variant(AUDITED[name], arch)
    tiles = variant.tiles["tiles"]
    assert isinstance(tiles, MatmulTiles | WgmmaMatmulTiles)
    code = machine_code(variant.make(), arch)
    size = variant.problem.type.bytes
    cluster, in_turn = (tiles.cluster, tiles.ping_pong) if isinstance(tiles, WgmmaMatmulTiles) else (1, False)
    together = f", clusters of {cluster}" if cluster > 1 else ""
    return Kernel(
        name=f"matmul, {AUDITED[name].epilogue}{', ping-pong' if in_turn else ''}",
        arch=arch,
        tiles=f"{tiles.m} x {tiles.n} x {tiles.k}{together}",
        steps=code.steps,
        warps=_warps(arch, tiles, code, tiles.shared_memory(variant.problem)),
        work=2 * tiles.m * tiles.n * tiles.k,
        brought=size * (tiles.m + tiles.n) * tiles.k,
        read=size * (tiles.m + tiles.n // cluster) * tiles.k,
    )


def _warps(arch: str, tiles: Any, code: MachineCode, shared_memory: int) -> int:
    """Return how many warps run the loop on an SM, with as many blocks as fit there. Producers do not count."""
    blocks = spread_blocks(1 << 20, DEVICES[arch], tiles.threads, code.registers, shared_memory).at_once
    consumers = 4 * tiles.consumers if isinstance(tiles, WgmmaTiles | WgmmaMatmulTiles) else tiles.threads // 32
    return blocks * consumers


def recorded() -> dict[str, Any]:
    """Return the record of peer_kernels.py: `kernels` by owner, and the versions of sources and compilers."""
    record = json.loads(RECORD.read_text())
    record["kernels"] = {owner: [_kernel(**k) for k in kernels] for owner, kernels in record["kernels"].items()}
    return record


def _kernel(steps: list[list[Any]], **rest: Any) -> Kernel:
    return Kernel(steps=tuple(Step(*step) for step in steps), **rest)
