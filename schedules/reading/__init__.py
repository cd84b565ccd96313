"""What a function says, for the rules of all targets: stages, products of matrices among them, values at a point."""
