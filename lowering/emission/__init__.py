"""A model as one native function: C code of `main`, and kernels with C signatures."""
