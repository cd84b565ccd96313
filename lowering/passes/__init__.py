"""Passes of our own in lowering/compiling/pipeline.py's list, one per file."""
