"""Arithmetic: element-wise operators, matmuls, reductions and transforms."""
