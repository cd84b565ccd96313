"""What a function says, for the rules of all targets: stages, matmuls among them, values at a point."""
