"""A generator of attacks on every operator, in processes that may die, with memory that shows foreign accesses."""
