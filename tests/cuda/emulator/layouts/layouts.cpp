// What kernels for Hopper assume of layouts, against CuTe's: descriptors of tiles in shared memory, swizzled addresses,
// fragments. emitted.h, which test_layouts.py writes of emitted code, has a line for each tile. Host code only.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

using namespace cute;
using Half = cutlass::half_t;

constexpr uint32_t START = 0x400;  // bytes; a tile begins at a multiple of 1024
int differences = 0;

void expect(bool same, const char* what, int a, int b) {
  if (!same && ++differences < 20) printf("%s differs at %d, %d\n", what, a, b);
}

// Bits of a descriptor as wgmma has them: offsets in units of 16 bytes, 128-byte swizzle.
uint64_t descriptor(uint32_t start, int leading, int stride) {
  return uint64_t((start >> 4) & 0x3FFF) | uint64_t(leading & 0x3FFF) << 16 | uint64_t(stride & 0x3FFF) << 32 | uint64_t(1) << 62;
}

template <class Slice>
uint32_t start_of(const Slice& slice) {
  return (uint32_t)(uintptr_t)raw_pointer_cast(recast<uint128_t const>(slice).data());
}

// A tile of so many rows by `Depth` values of k, which are successive; steps: units of 16 bytes from its start to each 16
// values of k. The leading offset counts only where a matmul leaves a panel of 64 values.
template <int Rows, int Depth>
void k_major(const char* what, int leading, int stride, std::vector<int> steps) {
  auto layout = tile_to_shape(GMMA::Layout_K_SW128_Atom<Half>{}, Shape<Int<Rows>, Int<Depth>>{}, Step<_1, _2>{});
  auto tile = make_tensor(make_smem_ptr((Half*)START), layout);
  expect(steps.size() == Depth / 16, what, steps.size(), Depth / 16);
  for_each(make_seq<Depth / 16>{}, [&](auto k) {
    auto slice = local_tile(tile, Shape<Int<Rows>, _16>{}, make_coord(_0{}, k));
    auto theirs = GMMA::make_gmma_desc<GMMA::Major::K>(slice);
    uint64_t got;
    memcpy(&got, &theirs, 8);
    uint32_t ours = START + steps[k] * 16;
    expect(got >> 32 == descriptor(ours, leading, stride) >> 32 && start_of(slice) == ours, what, (int)k, ours);
  });
}

// A tile of so many values of k, one below the other, by `Columns` columns, which are successive.
template <int Depth, int Columns>
void mn_major(const char* what, int leading, int stride, std::vector<int> steps) {
  auto layout = tile_to_shape(GMMA::Layout_MN_SW128_Atom<Half>{}, Shape<Int<Columns>, Int<Depth>>{}, Step<_2, _1>{});
  auto tile = make_tensor(make_smem_ptr((Half*)START), layout);
  expect(steps.size() == Depth / 16, what, steps.size(), Depth / 16);
  for_each(make_seq<Depth / 16>{}, [&](auto k) {
    auto slice = local_tile(tile, Shape<Int<Columns>, _16>{}, make_coord(_0{}, k));
    auto theirs = GMMA::make_gmma_desc<GMMA::Major::MN>(slice);
    uint64_t got;
    memcpy(&got, &theirs, 8);
    got |= start_of(slice) >> 4;
    uint64_t ours = descriptor(START + steps[k] * 16, Columns > 64 ? leading : 0, stride);
    expect(got == ours, what, (int)k, Columns);
  });
}

// Where the tensor memory accelerator puts element (row, column) of a tile in panels of 64 columns, by ours and by theirs.
template <int Rows, int Columns>
void addresses() {
  auto along = tile_to_shape(GMMA::Layout_K_SW128_Atom<Half>{}, Shape<Int<Rows>, Int<Columns>>{}, Step<_1, _2>{});
  auto across = tile_to_shape(GMMA::Layout_MN_SW128_Atom<Half>{}, Shape<Int<Columns>, Int<Rows>>{}, Step<_2, _1>{});
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < Columns; c++) {
      int chunk = (c % 64 / 8) ^ (r % 8), ours = c / 64 * Rows * 128 + r * 128 + chunk * 16 + c % 8 * 2;
      expect(as_position_independent_swizzle_layout(along)(r, c) * 2 == ours, "address along rows", r, c);
      expect(as_position_independent_swizzle_layout(across)(c, r) * 2 == ours, "address across rows", r, c);
    }
}

// Sums of wgmma: register i of thread t has row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (t % 4) + i % 2.
template <class Layout, int N>
void sums() {
  for (int t = 0; t < 128; t++)
    for (int i = 0; i < N / 2; i++) {
      int at = Layout{}(t, i), row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      expect(at % 64 == row && at / 64 == column, "sums of wgmma", t, i);
    }
}

void fragments() {
  for (int t = 0; t < 128; t++)
    for (int v = 0; v < 8; v++) {
      int at = SM90::GMMA::ALayout_64x16{}(t, v), r = v / 2, row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8;
      expect(at % 64 == row && at / 64 == t % 4 * 2 + v % 2 + r / 2 * 8, "A of wgmma in registers", t, v);
    }
  using Matmul = MMA_Traits<SM80_16x8x16_F32F16F16F32_TN>;
  for (int t = 0; t < 32; t++) {
    int g = t / 4, q = t % 4;
    for (int v = 0; v < 8; v++) {
      int at = Matmul::ALayout{}(t, v), r = v / 2;
      expect(at % 16 == g + r % 2 * 8 && at / 16 == 2 * q + v % 2 + r / 2 * 8, "A of mma.sync", t, v);
    }
    for (int v = 0; v < 4; v++) {
      int b = Matmul::BLayout{}(t, v), c = Matmul::CLayout{}(t, v);
      expect(b % 8 == g && b / 8 == v / 2 * 8 + 2 * q + v % 2, "B of mma.sync", t, v);
      expect(c % 16 == g + v / 2 * 8 && c / 16 == 2 * q + v % 2, "C of mma.sync", t, v);
    }
    // ldmatrix: register m of thread t is row t / 4 of matrix m, whose address thread 8 m + t / 4 gave; transposed, a column.
    using Plain = Copy_Traits<SM75_U32x4_LDSM_N>;
    using Transposed = Copy_Traits<SM75_U16x8_LDSM_T>;
    for (int v = 0; v < 128; v++) {
      int m = v / 32, half = v % 32 / 16, bit = v % 16;
      int plain = Plain::SrcLayout{}(8 * m + g, q * 32 + v % 32);
      int transposed = Transposed::SrcLayout{}(8 * m + 2 * q + half, g * 16 + bit);
      expect(Plain::DstLayout{}(t, v) == plain, "ldmatrix", t, v);
      expect(Transposed::DstLayout{}(t, v) == transposed, "ldmatrix, transposed", t, v);
    }
  }
}

int main() {
  fragments();
  sums<SM90::GMMA::CLayout_64x64, 64>();
  sums<SM90::GMMA::CLayout_64x128, 128>();
  sums<SM90::GMMA::CLayout_64x256, 256>();
  addresses<64, 128>();
  addresses<128, 64>();
#include "emitted.h"
  printf("%d differences\n", differences);
  return differences != 0;
}
