"""Matmuls on GPUs."""
