// Stands in for the header of the CUDA toolkit: emulation.h, which every kernel is compiled with, has its contents.
