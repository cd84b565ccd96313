"""Benchmarks and throughput."""
