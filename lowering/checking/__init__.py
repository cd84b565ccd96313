"""Validation of models: nodes that cannot be lowered, and comparison of outputs with a reference."""
