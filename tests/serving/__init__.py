"""Serving: batches of requests, paged caches and their operators."""
