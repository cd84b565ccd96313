"""mma.sync and wgmma of the emulator, in every layout, against NumPy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import cuda_emulation as emulated
from tests.cuda_emulation import EmulationError, TensorMap

DTYPES = {"f16": np.dtype("float16"), "bf16": np.dtype(ml_dtypes.bfloat16)}
K = 64


RNG = np.random.default_rng(0)


def random(shape: tuple[int, ...], short: str) -> np.ndarray:
    return RNG.standard_normal(shape).astype(DTYPES[short])


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a [m, k] times b [n, k], in float32."""
    return a.astype("float32") @ b.astype("float32").T


# ---- mma.sync: D [16, 8] = A [16, 16] B [16, 8], B stored either way around


def mma_kernel(short: str, transposed: bool) -> str:
    variant = ".trans" if transposed else ""
    at = "(lane % 16) * 8" if transposed else "(lane % 8) * 16 + lane / 8 % 2 * 8"
    return f"""
extern "C" __global__ void __launch_bounds__(32) mma_{short}_{int(transposed)}(
    const uint4* a, const uint4* b, float* d) {{
  __shared__ __align__(16) uint4 s[48];
  int lane = threadIdx.x;
  s[lane] = a[lane];
  if (lane < 16) s[32 + lane] = b[lane];
  __syncwarp();
  uint16_t* A = (uint16_t*)s;
  uint16_t* B = (uint16_t*)(s + 32);
  unsigned x[4], y[2];
  float z[4] = {{0, 0, 0, 0}};
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
    : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
    : "r"((unsigned)__cvta_generic_to_shared(A + lane % 16 * 16 + lane / 16 * 8)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2{variant}.shared.b16 {{%0, %1}}, [%2];"
    : "=r"(y[0]), "=r"(y[1]) : "r"((unsigned)__cvta_generic_to_shared(B + {at})));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 "
    "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
    : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])
    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = z[i];
}}"""


MMA = "#include <cstdint>\n" + "\n".join(
    mma_kernel(short, transposed) for short in DTYPES for transposed in (False, True)
)


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_mma(short: str, transposed: bool) -> None:
    a, b = random((16, 16), short), random((8, 16), short)
    stored = np.ascontiguousarray(b.T) if transposed else b
    out = np.full((16, 8), np.nan, "float32")
    out = emulated.launch(MMA, f"mma_{short}_{int(transposed)}", [1], [32], [a, stored, out], arch="sm_80")[2]
    np.testing.assert_allclose(out, matmul(a, b), rtol=1e-5, atol=1e-5)


# ---- wgmma: D [64, n] = A [64, K] B [K, n]; tiles come by bulk tensor copies, panel by panel


@dataclass(frozen=True)
class Matmul:
    n: int
    short: str
    a_in_registers: bool = False
    a_transposed: bool = False
    b_transposed: bool = False

    @property
    def name(self) -> str:
        return f"wgmma_{self.n}_{self.short}_{self.a_in_registers:d}{self.a_transposed:d}{self.b_transposed:d}"

    def kernel(self) -> str:
        """Return the kernel. Bits of `left_out`: 1 wgmma.fence, 2 wgmma.wait_group, 4 the wait for the tiles."""
        count = self.n // 2
        d = ", ".join(f"%{i}" for i in range(count))
        inputs = [f"%{count + i}" for i in range(4 if self.a_in_registers else 1)]
        a = f"{{{', '.join(inputs)}}}" if self.a_in_registers else inputs[0]
        b, scale = f"%{count + len(inputs)}", f"%{count + len(inputs) + 1}"
        flags = f"{self.b_transposed:d}" if self.a_in_registers else f"{self.a_transposed:d}, {self.b_transposed:d}"
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.short}.{self.short}"
        operands = [f'"r"(x[{i}])' for i in range(4)] if self.a_in_registers else ['"l"(da)']
        return f"""
extern "C" __global__ void __launch_bounds__(128) {self.name}(const __grid_constant__ CUtensorMap ma,
    const __grid_constant__ CUtensorMap mb, const uint16_t* a, const uint16_t* b, float* out, Tile ta, Tile tb,
    int left_out) {{
  extern __shared__ __align__(1024) char tiles[];
  __shared__ uint64_t bar;
  load_tiles(ma, mb, tiles, &bar, ta, tb);
  if (!(left_out & 4)) wait_for(&bar);
  float d[{count}];
  unsigned x[4];
  int g = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < {count}; ++i) d[i] = 0;
  for (int k = 0; k < {K} / 16; ++k) {{
    for (int r = 0; r < 4; ++r) x[r] = *(const unsigned*)(a + (g + r % 2 * 8) * {K} + k * 16 + 2 * t + r / 2 * 8);
    uint64_t da = ta.descriptor(tiles, k), db = tb.descriptor(tiles + ta.bytes(), k);
    if (!(left_out & 1)) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {scale}, 0; {instruction} {{{d}}}, {a}, {b}, p, 1, 1, {flags}; }}"
      : {", ".join(f'"+f"(d[{i}])' for i in range(count))} : {", ".join(operands)}, "l"(db), "r"((int)(k != 0)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (!(left_out & 2)) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  for (int i = 0; i < {count}; ++i) out[(g + i / 2 % 2 * 8) * {self.n} + i / 4 * 8 + 2 * t + i % 2] = d[i];
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}}"""


