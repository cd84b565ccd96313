// FlashAttention-3, forward, with the tiles that it chooses itself: DIM, CLUSTER, CAUSAL and TYPE are given to nvcc.
#include "flash_fwd_launch_template.h"

template void run_flash_fwd<90, DIM, DIM, CLUSTER, cutlass::TYPE, cutlass::TYPE, CAUSAL, false, false, false, false,
                            false, false, false, false, false>(Flash_fwd_params &, cudaStream_t);
