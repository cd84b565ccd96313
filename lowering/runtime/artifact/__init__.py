"""Artifacts as files: reading, checks, signatures and weights."""
