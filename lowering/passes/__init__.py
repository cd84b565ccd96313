"""Passes of our own in lowering/pipeline.py's list, one per file."""
