"""Fixed, symbolic and undeclared sizes."""
