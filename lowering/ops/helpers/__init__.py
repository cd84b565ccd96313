"""Helpers of operators: requirements, contents, kernels of moves."""
