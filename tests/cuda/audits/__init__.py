"""Machine code, models of loops and estimates."""
