"""Tuning: MetaSchedule measures what a model's kernels could be, and databases keep what was found."""
