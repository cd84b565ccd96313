// Matrices in the registers of a warp: ldmatrix, stmatrix, mma.sync. Fragments as in the PTX manual: g = lane / 4 is a row,
// t = lane % 4 a pair of columns.
#include <cstring>
#include <utility>

#include "accesses.h"
#include "elements.h"
#include "memory.h"
#include "meeting.h"
#include "settings.h"

using namespace emulation;

namespace {

float from_tf32(uint32_t bits) {
  if (bits & 0x1FFF) fail("mma.sync multiplies a float32 that was not rounded to TF32");
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct Rows {
  uint32_t* registers;
  uint32_t address;
};

// Lane 8 m + r gives the address of row r of matrix m, which has 8 elements of 16 bits.
void move_matrices(uint32_t* registers, int count, bool transposed, uint32_t address, bool write,
                   const void* site) {
  static const char keys[16] = {};
  const char* name = write ? "stmatrix" : "ldmatrix";
  if (current->lane() < 8 * count) {
    shared(address, 16, 16, name);
    order_access(address, 16, write);
    count_access(site, (uint64_t)shared(address), 16, write);
  }
  Rows own{registers, address};
  meet_warp(&keys[count + 8 * transposed - 1], name, &own, [=](void** lanes) {
    for (int m = 0; m < count; m++)
      for (int lane = 0; lane < WARP; lane++)
        for (int e = 0; e < 2; e++) {
          int row = lane / 4, column = lane % 4 * 2 + e;
          if (transposed) std::swap(row, column);
          char* element = shared(((Rows*)lanes[8 * m + row])->address) + 2 * column;
          char* half = (char*)&((Rows*)lanes[lane])->registers[m] + 2 * e;
          memcpy(write ? element : half, write ? half : element, 2);
        }
  });
}

}  // namespace

void emu_ldmatrix(uint32_t* d, int count, int transposed, uint32_t address) {
  move_matrices(d, count, transposed, address, false, __builtin_return_address(0));
}

void emu_stmatrix(const uint32_t* s, int count, int transposed, uint32_t address) {
  move_matrices((uint32_t*)s, count, transposed, address, true, __builtin_return_address(0));
}

// D [16, 8] = A [16, k] B [k, 8] + C, k 8 or 16, float32 accumulators. Of TF32, k is 8, and a register one element.
void emu_mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, int kind) {
  static const char keys[64] = {};
  struct Fragments {
    float* d;
    const uint32_t *a, *b;
    const float* c;
  } own{d, a, b, c};
  meet_warp(&keys[k + kind], "mma.sync", &own, [=](void** lanes) {
    settings.matmuls++;
    static float A[16][16], B[16][8];
    if (kind == TF32) {
      for (int lane = 0; lane < WARP; lane++) {
        auto& f = *(Fragments*)lanes[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) A[g + i % 2 * 8][t + i / 2 * 4] = from_tf32(f.a[i]);
        for (int i = 0; i < 2; i++) B[t + i * 4][g] = from_tf32(f.b[i]);
      }
    }
    auto element = [kind](uint32_t word, int e) { return to_float(word >> 16 * e, kind); };
    for (int lane = 0; lane < WARP; lane++) {
      auto& f = *(Fragments*)lanes[lane];
      int g = lane / 4, t = lane % 4;
      for (int step = 0; step < (kind == TF32 ? 0 : k / 8); step++)
        for (int e = 0; e < 2; e++) {
          A[g][8 * step + 2 * t + e] = element(f.a[2 * step], e);
          A[g + 8][8 * step + 2 * t + e] = element(f.a[2 * step + 1], e);
          B[8 * step + 2 * t + e][g] = element(f.b[step], e);
        }
    }
    for (int lane = 0; lane < WARP; lane++) {
      auto& f = *(Fragments*)lanes[lane];
      for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = f.c[i];
        for (int q = 0; q < k; q++) sum += A[row][q] * B[q][column];
        f.d[i] = canonical(sum);
      }
    }
  });
}