MATMULS = [
    Matmul(8, "f16"),
    Matmul(64, "bf16", b_transposed=True),
    Matmul(128, "f16", a_transposed=True),
    Matmul(192, "bf16", a_transposed=True, b_transposed=True),
    Matmul(256, "f16", a_in_registers=True, b_transposed=True),
    Matmul(24, "bf16", a_in_registers=True),
]
SOURCE = Path(__file__).with_name("tiles.cu").read_text() + "\n".join(p.kernel() for p in MATMULS)


def tile(rows: int, swizzle: int, transposed: bool) -> tuple[np.ndarray, tuple[int, int], int]:
    """Return a Tile (see tiles.cu) of an operand of so many rows by K; the box of its panels; its bytes."""
    width = swizzle or 16
    across, along = (rows, K) if transposed else (K, rows)  # elements side by side, and lines of them
    panels = across * 2 // width
    panel = along * width
    if transposed:
        leading, stride = (panel, 8 * width) if swizzle else (8 * width, panel)
        steps = (16 * width, K // 16, 0)
    else:
        leading, stride = (16, 8 * width) if swizzle else (panel, 8 * width)
        steps = (32, width // 32, panel) if swizzle else (0, 1, 2 * panel)
    number = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return (
        np.array([panels, along, width, number, leading, stride, *steps], "int32"),
        (width // 2, along),
        panels * panel,
    )


def wgmma(p: Matmul, swizzle: int, left_out: int = 0, **named: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of the kernel, and the expected one."""
    a, b = random((64, K), p.short), random((p.n, K), p.short)
    (ta, box_a, bytes_a), (tb, box_b, bytes_b) = tile(64, swizzle, p.a_transposed), tile(p.n, swizzle, p.b_transposed)
    stored = [np.ascontiguousarray(x.T) if t else x for x, t in ((a, p.a_transposed), (b, p.b_transposed))]
    out = np.full((64, p.n), np.nan, "float32")
    arguments = [TensorMap(2, box_a, swizzle), TensorMap(3, box_b, swizzle), *stored, out, ta, tb, np.int32(left_out)]
    values = [Value(x) if isinstance(x, np.ndarray) and x.dtype == "int32" else x for x in arguments]
    result = emulated.launch(SOURCE, p.name, [1], [128], values, shared_bytes=bytes_a + bytes_b, **named)
    return result[4], matmul(a, b)


class Value:
    """A parameter that is a struct."""

    def __init__(self, array: np.ndarray) -> None:
        self.bytes = array.tobytes()

    def tobytes(self) -> bytes:
        return self.bytes


# A transposed B consists of whole panels.
SWIZZLED = [
    (p, swizzle)
    for p, swizzle in itertools.product(MATMULS, [0, 32, 64, 128])
    if not (p.b_transposed and p.n * 2 % max(swizzle, 16))
]


@pytest.mark.parametrize("p, swizzle", SWIZZLED, ids=str)
def test_wgmma(p: Matmul, swizzle: int) -> None:
    for order, arrivals in [("ascending", "late"), ("descending", "at once"), ("ascending", "last first")]:
        out, expected = wgmma(p, swizzle, order=order, arrivals=arrivals)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.no_gpu
@pytest.mark.parametrize("arrivals", emulated.ARRIVALS)
@pytest.mark.parametrize("order", emulated.ORDERS)
@pytest.mark.parametrize("p", [MATMULS[1], MATMULS[4]], ids=["A in memory", "A in registers"])
@pytest.mark.parametrize(
    "left_out, why", [(1, "without a wgmma.fence"), (2, "register that a wgmma in flight"), (4, "race: .*wgmma")]
)
def test_wgmma_with_a_step_left_out(p: Matmul, left_out: int, why: str, order: str, arrivals: str) -> None:
    with pytest.raises(EmulationError, match=why):
        wgmma(p, 128, left_out, order=order, arrivals=arrivals)
