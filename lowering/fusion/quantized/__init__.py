"""Matmuls and moves of quantized values without dequantization."""
