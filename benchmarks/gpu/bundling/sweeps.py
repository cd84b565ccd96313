"""Kernels with tiles other than their defaults, as contenders of one case: what the defaults should be.

Names of contenders have the initial of each field with its value: k16w8s2p128m1 has tiles of 16 keys, 8 warps, 2
stages, splits of 128 keys and 1 block on an SM.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import LIMITS, Case, Kernel, Sizes, Tiles
from .matmuls import Matmul, matmul_of
from .problems import DECODE_CHECKS, GQA, TYPES, Parts, attention_kernel, attention_problem, cache_bytes, matmul_kernel
from .reading import SM_COUNT, THREADS, WARP, Read

ROWS_OF_MANY = 8448  # 66 tiles of 128: a cluster for each pair of SMs

_DECODE = [(16, 8, 2, 128, 1), (16, 4, 4, 128, 1), (16, 4, 3, 256, 1), (16, 4, 3, 128, 2), (16, 4, 2, 256, 2),
           (16, 2, 3, 64, 2), (16, 2, 2, 64, 4), (32, 2, 2, 128, 2), (16, 4, 2, 512, 2)]  # fmt: skip
_DECODE_FIELDS = {"k": "keys", "w": "warps", "s": "stages", "p": "split", "m": "per_sm"}
_FEW_FIELDS = {"w": "warps", "a": "ahead", "r": "rows"}
_WGMMA_FIELDS = {"g": "consumers", "n": "n", "s": "stages", "p": "split_steps"}

_MATRICES = {  # columns, depth, epilogue
    "2048 x 2048": (2048, 2048, "none"),
    "4096 x 4096": (4096, 4096, "none"),
    "gate 8192 x 2048": (8192, 2048, "gate"),
    "2048 x 8192": (2048, 8192, "none"),
    "head 128256 x 2048": (128256, 2048, "none"),
}
_FEW = [(8, 2, 8), (8, 8, 8), (16, 2, 8), (16, 4, 8)]
_SOME = [(8, 4, 16), (16, 2, 16), (16, 2, 32), (8, 2, 64)]
_SOME_WGMMA = [(1, 64, 6, 4), (1, 64, 6, 8), (1, 128, 6, 4)]
_WIDE = {"consumers": 2, "n": 256, "stages": 4, "consumer_registers": 232, "producer_registers": 40, "split_steps": 10}
_NEVER = 1000  # steps, more than there are: k is not split


def list_sweeps() -> list[Parts]:
    """Return kernels and cases of each sweep."""
    return [_reads(), _decode(), _few_rows(), _some_rows(), _short_depth(), _large()]


def _reads() -> Parts:
    """Return the limit of kernels that only read: by blocks on an SM."""
    blocks = {per: per * SM_COUNT for per in (8, 4, 16)}
    read = Read(max(blocks.values()) * THREADS // WARP)
    checks = (Sizes(1, 1, 5), Sizes(1, 1, 1_000_003))

    def kernel(contender: str, tiles: Tiles) -> Kernel:
        return Kernel(
            f"{contender} memory",
            contender,
            "read",
            read.to_json(),
            read.parameters,
            "found",
            0.0,
            checks,
            "read",
            tiles,
        )

    kernels = [kernel("read", {}), *(kernel(f"{per} blocks", {"tiles": {"blocks": blocks[per]}}) for per in (4, 16))]
    names, cases = tuple(kernel.name for kernel in kernels), []
    for megabytes in (16, 64, 256, 1024):
        chunks = megabytes << 16
        sizes = Sizes(1, 1, chunks)
        cases.append(Case(f"read {megabytes} MiB", LIMITS, names, (), sizes, 16.0 * chunks, "read"))
    return kernels, cases


def _decode() -> Parts:
    p = attention_problem("f16", 128, **GQA)
    kernels = [attention_kernel("f16", "decode", p, DECODE_CHECKS)]
    for values in _DECODE:
        fields = dict(zip(_DECODE_FIELDS.values(), values))
        contender = _name(_DECODE_FIELDS, values)
        tiles: Tiles = {"tiles": dict(fields)}
        kernels.append(attention_kernel("decode f16", contender, p, DECODE_CHECKS, variant="decode", tiles=tiles))
    names, cases = tuple(kernel.name for kernel in kernels), []
    for batch, keys in ((1, 16384), (1, 4096), (8, 4096), (1, 1024), (64, 4096)):
        sizes = Sizes(batch, 1, keys)
        peers = ("cudnn", "flash", *(("flashinfer",) if batch == 1 else ()))
        name = f"decode tiles B{batch} kv {keys}"
        cases.append(Case(name, "decode tiles", names, peers, sizes, cache_bytes(p, sizes), "read"))
    return kernels, cases


def _few_rows() -> Parts:
    """One row and eight: tiles of the small-M kernel."""
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for name, matrix in _MATRICES.items():
        p = _matmul(matrix)
        few = _FEW if matrix[0] < 1 << 16 else _FEW[1:3]
        tiled = _variants(name, "few", p, ((_name(_FEW_FIELDS, v), {"rows": _few(v)}) for v in few))
        kernels += tiled
        cases += [_few_case(f"few rows {name} m {m}", "few rows tiles", tiled, p, m) for m in (1, 8)]
    return kernels, cases


def _some_rows() -> Parts:
    """16 to 64 rows, as many as are served at once: tiles of the small-M kernel, and of wgmma."""
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for name in ("4096 x 4096", "gate 8192 x 2048", "2048 x 8192"):
        matrix = _MATRICES[name]
        p = _matmul(matrix)
        tiles: list[tuple[str, Tiles]] = [(_name(_FEW_FIELDS, v), {"sixteen": _few(v)}) for v in _SOME]
        for consumers, n, stages, split in _SOME_WGMMA:
            values = consumers, n * len(p.factors), stages if n * len(p.factors) < 256 else 4, split
            fields = {**dict(zip(_WGMMA_FIELDS.values(), values)), "consumer_registers": 200, "producer_registers": 24}
            tiles.append((_name(_WGMMA_FIELDS, values), {"low": fields, "sixteen": {"rows": 8}}))
        tiled = _variants(name, "some", p, tiles)
        kernels += tiled
        for m in (16, 32, 64):
            fitting = [
                kernel for kernel in tiled if kernel.tiles.get("sixteen", {}).get("rows", m) in (8, *range(m, 65))
            ]
            cases.append(_few_case(f"some rows {name} m {m}", "some rows tiles", fitting, p, m))
    return kernels, cases


def _short_depth() -> Parts:
    """Many rows of a short k: ping-pong on and off."""
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for depth in (256, 384, 1024):
        p = _matmul((4096, depth, "none"))
        tiles = {
            "cooperative": {"tiles": {**_WIDE, "cluster": 2, "ping_pong": False}},
            "ping-pong": {"tiles": {**_WIDE, "cluster": 2, "ping_pong": True, "stages": 5}},
        }
        tiled = _variants(f"4096 x {depth}", "many", p, tiles.items())
        kernels += tiled
        cases.append(_many_case(f"many rows 4096 x {depth}", tiled, p, ROWS_OF_MANY))
    return kernels, cases


def _large() -> Parts:
    """Large matmuls: stream-K, and clusters."""
    kernels: list[Kernel] = []
    cases: list[Case] = []
    for size, rows in ((4096, (2048, 8192)), (8192, (8192,))):
        p = _matmul((size, size, "none"))
        tiles = {
            f"p{split}c{cluster}": {"tiles": {**_WIDE, "split_steps": split, "cluster": cluster, "ping_pong": False}}
            for split in (_WIDE["split_steps"], _NEVER)
            for cluster in (1, 2)
        }
        tiled = _variants(f"{size} x {size}", "many", p, tiles.items())
        kernels += tiled
        cases += [_many_case(f"many rows {size} x {size} m {m}", tiled, p, m) for m in rows]
    return kernels, cases


def _matmul(matrix: tuple[int, int, str]) -> Matmul:
    columns, depth, epilogue = matrix
    return matmul_of(TYPES["f16"], columns, depth, transposed=True, epilogue=epilogue)


def _variants(name: str, rows: str, p: Matmul, tiles: Iterable[tuple[str, Tiles]]) -> list[Kernel]:
    """Return the kernel with default tiles, the same for any number of rows, and one with each of these tiles."""
    default = [matmul_kernel(f"f16 {name}", "wgmma", p)]
    return default + [matmul_kernel(f"f16 {name} {rows}", c, p, variant="wgmma", tiles=fields) for c, fields in tiles]


def _few_case(name: str, group: str, kernels: list[Kernel], p: Matmul, rows: int) -> Case:
    moved = 2.0 * len(p.factors) * p.columns * p.depth
    return Case(name, group, tuple(k.name for k in kernels), ("cublas",), Sizes(1, rows, 1), moved, "read")


def _many_case(name: str, kernels: list[Kernel], p: Matmul, rows: int) -> Case:
    done = 2.0 * rows * p.columns * p.depth
    names = tuple(kernel.name for kernel in kernels)
    return Case(name, "many rows tiles", names, ("cublas",), Sizes(1, rows, 1), done, "FLOP")


def _few(values: tuple[int, int, int]) -> dict[str, int | bool]:
    return dict(zip(_FEW_FIELDS.values(), values))


def _name(fields: dict[str, str], values: Iterable[int]) -> str:
    return "".join(f"{initial}{value}" for initial, value in zip(fields, values))
