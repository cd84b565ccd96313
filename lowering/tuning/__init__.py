"""Tuning: MetaSchedule measures candidates for a model's kernels, and databases record the results."""
