"""The search: tasks, spaces of candidates, cost models and the final comparison."""
