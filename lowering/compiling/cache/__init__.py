"""Caches of artifacts and of object code on disk, and the fingerprints in their keys."""
