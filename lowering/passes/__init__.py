"""Our passes in the list of lowering/compiling/pipeline.py, one per file."""
