"""Analyses of a function, for the rules of all targets: its stages, the matmuls among them, and values at a point."""
