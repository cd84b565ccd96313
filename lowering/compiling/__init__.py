"""Compilation of an imported model into an artifact."""
