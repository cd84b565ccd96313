"""Branches, loops, sequences and strings."""
