// Tiles of operands of wgmma, for test_emulated_tensor_cores.py.
#include <cstdint>
#include <cuda.h>
#include <cuda_fp16.h>
// A tile of `rows` rows in panels of `width` bytes; 8 rows of a panel with a swizzle make its pattern.
struct Tile {
  int panels, rows, width, swizzle, leading, stride, k_step_in_panel, k_steps_per_panel, k_step_of_panels;
  __device__ int bytes() const { return panels * rows * width; }
  __device__ uint64_t descriptor(const char* tile, int k) const {
    const uint64_t layouts[4] = {0, 3, 2, 1};
    uint64_t at = __cvta_generic_to_shared(tile) + k % k_steps_per_panel * k_step_in_panel +
                  k / k_steps_per_panel * k_step_of_panels;
    return at >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | layouts[swizzle] << 62;
  }
};
__device__ void load(const CUtensorMap* map, char* tile, uint64_t* bar, const Tile& t) {
  for (int i = 0; i < t.panels; ++i)
    asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
      "r"((unsigned)__cvta_generic_to_shared(tile + i * t.rows * t.width)), "l"(map), "r"(i * t.width / 2), "r"(0),
      "r"((unsigned)__cvta_generic_to_shared(bar)) : "memory");
}
__device__ void load_tiles(const CUtensorMap& a, const CUtensorMap& b, char* tiles, uint64_t* bar, const Tile& ta,
                           const Tile& tb) {
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"((unsigned)__cvta_generic_to_shared(bar)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::
      "r"((unsigned)__cvta_generic_to_shared(bar)), "r"(ta.bytes() + tb.bytes()) : "memory");
    load(&a, tiles, bar, ta);
    load(&b, tiles + ta.bytes(), bar, tb);
  }
}
__device__ void wait_for(uint64_t* bar) {
  asm volatile(
    "{\n.reg .pred P;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0;\n@!P bra AGAIN;\n}\n" ::
    "r"((unsigned)__cvta_generic_to_shared(bar)) : "memory");
}
