"""The table of loop bounds: a section of docs/cuda_kernels.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tests.cuda.audits.loop_kernels import ARCHITECTURES, LARGE, attention, matmul, recorded
from tests.cuda.audits.loop_model import GPUS, Kernel, bound, count_overlapped_exponentials

TEXT = """
## What bounds the loops

A model of the main loops, of ours and of others': FlashAttention-3 (forward, commit {flash_attention:.12}, at its own
tiles) and CUTLASS, as `tests/cuda/audits/peer_kernels.py` recorded them with nvcc {nvcc} and the headers of CUTLASS
{cutlass}. The loop is read from the machine code (`tests/cuda/audits/sass.py`): the innermost one with matmuls, on the
shortest way through it that multiplies all, which is that of a tile without a mask. `audits/loop_model.py` adds up
what that needs of an SM, in cycles for a tile of keys, or a step along k, of a block:

* *tensor*: matmuls, from the shapes in the instructions, at the published rate of the card;
* *issue*: instructions of all warps that run the loop, one for each of four schedulers in a cycle;
* *MUFU*: exponentials, 16 in a cycle; *FP32*: float32 and multiplied integers, 128 lanes (64 on sm_80); *ALU*: other
  integers, comparisons, selections and conversions, 64 lanes;
* *shared*: what warps read in shared memory, what wgmma reads there for each warpgroup on its own, and what is copied
  there, 128 bytes in a cycle;
* *L2*: what comes from the second-level cache, less where a cluster shares it, at so many bytes in a cycle of a
  SM:
  {caches}.
  These are rough, and no property of the code: *inside* is the share of tensor cores of the busiest pipe but for the
  cache; the bound has the cache in it;
* *order*: what one warp (one warpgroup of wgmma) alone takes where all pipes are its own, with its matmuls in a queue
  and its waits where they are: what no other warp hides.

The bound in TFLOP/s supposes that all pipes run beside each other: the warps are as far apart as turns at the tensor
cores (ping-pong), or several blocks, can keep them. *In step* is the other end: all warps are at the same place, so
that only what the machine code itself puts between matmuls and the wait for them is hidden; *beside* counts the
exponentials of a warp that are between the wait for S and that for O. Kernels that take turns should be near the bound,
and those that do not (a head size of 256) anywhere between. Matmuls by mma.sync are taken as if each waited for the
one before, and only what stands between two of them overlapped with one.

What the model leaves out makes kernels slower than it says: latencies of any kind, stalls on registers, bank conflicts,
barriers and their waits, the instructions of the producer, tiles under a mask, what runs before and after the loop, and
clocks that fall under load (an H100 does not hold the clock of its published peak through long matmuls). So it tells
which pipe a kernel cannot be faster than, and which of two kernels leaves more room; it does not predict a time.

"""
COLUMNS = (
    *("kernel", "of", "GPU", "tiles", "tensor", "issue", "MUFU", "FP32", "ALU", "shared", "L2", "order"),
    *("bound by", "inside", "TFLOP/s", "in step", "beside"),
)
CONCLUSIONS = """
What the table says:

* Attention on H100 at head sizes of 128 and 256 is bound by tensor cores inside of the SM, and a little
  before that by the cache, which gives K and V to every block alone; FlashAttention-3 shares them between two blocks
  where there is no mask. At the same tiles its loops have about a tenth fewer instructions than ours; of exponentials,
  ours have all beside the matmuls of P V and FlashAttention-3's, by this compiler, few, so that it relies on turns.
* At a head size of 64 the exponentials are what bounds tiles of 128 keys, theirs and ours. FlashAttention-3's tiles of
  192 keys put P into shared memory, which is then the limit.
* Matmuls on H100 are bound by tensor cores and shared memory alike, and by the cache before both, if that gives as
  little as is said here: clusters of two, ours and CUTLASS's, ask it for 32 bytes in each cycle of the tensor cores,
  and blocks alone, which are left to few rows, for 48. The matmul of a gate has A read in shared memory for each of
  its halves.
* By ping-pong a tile of B is read in shared memory, and asked of the cache, for 64 rows and not for 128. That bounds
  the loop at four fifths inside of the SM and at two thirds of a cooperative one by the cache, ours as
  CUTLASS's. What it hides is not part of the table: on an H200 a store of a cooperative tile costs some 12,000 cycles,
  of which ping-pong hides two fifths. So ping-pong is the default up to a k of about 4096
  ([measured](cuda_measured.md)).
* On A100 a head size of 256 is bound by shared memory: each of eight warps reads all of K and V there for 16 rows.
"""


def loop_table() -> str:
    """Return the section, with loops that are compiled now and loops that are recorded."""
    record = recorded()
    attention_loops = [attention(*case) for case in itertools.product(ARCHITECTURES, (64, 128, 256), (False, True))]
    rows = [("ours", kernel) for kernel in (*attention_loops, *map(matmul, LARGE))]
    rows += [(owner, kernel) for owner, kernels in record["kernels"].items() for kernel in kernels]
    rows.sort(key=lambda row: (ARCHITECTURES.index(row[1].arch), row[1].name.split(",")[0]))
    caches = ", ".join(f"{gpu.device.cache} on {gpu.name}" for gpu in GPUS.values())
    header = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    return TEXT.format(caches=caches, **record) + header + _lines(rows) + CONCLUSIONS


def _lines(rows: Iterable[tuple[str, Kernel]]) -> str:
    lines = []
    for owner, kernel in rows:
        gpu = GPUS[kernel.arch]
        b, tiles = bound(kernel, gpu), kernel.operations / kernel.work
        columns = [kernel.name, owner, gpu.name, kernel.tiles]
        columns += [f"{cycles / tiles:.0f}" for cycles in (*b.pipes.values(), b.order)]
        columns += [b.binding, f"{b.inside:.0%}", f"{b.tflops(b.cycles):.0f}", f"{b.tflops(b.in_step):.0f}"]
        lines.append(f"| {' | '.join(columns)} | {count_overlapped_exponentials(kernel.steps)} |\n")
    return "".join(lines)
