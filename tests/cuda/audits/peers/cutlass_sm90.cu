// CUTLASS's matmul for Hopper. nvcc is told TILE_M, TILE_N, CLUSTER (blocks that share their tiles of B) and
// SCHEDULE (Cooperative or Pingpong). float16, A [M, K] and B [N, K] in rows of k, accumulators in float32.
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)

using cute::_1;
using Half = cutlass::half_t;
using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
using TileShape = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::_64>;
using Cluster = cute::Shape<cute::Int<CLUSTER>, _1, _1>;
using Schedule = cutlass::gemm::NAMED(KernelTmaWarpSpecialized, SCHEDULE);
using EpilogueSchedule = cute::conditional_t<
    cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedPingpong>, cutlass::epilogue::TmaWarpSpecialized,
    cutlass::epilogue::TmaWarpSpecializedCooperative>;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Half, Rows, 8, Half, Rows, 8,
    EpilogueSchedule>::CollectiveOp;

using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Half, Rows, 8, Half, Columns, 8, float, TileShape, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;

template __global__ void cutlass::device_kernel<Kernel>(CUTLASS_GRID_CONSTANT typename Kernel::Params const);
