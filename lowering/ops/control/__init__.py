"""Control flow, loops, sequences and optional values."""
