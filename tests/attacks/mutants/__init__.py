"""Damaged copies of exported models: each is rejected by a LoweringError, or computes what ONNX Runtime computes.

`python -m tests.attacks.mutants --cases 1500`. Every mutant goes through `check`, one of ten through `compile` and,
where that passes, the calls of its sample.
"""
