"""SIMD building blocks, elementary functions and cycle models."""
