"""The caches of decoders: how exporters write them, and their conversion to slots."""
