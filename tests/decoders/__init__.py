"""Static caches and the parts of decoders."""
