"""Fusion around matmuls and of launches."""
