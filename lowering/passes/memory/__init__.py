"""In-place updates, memory planning and releases."""
