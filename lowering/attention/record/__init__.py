"""The record of an attention: the problem, its cache layout, and its formulas."""
