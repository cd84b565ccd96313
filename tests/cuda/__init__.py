"""CUDA kernels, emulated or on the GPU of this machine."""
