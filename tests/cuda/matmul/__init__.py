"""Matmuls, their fusions and mixtures of experts."""
