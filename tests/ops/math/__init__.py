"""Elementwise operators, reductions and matmuls."""
