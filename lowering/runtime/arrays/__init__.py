"""Arrays of callers as tensors, and results as arrays."""
