"""Benchmarks compared with the libraries that users have today: `python -m benchmarks cpu`, run from a checkout.

`cases` says what is computed, `peers` how each library does it, `limits` what the machine could do; `measure` lets all
of them take turns on one case, on several threads in processes of their own (`isolated`), and `report` reads the
records.
"""
