"""Whole models, steps, graphs and benchmarks."""
