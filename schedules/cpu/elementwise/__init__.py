"""Element-wise functions, reductions and windows on CPUs."""
