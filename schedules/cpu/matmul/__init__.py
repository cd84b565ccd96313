"""Matmuls on CPUs."""
